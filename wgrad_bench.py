"""Weight gradients of x with a scale for each channel beside blocks of 1x128: python wgrad_bench.py"""
import statistics, sys
import torch
from fp8moe import FP8Tensor
from fp8moe.kernels.gemm.launch import run_along_k
from fp8moe.kernels.gemm.sm90 import GroupedKTile
from fp8moe.kernels.gemm.tiles import choose_grouped_k
from benchmarks import timing

CASES = {"dsv3 up": (32, 4096, 7168, 65536), "dsv3 down": (32, 7168, 2048, 65536), "qwen8k up": (128, 1536, 2048, 65536),
         "qwen32k up": (128, 1536, 2048, 262144), "olmoe up": (64, 2048, 2048, 131072), "olmoe down": (64, 2048, 1024, 131072)}
TILES = [GroupedKTile(256, 128, 3, True), GroupedKTile(256, 120, 4, True), GroupedKTile(256, 112, 4, True), GroupedKTile(256, 96, 4, True), GroupedKTile(256, 144, 3, True)]
def main():
    torch.manual_seed(0); d = "cuda"
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=d)
    print(torch.cuda.get_device_name())
    for name, (e, m, n, rows) in CASES.items():
        k = rows // e // 128 * 128 * e
        sizes = torch.full((e,), k // e); off = torch.zeros(e + 1, dtype=torch.int32); off[1:] = sizes.cumsum(0); off = off.to(d)
        q = lambda r: torch.randn(r, k, device=d, dtype=torch.bfloat16).mul_(100).to(torch.float8_e4m3fn)
        sc = lambda r: torch.rand(k // 128, r, device=d).add_(0.5).t()
        a, b = FP8Tensor(q(m), sc(m)), q(n)
        ch = torch.rand(n, 1, device=d).add_(0.5)
        block = FP8Tensor(b, ch.expand(n, k // 128).t().contiguous().t())
        channel = FP8Tensor(b, ch)
        outs = {}
        runs = {}
        base = choose_grouped_k(e, m, n, 132)
        ref = torch.empty(e, m, n, dtype=torch.bfloat16, device=d); run_along_k(a, block, off, ref, False, base)
        runs[f"1x128 {base.block_m}x{base.block_n}"] = lambda out=torch.empty_like(ref): run_along_k(a, block, off, out, False, base)
        for t in TILES:
            out = torch.empty_like(ref).fill_(float("nan")); run_along_k(a, channel, off, out, False, t); torch.cuda.synchronize()
            err = ((out.float() - ref.float()).norm() / ref.float().norm()).item()
            bad = not err < 4e-3
            f32 = torch.zeros(1, m, n, device=d)
            runs[f"{t.block_m}x{t.block_n}/{t.stages}{' WRONG %.3g' % err if bad else ''}"] = lambda out=out, t=t: run_along_k(a, channel, off, out, False, t)
        times = {x: [] for x in runs}
        for _ in range(7):
            for x, f in runs.items():
                flush.zero_(); s, t = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                s.record(); f(); t.record(); torch.cuda.synchronize(); times[x].append(s.elapsed_time(t) * 1e3)
        flops = 2 * m * n * k
        print(name, "; ".join(f"{x}: {statistics.median(v):.0f} us {flops / statistics.median(v) / 1e6:.0f} TF" for x, v in times.items()), flush=True)
main()
