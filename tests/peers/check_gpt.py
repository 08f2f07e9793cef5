"""check_gpt.py [--dump build/release/tests/peers/dump_gpt] [--device cpu|cuda|cuda-fp32] [--verbose]

Holds the program to a GPT in PyTorch, whose backward pass is autograd's and whose optimizer is torch.optim's:
tests/peers/dump_gpt makes small models, some of odd sizes, with learned and with rotary positions, and writes
the checkpoint it begins with, logits, loss, all gradients of the first batch, and the checkpoint after 20
AdamW steps; from the same model.safetensors and tokens PyTorch computes the same. Without --device: on every
device and with every attention of this build that the machine has. Runs on a CPU; only PyTorch is needed.

Bounds. ref is the PyTorch model in float64, plain the same in the precision in question, ours the program's.
In fp32 plain is PyTorch's fp32. In bf16 it is PyTorch's bf16: weights, every activation and every activation's
gradient, S, P and the logits rounded to bf16, sums in fp32. plain - ref and ours - ref are sums of one
rounding for each of the same operations, carried to a result by the same derivatives, so of one size. With u
the unit roundoff (2^-24 or 2^-8), a tensor of logits or gradients is held to
    max|ours - ref| <= 2 max|plain - ref| + 8 u max|ref|,
the last for tensors where plain happens to have next to no rounding to show: eight roundings of the largest
element are what one operation on it takes. A mean loss is off by no more than its tokens' losses are in the
mean; it is summed in more than fp32 from logits, so u is that of fp32.
After 20 steps it is the mean over a tensor instead of the maximum, for the way that the weights went, m and v
alike: Adam divides a gradient by its own size, so one that is nothing but rounding moves its weight by lr, up or
down, whoever computes it; a maximum would compare luck. And since what one such weight does reaches all
others in the next steps, one plain run is one throw of the dice: there are six, five of them from weights moved
by one unit roundoff, up or down at random, and the largest of their errors counts. With learned positions the
keys' bias adds the same to all scores of a row, which softmax does not see: its gradient is zero, what is
computed of it is rounding alone, as large as each way of summing makes it, and so its way is left out. With one
token a sequence that holds for all of queries and keys.

The last line is "check_gpt: N passed, N failed, N skipped". Status 1 where one failed, 77 where PyTorch is
not here."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from torch.nn import functional as F
except ImportError:
    print("no PyTorch")
    sys.exit(77)

STEPS = 20
LR, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0  # as in dump_gpt.c
FLOOR, PLAIN_RUNS = 8, 6
U32, U16 = 2.0**-24, 2.0**-8

# layers, heads, channels, ctx, vocab, batch. Flash attention on a GPU takes heads of 32, 64, 96 or 128.
SHAPES = [(3, 3, 48, 37, 300, 2), (2, 3, 96, 70, 257, 2), (1, 2, 128, 129, 1000, 1), (1, 1, 32, 1, 300, 3)]


def raw(path, dtype):
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=dtype)


def read_safetensors(path):
    """name -> float64 tensor, in the order of the file."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    header.pop("__metadata__")
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert entry["dtype"] == "F32", (name, entry)
        begin, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(data[begin:end], dtype=torch.float32).view(entry["shape"]).double()
    return tensors


