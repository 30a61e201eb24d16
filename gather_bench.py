"""GEMM 1 of tokens gathered by the kernel beside tokens permuted before: python gather_bench.py"""
import statistics
import torch
from fp8moe import quantize_1x128, quantize_128x128, FP8Tensor
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.reference import assignments_of
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.api import grouped_rows
from fp8moe.kernels.gemm.epilogue import PlainStore
from fp8moe.kernels.gemm.launch import GemmLauncher, GemmOperands, arguments_type, kernel_spec, raster_group, row_tiles_bound
from fp8moe.kernels.gemm.sm90 import TileConfig, with_stages
from fp8moe.runtime.launch import current_stream

# experts, K, N, tokens; eight experts a token
CASES = {"dsv3": (32, 7168, 4096, 8192), "dsv3 d_h": (32, 7168, 2048, 8192), "qwen8k": (128, 2048, 1536, 8192), "qwen32k": (128, 2048, 1536, 32768), "olmoe": (64, 2048, 2048, 16384)}
TILES = [dict(block_m=128, block_n=256), dict(block_m=256, block_n=128), dict(block_m=256, block_n=128, tma_store=True), dict(block_m=128, block_n=256, tma_store=True)]

def gathered(x, w, tokens, offsets, out, tile):
    groups, n, k = w.data.shape
    m = len(tokens)
    operands = GemmOperands(*x, *w, groups=offsets)
    epilogue = PlainStore(torch.bfloat16)
    rows = row_tiles_bound(tile.block_m, m, groups, None)
    concurrent = min(rows * -(-n // tile.block_n), 132)
    arguments = arguments_type(epilogue, True)(m=m, max_m=0, raster=raster_group(tile, m, k, concurrent), group_pitch=1, tile_m=tile.block_m, tile_rows=rows,
        counter=groups + 1, early_stages=tile.first_stages, tokens=tokens.data_ptr(), a=x.data.data_ptr(), a_scale=x.scale.data_ptr(), a_pitch=x.data.stride(0), a_scale_pitch=x.scale.stride(1))
    made = GemmLauncher(kernel_spec(tile, n, k, epilogue), launch._maps(operands, epilogue, tile, out), arguments, 4, out, grid=concurrent, block=tile.threads, cluster=1, smem=tile.shared_bytes)
    def go():
        made.launch(current_stream(0), (x.data.data_ptr(), x.scale.data_ptr(), w.data.data_ptr(), out.data_ptr()), (w.scale.data_ptr(), 0, out.data_ptr(), out.stride(0)), offsets.data_ptr())
    return go

def main():
    torch.manual_seed(0); d = "cuda"
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=d)
    print(torch.cuda.get_device_name())
    for name, (e, k, n, tokens) in CASES.items():
        x = torch.randn(tokens, k, device=d, dtype=torch.bfloat16)
        index = torch.rand(tokens, e, device=d).topk(8).indices
        offsets, rows = sort_by_expert(index, e)
        assignments = assignments_of(rows, rows.numel())
        of_row = assignments.div(8, rounding_mode="floor")
        w = quantize_128x128(torch.randn(e, n, k, device=d, dtype=torch.bfloat16))
        a = permute_quantize(x, rows, rows.numel())
        ref = grouped_rows(a, w, offsets, torch.bfloat16)
        q = quantize_1x128(x)
        runs = {"permute": lambda: permute_quantize(x, rows, rows.numel()), "quantize": lambda: quantize_1x128(x), "permuted": lambda: grouped_rows(a, w, offsets, torch.bfloat16)}
        for kw in TILES:
            for gather in (False, True):
                t = with_stages(TileConfig(groups=e, gather=gather, **kw), k)
                out = torch.full_like(ref, float("nan"))
                if gather:
                    go = gathered(q, w, of_row, offsets, out, t)
                else:
                    ops = GemmOperands(*a, *w, groups=offsets)
                    go = lambda t=t, out=out, ops=ops: launch.multiply_with(t, ops, out, launch.Grouping())
                moved = 0
                for _ in range(20 if gather else 1):
                    out.fill_(float("nan")); go(); moved += not torch.equal(out, ref)
                runs[f"{'gather ' if gather else ''}{t.name}{f' WRONG {moved}' if moved else ''}"] = go
        times = {z: [] for z in runs}
        for _ in range(7):
            for z, f in runs.items():
                flush.zero_(); s, e_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                s.record(); f(); e_.record(); torch.cuda.synchronize(); times[z].append(s.elapsed_time(e_) * 1e3)
        print(name, "; ".join(f"{z} {statistics.median(v):.0f}" for z, v in times.items()), "us", flush=True)
main()
