"""Cases of latent attention for compute-sanitizer, in the manner of `sanitizing.py`.

Sequences of no latent, of one, of whole tiles and of tiles in part; several queries; heads that fill a thread block's
rows and that do not, and those of several thread blocks; latents in a row, in blocks and by indices, some of which mean
nothing. The choice of index scores, and what writes new latents.
"""

import torch

import fp8moe
from benchmarks.operands import relative_error
from fp8moe.kernels.latent.append import append_latents
from fp8moe.kernels.latent.fp8_latents import dequantize_latents
from tests import latent_cases
from tests.gpu.sanitizing import on_gpu

SIZES = {"value_size": 512, "scale": 576**-0.5}
# lengths, queries, heads, paged, indices of each query
LATENTS = (
    *(([130, 1, 0], 2, 20, False, None), ([300, 70], 1, 128, False, None), ([128, 0, 200], 3, 16, True, None)),
    *(([200, 1, 0], 2, 20, False, 70), ([300, 65], 1, 128, True, 128), ([300, 65], 1, 20, False, 70)),
    *(([130, 70], 1, 20, True, None), ([700], 1, 16, False, None)),
)
LATENT_ERROR = 1e-2


def latent_error(lengths: list[int], queries: int, heads: int, paged: bool, chosen: int | None) -> float:
    q, latents, count, table = latent_cases.operands(lengths, queries=queries, heads=heads, paged=paged)
    indices = None
    if chosen is not None:
        every = [torch.randperm(max(lengths))[:chosen] for _ in range(len(lengths) * queries)]
        indices = torch.stack(every).view(len(lengths), queries, chosen).int()
        indices[0, -1, :2] = torch.tensor([-1, 2**31 - 1])
    given = {"indices": indices, "block_table": table}
    got = fp8moe.latent_attention(*on_gpu((q, latents, count)), **on_gpu(given), **SIZES)
    return relative_error(got.cpu(), latent_cases.expected(q, latents, count, table, indices=indices, **SIZES))


def coded_error(lengths: list[int], queries: int, heads: int, chosen: int | None) -> float:
    q, latents, count, _ = latent_cases.operands(lengths, queries=queries, heads=heads)
    coded = fp8moe.quantize_latents(latents.nan_to_num(), value_size=512)
    indices = None
    if chosen is not None:
        every = [torch.randperm(max(lengths))[:chosen] for _ in range(len(lengths) * queries)]
        indices = torch.stack(every).view(len(lengths), queries, chosen).int()
    got = fp8moe.latent_attention(*on_gpu((q, coded, count)), **on_gpu({"indices": indices}), **SIZES)
    values = dequantize_latents(coded, value_size=512)
    return relative_error(got.cpu(), latent_cases.expected(q, values, count, None, indices=indices, **SIZES))


CODED = ([130, 1], 1, 20, None), ([130, 70], 2, 64, None), ([130, 70], 2, 16, 60), ([130], 1, 64, 60)


def top_k_error(rows: int, columns: int, top_k: int) -> float:
    """Count the columns that differ from the reference backend's, for rows whose ranges begin and end anywhere."""
    logits = torch.randn(rows, columns)
    starts = torch.arange(rows, dtype=torch.int32) % 5
    ends = torch.linspace(0, columns + 3, rows).int()
    given = {"starts": starts, "ends": ends, "top_k": top_k}
    return (fp8moe.mqa_top_k(logits.cuda(), **on_gpu(given)).cpu() != fp8moe.mqa_top_k(logits, **given)).sum().item()


def append_error(batch: int, tokens: int, heads: int, coded: bool, interleaved: bool) -> float:
    """Return the larger error of the rotated queries and of the cached latents, some of which lie outside the cache."""
    q, latents, out = (torch.randn(batch, tokens, *rest).bfloat16() for rest in ((heads, 64), (576,), (heads, 64)))
    tables = (torch.randn(1, tokens, 64).bfloat16() for _ in range(2))
    cache = torch.zeros(batch, 9, 656, dtype=torch.uint8) if coded else torch.zeros(batch, 9, 576).bfloat16()
    given = (q, latents, torch.randn(512).bfloat16(), *tables, out, cache)
    how = {"columns": torch.arange(batch) * 3 - 1, "eps": 1e-6, "interleaved": interleaved}
    moved = on_gpu(given)
    append_latents(*moved, **on_gpu(how))
    append_latents(*given, **how)
    found, wanted = (dequantize_latents(x, value_size=512) if coded else x for x in (moved[-1].cpu(), cache))
    return max(relative_error(found, wanted), relative_error(moved[-2].cpu(), out))


TOP_K = (1, 7, 3), (5, 2500, 64), (3, 20000, 2048)
APPENDED = (3, 2, 5, False, True), (2, 1, 20, True, False), (1, 70, 16, True, True)
CASES = [
    *((latent_error, case, LATENT_ERROR) for case in LATENTS),
    *((coded_error, case, LATENT_ERROR) for case in CODED),
    *((top_k_error, case, 0) for case in TOP_K),
    *((append_error, case, LATENT_ERROR) for case in APPENDED),
]