class Gpt(torch.nn.Module):
    """GPT-2 from weights under Hugging Face's names, matrices [in, out]; computed in `dtype`. Weights are kept
    in it too, but for bf16: then they are fp32, and rounded where they are used."""

    def __init__(self, weights, config, dtype):
        super().__init__()
        self.heads, self.layers, self.dtype = config["n_head"], config["n_layer"], dtype
        self.rotary = config["model_type"] != "gpt2"
        held = torch.float32 if dtype == torch.bfloat16 else dtype
        self.names = list(weights)
        self.held = torch.nn.ParameterList(
            torch.nn.Parameter(tensor.detach().to(held, copy=True)) for tensor in weights.values())

    def rotate(self, x):
        """x (B, H, T, D): the halves of a head turned by t / 10000^(2 i / D)."""
        T, D = x.shape[-2:]
        exact = torch.float64
        angle = torch.arange(T, dtype=exact)[:, None] * 10000.0 ** (-2 * torch.arange(D // 2, dtype=exact) / D)
        wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        a, b = x.to(wide).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def forward(self, tokens):
        w = {name: tensor.to(self.dtype) for name, tensor in zip(self.names, self.held)}
        B, T = tokens.shape
        C = w["wte.weight"].shape[1]
        hidden_mask = torch.ones(T, T, dtype=torch.bool).triu(1)

        def norm(x, name):
            return F.layer_norm(x, (C,), w[name + ".weight"], w[name + ".bias"], 1e-5)

        def linear(x, name):
            return x @ w[name + ".weight"] + w[name + ".bias"]

        x = w["wte.weight"][tokens]
        if not self.rotary:
            x = x + w["wpe.weight"]
        for layer in range(self.layers):
            h = f"h.{layer}."
            qkv = linear(norm(x, h + "ln_1"), h + "attn.c_attn")
            q, k, v = qkv.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            if self.rotary:
                q, k = self.rotate(q), self.rotate(k)
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            p = scores.masked_fill(hidden_mask, float("-inf")).softmax(-1)
            x = x + linear((p @ v).transpose(1, 2).reshape(B, T, C), h + "attn.c_proj")
            x = x + linear(F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh"),
                           h + "mlp.c_proj")
        return norm(x, "ln_f") @ w["wte.weight"].T


def token_losses(logits, targets):
    wide = torch.float32 if logits.dtype == torch.bfloat16 else logits.dtype
    return F.cross_entropy(logits.to(wide).flatten(0, 1), targets.flatten(), reduction="none")


def train(weights, config, batches, dtype):
    """Everything that dump_gpt writes, in float64, and the first batch's losses token by token."""
    gpt = Gpt(weights, config, dtype)
    groups = [{"params": [p for p in gpt.held if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in gpt.held if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPSILON)
    found = {"losses": []}
    for i, (inputs, targets) in enumerate(batches):
        logits = gpt(inputs)
        losses = token_losses(logits, targets)
        optimizer.zero_grad()
        losses.mean().backward()
        found["losses"].append(losses.mean().item())
        if i == 0:
            found["logits"], found["token losses"] = logits.detach().double(), losses.detach().double()
            found["gradients"] = {n: p.grad.double() for n, p in zip(gpt.names, gpt.held)}
            continue
        # Written out: clip_grad_norm_ adds 1e-6 to the norm.
        norm = torch.stack([p.grad.norm() for p in gpt.held]).norm()
        for p in gpt.held:
            p.grad *= torch.clamp(CLIP / norm, max=1.0)
        optimizer.step()
    found["m"] = {n: optimizer.state[p]["exp_avg"].double() for n, p in zip(gpt.names, gpt.held)}
    found["v"] = {n: optimizer.state[p]["exp_avg_sq"].double() for n, p in zip(gpt.names, gpt.held)}
    found["way"] = {n: p.detach().double() - weights[n] for n, p in zip(gpt.names, gpt.held)}
    return found


def train_plain(weights, config, batches, dtype):
    """PLAIN_RUNS times the same, but for the weights that all but the first begin with."""
    generator = torch.Generator().manual_seed(1)
    runs = [train(weights, config, batches, dtype)]
    while len(runs) < PLAIN_RUNS:
        u = U16 if dtype == torch.bfloat16 else 2 * U32  # half of it would be rounded away
        moved = {n: (w * (1 + u * (2 * torch.randint(2, w.shape, generator=generator) - 1))).float().double()
                 for n, w in weights.items()}
        runs.append(train(moved, config, batches, dtype))
    return runs


def read_dump(folder, shape):
    layers, heads, channels, ctx, vocab, batch = shape
    start = os.path.join(folder, "step-00000000")
    with open(os.path.join(start, "config.json")) as file:
        config = json.load(file)
    weights = read_safetensors(os.path.join(start, "model.safetensors"))
    tokens = raw(os.path.join(folder, "tokens.i32"), torch.int32).view(1 + STEPS, 2, batch, ctx).long()
    ours = {"logits": raw(os.path.join(folder, "logits.f32"), torch.float32).view(batch, ctx, vocab).double(),
            "losses": raw(os.path.join(folder, "losses.f64"), torch.float64).tolist(), "gradients": {}}
    flat = raw(os.path.join(folder, "gradients.f32"), torch.float32).double()
    for name, tensor in weights.items():
        ours["gradients"][name], flat = flat[: tensor.numel()].view(tensor.shape), flat[tensor.numel():]
    assert flat.numel() == 0, "gradients.f32 is longer than the model"
    after = os.path.join(folder, f"step-{STEPS:08d}")
    ours["way"] = {name: tensor - weights[name]
                   for name, tensor in read_safetensors(os.path.join(after, "model.safetensors")).items()}
    moments = read_safetensors(os.path.join(after, "optimizer.safetensors"))
    for part in "m", "v":
        ours[part] = {name: moments[f"{part}.{name}"] for name in weights}
    return config, weights, tokens, ours


def largest(x):
    return x.abs().max().item()


def mean(x):
    return x.abs().mean().item()


def check(ours, ref, plain, u):
    """What is out of bounds, as lines; and the largest share of a bound that was used, by kind."""
    bad, used = [], {}

    def hold(kind, what, error, bound):
        used[kind] = max(used.get(kind, 0), error / bound)
        if not error <= bound:
            bad.append(f"{kind}{what}: off by {error:.3g}, allowed {bound:.3g}")

    def hold_tensor(kind, what, a, r, plains, size):
        hold(kind, what, size(a - r), 2 * max(size(p - r) for p in plains) + FLOOR * u * size(r))

    first = plain[0]
    hold_tensor("logits", "", ours["logits"], ref["logits"], [first["logits"]], largest)
    loss = ref["losses"][0]
    bound = 2 * mean(first["token losses"] - ref["token losses"]) + FLOOR * U32 * loss
    hold("loss", "", abs(ours["losses"][0] - loss), bound)
    for name, r in ref["gradients"].items():
        hold_tensor("gradient", " of " + name, ours["gradients"][name], r, [first["gradients"][name]], largest)
    for kind in "way", "m", "v":
        for name in ref[kind]:
            a, r, *plains = (run[kind][name] for run in [ours, ref, *plain])
            if kind == "way" and "attn.c_attn" in name:
                parts = [2] if ours["logits"].shape[1] == 1 else [0, 1, 2]
                if "wpe.weight" in ref[kind] and name.endswith("bias") and 1 in parts:
                    parts.remove(1)
                a, r, *plains = (torch.cat([torch.chunk(x, 3, -1)[i] for i in parts], -1) for x in [a, r, *plains])
            hold_tensor(kind, f" of {name} in {STEPS} steps", a, r, plains, mean)
    # The losses on the way: the mean of their differences, like the tensors that they come from.
    a, r, *plains = (torch.tensor(x["losses"][1:], dtype=torch.float64) for x in [ours, ref, *plain])
    hold("losses", " of the steps", mean(a - r), 2 * max(mean(p - r) for p in plains) + FLOOR * U32 * mean(r))
    return bad, used


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump", default="build/release/tests/peers/dump_gpt")
    parser.add_argument("--device", choices=["cpu", "cuda", "cuda-fp32"])
    parser.add_argument("--verbose", action="store_true", help="how much of the bounds was used")
    a = parser.parse_args()
    torch.set_num_threads(1)  # small work; and the same sums on every machine
    passed = failed = skipped = 0
    combinations = {"cpu": ["naive", "flash"], "cuda-fp32": ["naive"], "cuda": ["naive", "flash"]}
    expected = {}
    for shape in SHAPES:
        for position in "learned", "rotary":
            for device in [a.device] if a.device else list(combinations):
                for attention in combinations[device]:
                    what = f"{device}, {attention}, {position}, layers heads channels ctx vocab batch {shape}"
                    with tempfile.TemporaryDirectory() as tmp:
                        folder = os.path.join(tmp, "dump")
                        command = [a.dump, device, attention, position, *map(str, shape), str(STEPS), folder]
                        ran = subprocess.run(command, capture_output=True, text=True)
                        if ran.returncode == 2:
                            skipped += 1
                            print(f"  skipped {what}: {ran.stdout.strip()}")
                            continue
                        if ran.returncode:
                            failed += 1
                            print(f"  FAILED {what}: status {ran.returncode}: {ran.stderr.strip()}")
                            continue
                        config, weights, tokens, ours = read_dump(folder, shape)
                    dtype = torch.bfloat16 if device == "cuda" else torch.float32
                    key = shape, position, dtype  # every device begins with the same weights and tokens
                    if key not in expected:
                        expected[key] = (weights, tokens, train(weights, config, tokens, torch.float64),
                                         train_plain(weights, config, tokens, dtype))
                    if not all(torch.equal(w, expected[key][0][n]) for n, w in weights.items()) or \
                            not torch.equal(tokens, expected[key][1]):
                        raise SystemExit(f"check_gpt: {what}: begins with other weights or tokens")
                    ref, plain = expected[key][2:]
                    bad, used = check(ours, ref, plain, U16 if device == "cuda" else U32)
                    passed, failed = passed + (not bad), failed + bool(bad)
                    if bad:
                        print(f"  FAILED {what}")
                    for line in bad[:10]:
                        print("   ", line)
                    if a.verbose:
                        print(f"  {what}:", ", ".join(f"{k} {v:.0%}" for k, v in used.items()))
    print(f"check_gpt: {passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
