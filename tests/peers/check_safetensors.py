"""check_safetensors.py CHECKPOINT THEIRS - holds a checkpoint of tests/test_checkpoint.c against the
safetensors package, and writes its weights again into the folder THEIRS, named as GPT-2 with its head is
saved, in the package's own order. Status 77: the package is not here."""

import json
import os
import sys

try:
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file
except ImportError:
    sys.exit(77)


def expected_names(config):
    """GPT-2's parameters in network order, with their shapes."""
    C, V, T = config["n_embd"], config["vocab_size"], config["n_positions"]
    yield "wte.weight", (V, C)
    yield "wpe.weight", (T, C)
    for layer in range(config["n_layer"]):
        for name, shape in [
            ("ln_1.weight", (C,)), ("ln_1.bias", (C,)),
            ("attn.c_attn.weight", (C, 3 * C)), ("attn.c_attn.bias", (3 * C,)),
            ("attn.c_proj.weight", (C, C)), ("attn.c_proj.bias", (C,)),
            ("ln_2.weight", (C,)), ("ln_2.bias", (C,)),
            ("mlp.c_fc.weight", (C, 4 * C)), ("mlp.c_fc.bias", (4 * C,)),
            ("mlp.c_proj.weight", (4 * C, C)), ("mlp.c_proj.bias", (C,)),
        ]:
            yield f"h.{layer}.{name}", shape
    yield "ln_f.weight", (C,)
    yield "ln_f.bias", (C,)


def numbers(buffer, parameter, shape):
    """number_at of test_checkpoint.c."""
    i = np.arange(np.prod(shape), dtype=np.int64)
    return ((buffer * 7919 + parameter * 131 + i) % 4093 / 256 - 8).astype(np.float32).reshape(shape)


def main():
    checkpoint, theirs = sys.argv[1:]
    with open(os.path.join(checkpoint, "config.json")) as file:
        table = list(expected_names(json.load(file)))
    bad = []
    for name, prefixes in ("model", [""]), ("optimizer", ["m.", "v."]):
        path = os.path.join(checkpoint, name + ".safetensors")
        with safe_open(path, framework="np") as file:
            if file.metadata() != {"format": "pt"}:
                bad.append(f"{name}: metadata {file.metadata()}")
        tensors = load_file(path)
        wanted = {}
        for part, prefix in enumerate(prefixes):
            for parameter, (key, shape) in enumerate(table):
                wanted[prefix + key] = numbers(part + (name == "optimizer"), parameter, shape)
        if set(tensors) != set(wanted):
            bad.append(f"{name}: names differ: {sorted(set(tensors) ^ set(wanted))}")
        for key in set(tensors) & set(wanted):
            if tensors[key].dtype != np.float32 or not np.array_equal(tensors[key], wanted[key]):
                bad.append(f"{name}: {key} differs")
    for line in bad:
        print("  check_safetensors.py:", line)
    os.makedirs(theirs, exist_ok=True)
    tensors = {"transformer." + key: numbers(0, p, shape) for p, (key, shape) in enumerate(table)}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    save_file(tensors, os.path.join(theirs, "model.safetensors"), metadata={"format": "pt"})
    return 1 if bad else 0


sys.exit(main())
