"""MXFP4 weights as the GEMM kernels load them, and as `GroupedExperts` keeps them: codes and exponents arranged.

Codes: of 32 values with an exponent, bytes 4q to 4q + 3 have values 4q to 4q + 3 in the low half and 16 + 4q to 16 + 4q
+ 3 in the high half. The three low bits of each code are in its nibble. The sign of the j-th value of the low half is
in bit 8j + 7, that of the high half in bit 8j + 3: one shift brings four signs to where E4M3 has them.

Exponents: by blocks of 128 along K, and relative to their largest. The words of a projection (N, K) and a block of 128
along K are contiguous: a word for each feature, whose bytes are 8 times how far its four exponents are below the
largest of a block of 128 features, at most 30, or 248 for NaN; then a word (int32) with the largest exponent of each
block; then zeros, up to a multiple of 4 words. So a byte is the offset of an entry in the kernels' table of magnitudes,
which are zero from 19 on.
"""

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.quant.formats import BLOCK, MX_BLOCK, FP8Tensor, align, ceil_div
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned

_GROUPS = BLOCK // MX_BLOCK  # exponents of a feature in a block along K
_NAN = 255
_MOST_BELOW, _NAN_BELOW = 30, 31
_ENTRY = 8  # bytes of an entry of the table
NAN_BYTE = _ENTRY * _NAN_BELOW
"""The byte of NaN among arranged exponents; no finite weights that are below 2^121 have it."""
_BLOCKS = 8  # blocks along K that a thread block arranges
_THREADS = 256  # in a thread block that arranges codes
_GROUP_BYTES = MX_BLOCK // 2
_AT_ONCE = 1 << 20  # groups that PyTorch arranges at a time


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


def arrange(data: Tensor, scale: Tensor, projections: int = 1) -> FP8Tensor:
    """Arrange MXFP4 weights. data, scale: as in a PackedTensor. projections: matrices stacked along N."""
    return FP8Tensor(arranged_codes(data), arranged_exponents(scale, projections))


def as_stored(data: Tensor, scale: Tensor) -> FP8Tensor:
    """Return MXFP4 weights, which are arranged or as in a PackedTensor, as in a PackedTensor."""
    n, half = data.shape[-2:]
    projections = projections_of(data, scale)
    if not projections:
        return FP8Tensor(data, scale)
    return FP8Tensor(stored_codes(data), stored_exponents(scale, n, 2 * half, projections))


def arranged_codes(data: Tensor) -> Tensor:
    """Arrange codes (..., K/2), uint8, K a multiple of 32."""
    data = aligned(data)
    if not use_cuda(data):
        return _by_part(_arranged_words, data)
    out = torch.empty_like(data)
    if out.numel():
        _codes_launcher(data.get_device(), data)(data, out)
    return out


def stored_codes(data: Tensor) -> Tensor:
    """Return the codes that `arranged_codes` has arranged."""
    return _by_part(_stored_halves, aligned(data))


def _by_part(convert: Callable[[Tensor], Tensor], data: Tensor) -> Tensor:
    """Convert contiguous codes, some groups (G, 16 bytes) at a time, to bound temporary memory."""
    out = torch.empty_like(data)
    parts = (codes.view(-1, _GROUP_BYTES).split(_AT_ONCE) for codes in (data, out))
    for source, target in zip(*parts, strict=True):
        target.copy_(convert(source).view(torch.uint8).view(target.shape))
    return out


def _arranged_words(groups: Tensor) -> Tensor:
    low, high = groups.view(torch.int16).view(-1, 2, 4).int().unbind(1)
    words = low & 0x7777 | (high & 0x7777) << 16
    for i in range(4):
        sign = 8 << 4 * i
        words |= (low & sign) << 4 * i + 4 | (high & sign) << 4 * i
    return words


def _stored_halves(groups: Tensor) -> Tensor:
    words = groups.view(torch.int32)
    low, high = words & 0x7777, words >> 16 & 0x7777
    for i in range(4):
        low |= (words >> 8 * i + 7 & 1) << 4 * i + 3
        high |= (words >> 8 * i + 3 & 1) << 4 * i + 3
    return torch.stack((low, high), 1).to(torch.int16)


