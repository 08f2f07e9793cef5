"""How fast the GPU attention kernels are beside PyTorch's, in one process, on the same tensors and stream.

    make build/release/libflash_mma.so
    python3 dev/bench_attention.py [--library PATH] [--dims 64,128] [--shapes 4,12,2048 ...] [--sustained]
                                   [--deterministic] [--json FILE]

Backends: ours; FlashAttention-2 (fa2) and cuDNN through PyTorch's scaled_dot_product_attention, pinned, on
(B, T, H, D) memory. The names of the kernels that ran are printed. bf16, causal, random normal inputs.

Device time only: each block of calls is queued behind a kernel that waits, so that the host is never what one
waits for. A figure is the median of 36 calls, in three blocks of 12; the blocks of all backends and passes come
in random order, each after 40 ms of rest and four calls to warm up. --sustained: no rest; 250 ms of the same
load before each block, so that the power limit counts. FLOPs are those of the causal half: forward
4 B H T T D / 2, backward 2.5 times that, whatever a kernel computes besides.

memory: what a forward and a backward pass take at most beside inputs and their gradients."""

import argparse
import ctypes
import json
import os
import random
import statistics

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PINNED = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PASSES = {"fwd": 1.0, "bwd": 2.5, "f+b": 3.5}  # FLOPs, in forward passes
BLOCKS, CALLS, WARM = 3, 12, 4


class Ours:
    def __init__(self, library, qkv, d_out, deterministic):
        self.lib, self.qkv, self.d_out, self.deterministic = library, qkv, d_out, int(deterministic)
        B, T, _, H, D = qkv.shape
        self.sizes = [ctypes.c_size_t(x) for x in (B, T, H, D)]
        self.scratch_bytes = library.flash_mma_scratch_bytes(*self.sizes, self.deterministic)
        self.forward()
        self.backward()

    def call(self, function, *arguments):
        pointers = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments]
        reason = function(*pointers, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if reason:
            raise SystemExit("bench_attention.py: flash_mma: " + reason.decode())

    def forward(self):
        B, T, _, H, D = self.qkv.shape
        self.out = torch.empty(B, T, H, D, dtype=self.qkv.dtype, device="cuda")
        self.lse = torch.empty(B, H, T, dtype=torch.float32, device="cuda")
        self.call(self.lib.flash_mma_forward, self.qkv, self.out, self.lse, *self.sizes)

    def backward(self):
        self.d_qkv = torch.empty_like(self.qkv)
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device="cuda")
        self.call(self.lib.flash_mma_backward, self.qkv, self.out, self.lse, self.d_out, self.d_qkv, scratch,
                  *self.sizes, self.deterministic)

    def results(self):
        return [self.out, *self.d_qkv.unbind(2)]

    def drop(self):
        self.out = self.lse = self.d_qkv = None


class Torch:
    def __init__(self, backend, qkv, d_out):
        self.backend = PINNED[backend]
        self.inputs = [x.contiguous().transpose(1, 2).requires_grad_() for x in qkv.unbind(2)]
        self.d_out = d_out.transpose(1, 2)
        self.forward()
        self.backward()

    def forward(self):
        with sdpa_kernel(self.backend):
            self.out = F.scaled_dot_product_attention(*self.inputs, is_causal=True)

    def backward(self):
        self.gradients = torch.autograd.grad(self.out, self.inputs, self.d_out, retain_graph=True)

    def results(self):
        return [x.detach().transpose(1, 2) for x in (self.out, *self.gradients)]

    def drop(self):
        self.out = self.gradients = None


def both(backend):
    backend.forward()
    backend.backward()


CALL = {"fwd": lambda b: b.forward(), "bwd": lambda b: b.backward(), "f+b": both}


def block(call, backend, sustained):
    """Milliseconds of CALLS calls, on the device."""
    torch.cuda.synchronize()
    if sustained:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        while True:
            for _ in range(WARM):
                call(backend)
            end.record()
            end.synchronize()
            if begin.elapsed_time(end) > 250:
                break
    else:
        torch.cuda._sleep(int(40e-3 * 1.7e9))
    torch.cuda._sleep(int(10e-3 * 1.7e9))  # the host gets ahead
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    for _ in range(WARM):
        call(backend)
    for event in events[:-1]:
        event.record()
        call(backend)
    events[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def kernels(backend):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both(backend)
        torch.cuda.synchronize()
    return [e.key for e in profile.key_averages()]


def peak_memory(backend, gradients):
    backend.drop()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both(backend)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - gradients


def main():
    parser = argparse.ArgumentParser()
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--library", default=os.path.join(here, "../build/release/libflash_mma.so"))
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--shapes", nargs="+", default=[
        "4,12,1024", "4,12,2048", "4,12,4096", "4,12,8192", "4,12,16384", "12,12,2048", "64,12,1024"],
        help="B,H,T")
    parser.add_argument("--sustained", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_attention.py: PyTorch sees no GPU here")
    library = ctypes.CDLL(os.path.abspath(a.library))
    library.flash_mma_scratch_bytes.restype = ctypes.c_size_t
    library.flash_mma_forward.restype = library.flash_mma_backward.restype = ctypes.c_char_p
    torch.manual_seed(1)
    random.seed(1)
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}, "
          f"{'sustained' if a.sustained else 'after rests'}; ms / TFLOP/s")
    rows, named = [], False
    for D in map(int, a.dims.split(",")):
        print(f"\nD {D}\n{'B,H,T':>12} " + " ".join(f"{n + ' ' + p:>16}" for n in ("ours", "fa2", "cudnn")
                                                    for p in PASSES) + "   ours/fa2: fwd  bwd  f+b   MiB")
        for shape in a.shapes:
            B, H, T = map(int, shape.split(","))
            qkv = torch.randn(B, T, 3, H, D, device="cuda").to(torch.bfloat16)
            d_out = torch.randn(B, T, H, D, device="cuda").to(torch.bfloat16)
            backends = {"ours": Ours(library, qkv, d_out, a.deterministic)}
            for name in PINNED:
                backends[name] = Torch(name, qkv, d_out)
            if not named:
                for name, backend in backends.items():
                    for kernel in kernels(backend):
                        print(f"  {name} ran {kernel[:110]}")
                named = True
            worst = max((x.float() - y.float()).abs().max().item()
                        for x, y in zip(backends["ours"].results(), backends["fa2"].results()))
            todo = [(n, p) for n in backends for p in PASSES for _ in range(BLOCKS)]
            random.shuffle(todo)
            times = {}
            for name, which in todo:
                times.setdefault((name, which), []).extend(block(CALL[which], backends[name], a.sustained))
            ms = {key: statistics.median(x) for key, x in times.items()}
            flops = 4 * B * H * T * T * D / 2
            memory = {n: peak_memory(b, qkv.nbytes) for n, b in backends.items()}
            print(f"{shape:>12} " + " ".join(
                f"{ms[n, p]:9.4f} /{PASSES[p] * flops / ms[n, p] / 1e9:5.0f}" for n in backends for p in PASSES) +
                "             " + " ".join(f"{ms['fa2', p] / ms['ours', p]:4.2f}" for p in PASSES) + "   " +
                " ".join(f"{n} {x / 2**20:.1f}" for n, x in memory.items()) + f"   largest difference {worst:.3g}")
            rows.append({"B": B, "H": H, "T": T, "D": D, "sustained": a.sustained,
                         "ms": {f"{n} {p}": x for (n, p), x in ms.items()}, "memory_bytes": memory})
            del backends, qkv, d_out
            torch.cuda.empty_cache()
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
