"""Cases of latent attention for compute-sanitizer, in the manner of `sanitizing.py`.

Sequences of no latent, of one, of whole tiles and of tiles in part; several queries; heads that fill a thread block's
rows and that do not, and those of several thread blocks; latents in a row, in blocks and by indices, some of which mean
nothing.
"""

import torch

import fp8moe
from benchmarks.operands import relative_error
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
CASES = [(latent_error, case, LATENT_ERROR) for case in LATENTS] + [(coded_error, case, LATENT_ERROR) for case in CODED]
