"""Convert experts in four bits to FP8 in blocks, for kernels that take no others: those of a backward, and of LoRA."""

import torch
from torch import Tensor

from fp8moe.quant.arranged import as_stored
from fp8moe.quant.formats import BLOCK, ceil_div, packed_format
from fp8moe.quant.packed import blocks_of_nvfp4, dequantized
from fp8moe.quant.quantize import quantize_128x128
from fp8moe.runtime.operator import define


def in_blocks(data: Tensor, scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    """Convert experts in four bits to FP8 in 128x128 blocks, an expert at a time.

    data: (E, N, K/2). scale: as in a PackedTensor; of MXFP4 both may be arranged, of NVFP4 they are. projections:
    matrices stacked along N. Returns data (E, N, K) float8_e4m3fn, and scale (E, projections * ceil(N/projections/128),
    ceil(K/128)), powers of two, of NVFP4 times tensor scales. MXFP4 is exact where groups differ by 14 binades at most
    within a block; INT4 and NVFP4 are rounded to E4M3, NVFP4 as kernels round it.
    """
    return _in_blocks(data, scale, projections)


def _blocks_like(data: Tensor, scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    count, n, half = data.shape
    blocks = projections * ceil_div(n // projections, BLOCK), ceil_div(2 * half, BLOCK)
    codes = data.new_empty((count, n, 2 * half), dtype=torch.float8_e4m3fn)
    return codes, data.new_empty((count, *blocks), dtype=torch.float32)


def _to_blocks(data: Tensor, scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    codes, scales = _blocks_like(data, scale, projections)
    for expert, weight in enumerate(zip(data, scale, strict=True)):
        if packed_format(scale) == "nvfp4":
            made = blocks_of_nvfp4(*weight)
            codes[expert].copy_(made.data)
            scales[expert].copy_(made.scale)
            continue
        values = dequantized(as_stored(*weight)).unflatten(0, (projections, -1))
        made = quantize_128x128(values, scale_format="ue8m0")
        codes[expert].copy_(made.data.flatten(0, 1))
        scales[expert].copy_(made.scale.flatten(0, 1))
    return codes, scales


_in_blocks = define(
    "packed_in_blocks(Tensor data, Tensor scale, SymInt projections) -> (Tensor, Tensor)", _to_blocks, _blocks_like
)
