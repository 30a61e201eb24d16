"""Arrange the exponents of MXFP4 weights as the GEMM kernels load them: ``cuda/ops/arrange_exponents.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, align, ceil_div
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned

_BLOCKS = 8  # blocks along K that a thread block arranges


def arranged(exponents: Tensor, projections: int = 1) -> Tensor:
    """Arrange the exponents of weights (..., N, K) by blocks of 128 along K.

    exponents: uint8 (..., N, K/32), E8M0, contiguous, on a GPU. projections: number of matrices stacked along N.
    Returns uint8 (..., ceil(K/128), `words`, 4): for each feature, how far its four exponents are below the largest of
    a block of 128 features of a projection, or 255 for NaN; then a word (int32) with the largest exponent of each
    block; then zeros. An exponent counts even if all codes of its group are 0.
    """
    *lead, n, groups = exponents.shape
    shape = (*lead, ceil_div(groups, 4), words(n, projections), 4)
    out = torch.empty(shape, dtype=torch.uint8, device=exponents.device)
    _launcher(exponents.get_device(), exponents, projections)(exponents, out)
    return out


def words(n: int, projections: int) -> int:
    """Return the number of words for one block along K of weights with N features."""
    return align(n + projections * ceil_div(n // projections, BLOCK), 4)


def kernel_spec() -> KernelSpec:
    """Return the spec of arrange_exponents.cu."""
    return KernelSpec("arrange_exponents.cu", "arrange_exponents", (("BLOCK", BLOCK), ("BLOCKS", _BLOCKS)))


@planned
def _launcher(device_index: int, exponents: Tensor, projections: int) -> PointerLauncher:
    *lead, n, groups = exponents.shape
    size, k_blocks = n // projections, ceil_div(groups, 4)
    return PointerLauncher(
        load(kernel_spec()),
        grid=(projections * ceil_div(size, BLOCK), ceil_div(k_blocks, _BLOCKS), lead[0] if lead else 1),
        block=BLOCK,
        pointers=2,
        args=tuple(map(ctypes.c_int64, (n, size, groups, k_blocks, words(n, projections)))),
    )
