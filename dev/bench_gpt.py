"""The yardstick for bench_gpu: a GPT-2 in PyTorch, compiled, at the same shapes.

    python3 dev/bench_gpt.py [--attention fa2|cudnn] [--layers 12] [--heads 12] [--channels 768] [--ctx 1024]
                             [--vocab 50257] [--batch 64] [--steps 20] [--position learned|rotary] [--graphs]

bf16 by autocast, fp32 weights, fused AdamW, gradients clipped, tied head, vocabulary padded to a multiple of
128. The attention operator is called by its name: PyTorch's switches are no proof, since the compiler may take
another; the names of the kernels that ran are printed, from its profiler. --graphs: torch.compile's mode
"reduce-overhead", CUDA graphs, for models so small that the host is slower than the GPU. The first line is for
scripts: "tokens/s N"."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F


def attend(q, k, v, kind):
    """Causal attention of (B, H, T, D) by one operator."""
    if kind == "fa2":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]


def rotate(x, angles):
    """Rotary positions of x (B, H, T, D): the halves of a head turned; angles: cos and sin, (T, D / 2) each."""
    (cos, sin), (a, b) = angles, x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, channels, heads, attention, angles):
        super().__init__()
        self.heads, self.attention, self.angles = heads, attention, angles
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        if self.angles is not None:
            q, k = rotate(q, self.angles), rotate(k, self.angles)
        mixed = attend(q, k, v, self.attention).transpose(1, 2).reshape(B, T, C)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.vocab = (a.vocab + 127) // 128 * 128
        self.wte = nn.Embedding(self.vocab, a.channels)
        self.wpe = nn.Embedding(a.ctx, a.channels) if a.position == "learned" else None
        angles = None
        if a.position == "rotary":
            D = a.channels // a.heads
            angle = torch.arange(a.ctx)[:, None] * 10000.0 ** (-2 * torch.arange(D // 2) / D)
            angles = angle.cos().cuda(), angle.sin().cuda()
        self.blocks = nn.ModuleList(Block(a.channels, a.heads, a.attention, angles) for _ in range(a.layers))
        self.norm = nn.LayerNorm(a.channels)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, self.vocab), targets.view(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention", choices=["fa2", "cudnn"], default="fa2")
    sizes = dict(layers=12, heads=12, channels=768, ctx=1024, vocab=50257, batch=64, steps=20)
    for name, value in sizes.items():
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--position", choices=["learned", "rotary"], default="learned")
    parser.add_argument("--graphs", action="store_true")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_gpt.py: PyTorch sees no GPU here")
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = Gpt(a).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, mode="reduce-overhead" if a.graphs else "default")
    ids = torch.randint(0, a.vocab, (a.batch, a.ctx + 1), device="cuda")
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(5):
        loss = step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(a.steps):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / a.steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loss = step()  # an earlier one's may be overwritten by now, where there are graphs
        torch.cuda.synchronize()
    attention = ("flash", "sdpa", "fmha")
    names = sorted({e.key for e in profile.key_averages() if any(s in e.key.lower() for s in attention)})
    print(f"tokens/s {a.batch * a.ctx / seconds:.0f}")
    how = "compiled, CUDA graphs" if a.graphs else "compiled"
    print(f"PyTorch {torch.__version__} {how}, {torch.cuda.get_device_name()}; attention {a.attention}")
    print(f"{a.layers} x {a.channels}, {a.heads} heads, V {a.vocab}, {a.position} positions; B {a.batch}, T {a.ctx}")
    print(f"{1e3 * seconds:.2f} ms a step, loss {loss.item():.4f}, "
          f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB by its allocator")
    if not names:
        print("  ran: no kernel with a name of attention; all: " + ", ".join(e.key[:60] for e in profile.key_averages()))
    for name in names:
        print(f"  ran: {name[:100]}")


if __name__ == "__main__":
    main()
