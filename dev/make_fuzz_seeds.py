#!/usr/bin/env python3
"""Makes tests/fuzz/seeds/<target>/: small inputs from which the fuzzers start. What their bytes mean stands
at the head of each tests/fuzz/fuzz_*.c.

    python3 dev/make_fuzz_seeds.py

What a fuzzer once found lies there besides, named found-*; this script leaves those alone."""
import json
import os
import struct
import zlib

ROOT = os.path.join(os.path.dirname(__file__), "..", "tests", "fuzz", "seeds")


def seed(target, name, content):
    folder = os.path.join(ROOT, target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as file:
        file.write(content)


def gzip(text, level=9):
    packer = zlib.compressobj(level, zlib.DEFLATED, 31)
    return packer.compress(text) + packer.flush()


# stories: a byte for sizes, then the file.
text = b"Anna found a ball.\r\n<|endoftext|>\n\n<|endoftext|>Ben's 12 hats \xe2\x98\x83 \xff\0 aaaa\n"
text += b"<|endoftext"
seed("stories", "text", b"\x47" + text)
letters = "  l'\u00e9t\u00e9 we'll don't \u4e2d\u6587 \u00a0\u2003 \u0661\u0662 \U0001f600"
seed("stories", "letters", b"\x83" + letters.encode())
seed("stories", "gzip", b"\x05" + gzip(text))
seed("stories", "members", b"\x1e" + gzip(text[:30]) + gzip(b"") + gzip(text[30:], 0))
seed("stories", "cut", b"\x02" + gzip(text)[:-6])

# merges: the file, a NUL, text to encode.
seed("merges", "small", b"#version: 0.2\nh e\nhe l\n\xc4\xa0 hel\n\0 hello hel<|endoftext|>\xff")
seed("merges", "plain", b"a a\naa aa\naaaa aaaa\r\n\0aaaaaaaaaaa")
seed("merges", "letters", "\u0120 t\n\u0120t he\n".encode())

# shards: a byte for the form, then the file or the part of it that is not filled in.
merges = b"#version: 0.2\nh e\nhe l\n"
tokens = struct.pack("<9H", 5, 258, 0, 256, 257, 1, 2, 3, 4)


def header(magic=b"GPTSHARD", width=2, count=9, vocab=259):
    return struct.pack("<8sIIQIIQI", magic, 1, width, count, vocab, zlib.crc32(merges), len(merges), 1 << 20)


whole = header().ljust(1020, b"\0")
whole += struct.pack("<I", zlib.crc32(whole)) + tokens + struct.pack("<I", zlib.crc32(tokens))
seed("shards", "whole", b"\x14" + whole)
seed("shards", "two-bytes", b"\x0d" + header() + tokens)
seed("shards", "four-bytes", b"\x09" + header(width=4, count=3) + struct.pack("<3I", 7, 258, 0))
seed("shards", "llmc", b"\x16" + struct.pack("<3i", 20240520, 1, 9) + tokens)
seed("shards", "llmc-whole", b"\x0c" + struct.pack("<3i", 20240520, 1, 9).ljust(1024, b"\0") + tokens)

# safetensors: a byte for the form, the data's size and the header; or the file.
C, T, V = 2, 1, 2
shapes = {"wte.weight": [V, C], "wpe.weight": [T, C]}
for name, shape in {
    "ln_1.weight": [C], "ln_1.bias": [C], "attn.c_attn.weight": [C, 3 * C], "attn.c_attn.bias": [3 * C],
    "attn.c_proj.weight": [C, C], "attn.c_proj.bias": [C], "ln_2.weight": [C], "ln_2.bias": [C],
    "mlp.c_fc.weight": [C, 4 * C], "mlp.c_fc.bias": [4 * C],
    "mlp.c_proj.weight": [4 * C, C], "mlp.c_proj.bias": [C],
}.items():
    shapes["h.0." + name] = shape
shapes["ln_f.weight"], shapes["ln_f.bias"] = [C], [C]


def tensors(dtype="F32", width=4, prefix="", more=()):
    entries, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, dtype, width in [(n, s, dtype, width) for n, s in shapes.items()] + list(more):
        size = width
        for side in shape:
            size *= side
        entries[prefix + name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return json.dumps(entries, separators=(",", ":")).encode(), offset


for name, (text, size) in {
    "f32": tensors(),
    "f16": tensors("F16", 2, "transformer."),
    "bf16": tensors("BF16", 2, more=[("h.0.attn.bias", [1, 1, 1, 1], "BOOL", 1),
                                     ("lm_head.weight", [0], "I64", 8)]),
}.items():
    seed("safetensors", name, b"\x01" + struct.pack("<H", size) + text)
text, size = tensors()
seed("safetensors", "whole", b"\0" + struct.pack("<Q", len(text)) + text + bytes(size))

# config: config.json or state.json.
config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 257,
          "n_inner": None, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new",
          "tie_word_embeddings": True}
seed("config", "gpt2", json.dumps(config).encode())
seed("config", "rotary", json.dumps(dict(config, model_type="train_gpt_rotary", n_inner=64)).encode())
seed("config", "large", json.dumps(dict(config, n_embd=2147483646, n_positions=2147483647,
                                        vocab_size=16777216)).encode())
state = {"step": 3, "updates": 3, "tokens": 96, "total_steps": 9223372036854775807, "best_step": 0,
         "seconds": 1.5, "eval_loss": None, "best_loss": 2.5}
seed("config", "state", json.dumps(state).encode())

# manifest: a byte for whether the last line is put in, then the lines.
lines = b""
for name, content in {"a": b"five\n", "config.json": b"{}", "empty": b""}.items():
    lines += b"%d %08x %s\n" % (len(content), zlib.crc32(content), name.encode())
seed("manifest", "whole", b"\0" + lines + b"end %08x\n" % zlib.crc32(lines))
seed("manifest", "lines", b"\1" + lines)
for file, name in {"link": "link", "pipe": "pipe", "folder": "folder", "up": "..", "itself": "MANIFEST",
                   "inside": "folder/a"}.items():
    seed("manifest", "names-" + file, b"\1" + b"0 00000000 %s\n" % name.encode())

# settings: run.json.
settings = {"data": None, "heldout": "a b", "vocab": 257, "layers": 3, "heads": 1, "position": "rotary",
            "dropout": 0.5, "attention": "flash", "deterministic": False, "batch": 4, "micro": None,
            "steps": 7, "minutes": None, "lr": 0.003, "min_lr": None, "seed": 9007199254740992,
            "prompt": "once \u00e9", "top_p": 1,
            "chosen": ["warmup"], "train_identity": 4294967295, "version": "0.1.0"}
seed("settings", "all", json.dumps(settings).encode())
seed("settings", "nested", b'{"steps": 7, "a": {"b": {"c": [1, {}, ""]}, "d": {}}, "lr": 1e2}')

# log: a byte for the step, then the log.
rows = [
    {"type": "start", "time": 1700000000, "version": "0.1.0", "config": {},
     "attention": {"kernel": "flash"}},
    {"type": "eval", "step": 0, "loss": 5.5, "bits_per_byte": 2.5, "tokens": 64, "floor": 1.25},
    {"type": "step", "step": 1, "loss": 5.25, "lr": 1e-3, "grad_norm": 1.5, "ms": 2.5, "tokens_per_s": 1e5,
     "mfu": None, "tokens": 64},
    {"type": "step", "step": 2, "loss": None, "lr": 1e-3, "grad_norm": None, "ms": 2.5, "tokens_per_s": 1e5,
     "mfu": 0.5, "tokens": 128},
    {"type": "sample", "step": 2, "prompt": "On", "text": "Once <b> \u0000 \u00e9"},
    {"type": "end", "step": 2, "reason": "done", "peak_memory_bytes": 1000000},
]
lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
seed("log", "all", b"\1" + lines)
seed("log", "torn", b"\2" + lines[:-20])

# options: arguments, each ended by a NUL.
for number, arguments in enumerate([
    "-data a.txt -vocab 300 --layers=2 -position learned -deterministic -lr 1e-3 -prompt=a -no-such 1",
    "-steps 100 -min-lr 0 -eval-every 0 -top-p 0.5 -resume=false --seed 9007199254740992 -attention naive",
    "-batch 4 -micro -1", "-clip 1e9 -dropout .5 -minutes 0.5 -keep 3 -run x -help"]):
    seed("options", str(number), arguments.replace(" ", "\0").encode())
