"""Exponents of MXFP4 weights as the GEMM kernels load them: by blocks of 128 along K, and relative to their largest.

The words of a projection (N, K) and a block of 128 along K are contiguous: a word for each feature, whose bytes say how
far its four exponents are below the largest of a block of 128 features, or 255 for NaN; then a word (int32) with the
largest exponent of each block; then zeros, up to a multiple of 4 words. `GroupedExperts` keeps exponents in this order.
"""

import ctypes
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.quant.formats import BLOCK, MX_BLOCK, align, ceil_div
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned

_GROUPS = BLOCK // MX_BLOCK  # exponents of a feature in a block along K
_NAN = 255
_BLOCKS = 8  # blocks along K that a thread block arranges


def arranged_shape(n: int, k: int, projections: int = 1) -> tuple[int, int]:
    """Return the shape of arranged exponents for weights (n, k), which stack this many projections along n."""
    return projections * ceil_div(k, BLOCK), 4 * _words(n // projections)


def projections_of(data: Tensor, scale: Tensor) -> int:
    """Return by how many projections the scale of MXFP4 weights (..., N, K) is arranged; 0 if it is as stored.

    data: (..., N, K/2). No two of these layouts have equal shapes.
    """
    n, half = data.shape[-2:]
    found = (count for count in (1, 2) if tuple(scale.shape[-2:]) == arranged_shape(n, 2 * half, count))
    return 0 if scale.shape[:-1] == data.shape[:-1] and scale.shape[-1] == half // 16 else next(found, 0)


def as_stored(data: Tensor, scale: Tensor) -> Tensor:
    """Return the exponents (..., N, K/32) of MXFP4 weights whose scale is stored so or arranged."""
    n, half = data.shape[-2:]
    projections = projections_of(data, scale)
    return stored(scale, n, 2 * half, projections) if projections else scale


def arrange(exponents: Tensor, projections: int = 1) -> Tensor:
    """Arrange the exponents of weights (..., N, K).

    exponents: uint8 (..., N, K/32), E8M0. projections: number of matrices stacked along N, each arranged for itself.
    Returns uint8 (..., *`arranged_shape`). An exponent counts even if all codes of its group are 0.
    """
    *lead, n, groups = exponents.shape
    size, k_blocks = n // projections, ceil_div(groups, _GROUPS)
    out = exponents.new_empty((*lead, projections * k_blocks, 4 * _words(size)))
    if not out.numel():
        return out
    if use_cuda(exponents):
        stacked = aligned(exponents).view(-1, size, groups)
        _launcher(exponents.get_device(), stacked)(stacked, out)
        return out
    rows = ceil_div(size, BLOCK)
    whole = pad(exponents.view(-1, size, groups).int(), (0, _GROUPS * k_blocks - groups, 0, BLOCK * rows - size))
    whole = whole.view(-1, rows, BLOCK, k_blocks, _GROUPS)
    is_number = whole < _NAN
    largest = whole.where(is_number, 0).amax((2, 4), keepdim=True)
    below = (largest - whole).where(is_number, _NAN).flatten(1, 2)[:, :size]
    words = out.view(len(whole), k_blocks, _words(size), 4).zero_()
    words[:, :, :size] = below.transpose(1, 2).to(torch.uint8)
    words[:, :, size : size + rows, 0] = largest.flatten(1).view(-1, rows, k_blocks).transpose(1, 2).to(torch.uint8)
    return out


def stored(arranged: Tensor, n: int, k: int, projections: int = 1) -> Tensor:
    """Return the exponents (..., n, k/32) that `arrange` has arranged."""
    size, k_blocks = n // projections, ceil_div(k, BLOCK)
    words = arranged.reshape(math.prod(arranged.shape[:-2]) * projections, k_blocks, _words(size), 4)
    rows = ceil_div(size, BLOCK)
    below = words[:, :, :size].int()
    largest = words[:, :, size : size + rows, :1].int().repeat_interleave(BLOCK, 2)[:, :, :size]
    exponents = (largest - below).where(below < _NAN, _NAN).to(torch.uint8).transpose(1, 2)
    return exponents.flatten(2)[..., : k // MX_BLOCK].reshape(*arranged.shape[:-2], n, k // MX_BLOCK)


def _words(size: int) -> int:
    """Return the number of words of a projection with `size` features and a block along K."""
    return align(size + ceil_div(size, BLOCK), 4)


def kernel_spec() -> KernelSpec:
    """Return the spec of arrange_exponents.cu."""
    return KernelSpec("arrange_exponents.cu", "arrange_exponents", (("BLOCK", BLOCK), ("BLOCKS", _BLOCKS)))


@planned
def _launcher(device_index: int, exponents: Tensor) -> PointerLauncher:
    projections, size, groups = exponents.shape
    k_blocks = ceil_div(groups, _GROUPS)
    return PointerLauncher(
        load(kernel_spec()),
        grid=(ceil_div(size, BLOCK), ceil_div(k_blocks, _BLOCKS), projections),
        block=BLOCK,
        pointers=2,
        args=tuple(map(ctypes.c_int64, (size, groups, k_blocks, _words(size)))),
    )