def arranged_exponents(exponents: Tensor, projections: int = 1) -> Tensor:
    """Arrange the exponents of weights (..., N, K).

    exponents: uint8 (..., N, K/32), E8M0. projections: number of matrices stacked along N, each arranged for itself.
    Returns uint8 (..., *`arranged_shape`). An exponent counts even if all codes of its group are 0. One that is more
    than 30 below the largest of its block becomes 30 below it.
    """
    *lead, n, groups = exponents.shape
    size, k_blocks = n // projections, ceil_div(groups, _GROUPS)
    out = exponents.new_empty((*lead, projections * k_blocks, 4 * _words(size)))
    if not out.numel():
        return out
    if use_cuda(exponents):
        stacked = aligned(exponents).view(-1, size, groups)
        _exponents_launcher(exponents.get_device(), stacked)(stacked, out)
        return out
    rows = ceil_div(size, BLOCK)
    whole = pad(exponents.view(-1, size, groups).int(), (0, _GROUPS * k_blocks - groups, 0, BLOCK * rows - size))
    whole = whole.view(-1, rows, BLOCK, k_blocks, _GROUPS)
    is_number = whole < _NAN
    largest = whole.where(is_number, 0).amax((2, 4), keepdim=True)
    below = (largest - whole).clamp(max=_MOST_BELOW).where(is_number, _NAN_BELOW).flatten(1, 2)[:, :size] * _ENTRY
    words = out.view(len(whole), k_blocks, _words(size), 4).zero_()
    words[:, :, :size] = below.transpose(1, 2).to(torch.uint8)
    words[:, :, size : size + rows, 0] = largest.flatten(1).view(-1, rows, k_blocks).transpose(1, 2).to(torch.uint8)
    return out


def stored_exponents(arranged: Tensor, n: int, k: int, projections: int = 1) -> Tensor:
    """Return the exponents (..., n, k/32) that `arranged_exponents` has arranged, at most 30 below their largest."""
    size, k_blocks = n // projections, ceil_div(k, BLOCK)
    words = arranged.reshape(math.prod(arranged.shape[:-2]) * projections, k_blocks, _words(size), 4)
    rows = ceil_div(size, BLOCK)
    below = words[:, :, :size].int() // _ENTRY
    largest = words[:, :, size : size + rows, :1].int().repeat_interleave(BLOCK, 2)[:, :, :size]
    exponents = (largest - below).clamp(min=0).where(below < _NAN_BELOW, _NAN).to(torch.uint8).transpose(1, 2)
    return exponents.flatten(2)[..., : k // MX_BLOCK].reshape(*arranged.shape[:-2], n, k // MX_BLOCK)


def _words(size: int) -> int:
    """Return the number of words of a projection with `size` features and a block along K."""
    return align(size + ceil_div(size, BLOCK), 4)


def kernel_specs() -> tuple[KernelSpec, KernelSpec]:
    """Return the kernels that arrange codes and exponents."""
    exponents = ("BLOCK", BLOCK), ("BLOCKS", _BLOCKS)
    return (
        KernelSpec("arrange_codes.cu", "arrange_codes", (("THREADS", _THREADS),)),
        KernelSpec("arrange_exponents.cu", "arrange_exponents", exponents),
    )


@planned
def _codes_launcher(device_index: int, data: Tensor) -> PointerLauncher:
    groups = data.numel() // _GROUP_BYTES
    return PointerLauncher(
        load(kernel_specs()[0]),
        grid=ceil_div(groups, _THREADS),
        block=_THREADS,
        pointers=2,
        args=(ctypes.c_int64(groups),),
    )


@planned
def _exponents_launcher(device_index: int, exponents: Tensor) -> PointerLauncher:
    projections, size, groups = exponents.shape
    k_blocks = ceil_div(groups, _GROUPS)
    return PointerLauncher(
        load(kernel_specs()[1]),
        grid=(ceil_div(size, BLOCK), ceil_div(k_blocks, _BLOCKS), projections),
        block=BLOCK,
        pointers=2,
        args=tuple(map(ctypes.c_int64, (size, groups, k_blocks, _words(size)))),
    )
