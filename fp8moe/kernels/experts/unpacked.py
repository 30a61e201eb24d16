"""Convert experts in four bits to FP8 in blocks, for kernels that take no others: those of a backward, and of LoRA."""

import torch
from torch import Tensor

from fp8moe.quant.arranged import as_stored
from fp8moe.quant.formats import BLOCK, PackedTensor, ceil_div, packed_format
from fp8moe.quant.packed import dequantized
from fp8moe.quant.quantize import quantize_128x128
from fp8moe.runtime.operator import define


def in_blocks(data: Tensor, scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    """Convert experts in MXFP4 or INT4 to FP8 in 128x128 blocks, with powers of two as scales, an expert at a time.

    data: (E, N, K/2). scale: as in a PackedTensor, or both of MXFP4 arranged. projections: matrices stacked along N.
    Returns data (E, N, K) float8_e4m3fn, and scale (E, projections * ceil(N/projections/128), ceil(K/128)). MXFP4 is
    exact where groups differ by 14 binades at most within a block; values of INT4 are rounded to E4M3.
    """
    return _in_blocks(data, scale, projections)


def _blocks_like(data: Tensor, scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    count, n, half = data.shape
    blocks = projections * ceil_div(n // projections, BLOCK), ceil_div(2 * half, BLOCK)
    codes = data.new_empty((count, n, 2 * half), dtype=torch.float8_e4m3fn)
    return codes, data.new_empty((count, *blocks), dtype=torch.float32)


def _to_blocks(data: Tensor, scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    codes, scales = _blocks_like(data, scale, projections)
    form = packed_format(scale)
    for expert, (packed, factor) in enumerate(zip(data, scale, strict=True)):
        packed, factor = as_stored(packed, factor) if form == "mxfp4" else (packed, factor)
        values = dequantized(PackedTensor(packed, factor, form)).unflatten(0, (projections, -1))
        made = quantize_128x128(values, scale_format="ue8m0")
        codes[expert].copy_(made.data.flatten(0, 1))
        scales[expert].copy_(made.scale.flatten(0, 1))
    return codes, scales


_in_blocks = define(
    "packed_in_blocks(Tensor data, Tensor scale, SymInt projections) -> (Tensor, Tensor)", _to_blocks, _blocks_like
)
