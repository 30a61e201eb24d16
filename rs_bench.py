"""Input gradients from weights as the forward has them beside transposed copies: python rs_bench.py"""
import statistics
import torch
from fp8moe import FP8Tensor, quantize_1x128, quantize_128x128
from fp8moe.kernels.gemm.api import grouped_rows
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.sm90 import TileConfig, with_stages
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.transpose import transpose_fp8

# experts, K (the weights' rows), N (their columns), rows
CASES = {"dsv3 up": (32, 4096, 7168, 65536), "dsv3 down": (32, 7168, 2048, 65536), "qwen8k up": (128, 1536, 2048, 65536), "qwen8k down": (128, 2048, 768, 65536),
         "qwen32k up": (128, 1536, 2048, 262144), "olmoe up": (64, 2048, 2048, 131072), "olmoe down": (64, 2048, 1024, 131072)}
def main():
    torch.manual_seed(0); d = "cuda"
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=d)
    print(torch.cuda.get_device_name())
    for name, (e, k, n, rows) in CASES.items():
        sizes = torch.bincount(torch.randint(e, (rows,)), minlength=e)
        off = torch.zeros(e + 1, dtype=torch.int32); off[1:] = sizes.cumsum(0); off = off.to(d)
        a = quantize_1x128(torch.randn(rows, k, device=d, dtype=torch.bfloat16))
        w = quantize_128x128(torch.randn(e, k, n, device=d, dtype=torch.bfloat16) * (0.5 + torch.rand(e, k // 128, 1, n // 128, 1, device=d, dtype=torch.bfloat16)).expand(-1, -1, 128, -1, 128).reshape(e, k, n))
        wt = transpose_fp8(w)
        ref = grouped_rows(a, wt, off, torch.bfloat16)
        t = with_stages(TileConfig(128, 256, weights_as_rows=True, groups=e, transposed=True), k)
        out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device=d)
        operands = GemmOperands(*a, *w, groups=off)
        go = lambda: multiply_with(t, operands, out, Grouping())
        go(); torch.cuda.synchronize()
        err = ((out.float() - ref.float()).norm() / ref.float().norm()).item()
        same = torch.equal(out, ref)
        first = out.clone(); moved = 0
        for _ in range(20):
            out.fill_(float("nan")); go(); moved += not torch.equal(out, first)
        runs = {"transpose": lambda: transpose_fp8(w), "transposed copy": lambda: grouped_rows(a, wt, off, torch.bfloat16), "as it is": go}
        times = {x: [] for x in runs}
        for _ in range(7):
            for x, f in runs.items():
                flush.zero_(); s, e_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                s.record(); f(); e_.record(); torch.cuda.synchronize(); times[x].append(s.elapsed_time(e_) * 1e3)
        print(name, f"error {err:.2e} equal {same} moved {moved}", "; ".join(f"{x} {statistics.median(v):.0f}" for x, v in times.items()), "us", flush=True)
main()
