"""Every tile of packed weights once, for compute-sanitizer: argument: format, N, K."""
import sys, torch
from dataclasses import replace
from fp8moe import quantize_1x128, quantize_mxfp4, quantize_int4
from fp8moe.kernels.gemm import tiles
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.sm90 import fits, with_stages
from fp8moe.kernels.gemm.tiles import Grouping
form, n, k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sizes = (0, 1, 9, 40)
g = torch.Generator().manual_seed(0)
w = torch.randn(len(sizes), n, k, generator=g)
b = quantize_mxfp4(w) if form == "mxfp4" else quantize_int4(w, group=128 if form == "int4" and k % 128 == 0 else 32)
data, scale = b.data.cuda(), b.scale.cuda()
bounds = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32).cuda()
m = sum(sizes)
a = quantize_1x128(torch.randn(m, k, generator=g).cuda())
problem = tiles.GroupedProblem(m, len(sizes), m / len(sizes), n, k, 132, packed=True)
first, wrong, count = None, [], 0
for tile in {replace(t, stages=0) for t in tiles.grouped_candidates(problem)}:
    config = with_stages(tile, k)
    if not fits(config, k) or config.split_k > 1: continue
    out = torch.full((m, n), torch.nan, device="cuda")
    multiply_with(config, GemmOperands(a.data, a.scale, data, scale, groups=bounds), out, Grouping())
    torch.cuda.synchronize(); count += 1
    if first is None: first = out
    elif not torch.equal(first, out): wrong.append(config.name)
print(form, n, k, "tiles", count, "differ", wrong)
