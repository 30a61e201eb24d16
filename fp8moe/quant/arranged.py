"""MXFP4 and NVFP4 weights as the GEMM kernels load them, and as `GroupedExperts` keeps them: codes and scales arranged.

Codes: of 32 values, bytes 4q to 4q + 3 have values 4q to 4q + 3 in the low half and 16 + 4q to 16 + 4q
+ 3 in the high half. The three low bits of each code are in its nibble. The sign of the j-th value of the low half is
in bit 8j + 7, that of the high half in bit 8j + 3: one shift brings four signs to where E4M3 has them.

Exponents of MXFP4: by blocks of 128 along K, and relative to their largest. The words of a projection (N, K) and a
block of 128 along K are contiguous: a word for each feature, whose bytes are 8 times how far its four exponents are
below the largest of a block of 128 features, at most 30, or 248 for NaN; then a word (int32) with the largest exponent
of each block; then zeros, up to a multiple of 4 words. So a byte is the offset of an entry in the kernels' table of
magnitudes, which are zero from 19 on.

Scales of NVFP4: likewise, with eight bytes for each feature: 8 times how far a scale's exponent is below the largest
of the block, at most 30, plus the three bits of its mantissa; 254 for 0, 255 for NaN, which negative scales become too.
Behind them lie a float32 for each block of 128 features, 2^(largest exponent - 5) times the tensor scale, by which the
block's E4M3 values are multiplied; then the largest exponent (int32) of each block; then the tensor scale; then zeros.
The dtype float8_e4m3fn of this tensor only names the format. Where rows have tensor scales of their own, those of a
block are brought to the largest, and scales of groups are rounded to three bits of mantissa once more.
"""

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.quant.formats import BLOCK, MX_BLOCK, PackedTensor, align, ceil_div, packed_format
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import define

ARRANGED = ("mxfp4", "nvfp4")
"""The formats whose codes and scales are arranged."""

_GROUPS = BLOCK // MX_BLOCK  # exponents of a feature in a block along K
_NAN = 255
_MOST_BELOW, _NAN_BELOW = 30, 31
_ENTRY = 8  # bytes of an entry of the table
_LARGEST = 0x7F7FFFFF  # the bits of the largest float32
_SCALES = BLOCK // 16  # scales of NVFP4 of a feature in a block along K
SCALE_BITS = 5
"""NVFP4: the largest product of a code and the mantissa of a scale is 11.25, so times 2^5 it is in E4M3's range."""
SCALE_ZERO, SCALE_NAN = 254, 255
"""The bytes of 0 and NaN among arranged scales of NVFP4."""
NAN_BYTE = _ENTRY * _NAN_BELOW
"""The byte of NaN among arranged exponents; no finite weights that are below 2^121 have it."""
_BLOCKS = 8  # blocks along K that a thread block arranges
_THREADS = 256  # in a thread block that arranges codes
_GROUP_BYTES = MX_BLOCK // 2
_AT_ONCE = 1 << 20  # groups that PyTorch arranges at a time


def arranged_shape(n: int, k: int, projections: int = 1, form: str = "mxfp4") -> tuple[int, int]:
    """Return the shape of arranged scales for weights (n, k), which stack this many projections along n."""
    size = n // projections
    return projections * ceil_div(k, BLOCK), 4 * _words(size) if form == "mxfp4" else _scale_bytes(size)


def projections_of(data: Tensor, scale: Tensor) -> int:
    """Return by how many projections the scale of weights (..., N, K) is arranged; 0 if it is as stored.

    data: (..., N, K/2). No two of these layouts have equal shapes.
    """
    form = packed_format(scale)
    if form not in ARRANGED:
        return 0
    n, half = data.shape[-2:]
    if scale.shape == stored_shape(data, form):
        return 0
    shapes = ((count, arranged_shape(n, 2 * half, count, form)) for count in (1, 2))
    return next((count for count, shape in shapes if tuple(scale.shape[-2:]) == shape), 0)


def stored_shape(data: Tensor, form: str) -> torch.Size:
    """Return the shape of the stored scales of MXFP4 or NVFP4 weights with these codes."""
    *lead, half = data.shape
    return torch.Size((*lead, half // (16 if form == "mxfp4" else 8)))


def arrange(t: PackedTensor, projections: int = 1) -> PackedTensor:
    """Arrange weights; INT4 stays as it is. projections: matrices stacked along N, each arranged for itself.

    tensor_scale of NVFP4 becomes a part of the scale: (...), (..., projections) or (..., N).
    """
    if t.format not in ARRANGED:
        return t
    if t.format == "nvfp4":
        return PackedTensor(*_arrange_nvfp4(t.data, t.scale, t.tensor_scale, projections), t.format)
    return PackedTensor(arranged_codes(t.data), arranged_exponents(t.scale, projections), t.format)


def as_stored(data: Tensor, scale: Tensor) -> PackedTensor:
    """Return weights, which are arranged or as in a PackedTensor, as in a PackedTensor.

    tensor_scale of arranged NVFP4 is (...), or (..., 2) of two projections; of stored NVFP4 it is None.
    """
    projections, form = projections_of(data, scale), packed_format(scale)
    if not projections:
        return PackedTensor(data, scale, form)
    n, k = data.shape[-2], 2 * data.shape[-1]
    if form == "nvfp4":
        stored, tensor_scale = stored_scales(scale, n, k, projections)
        return PackedTensor(stored_codes(data), stored, form, tensor_scale)
    return PackedTensor(stored_codes(data), stored_exponents(scale, n, k, projections), form)


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


def arranged_scales(scale: Tensor, tensor_scale: Tensor, projections: int = 1) -> Tensor:
    """Arrange the scales of NVFP4 weights (..., N, K), a matrix at a time.

    scale: float8_e4m3fn (..., N, K/16). tensor_scale: float32 (...), (..., projections) or (..., N). projections:
    number of matrices stacked along N, each arranged for itself. Returns (..., *`arranged_shape`).
    """
    *lead, n, groups = scale.shape
    size, k_blocks = n // projections, ceil_div(groups, _SCALES)
    out = scale.new_empty((*lead, projections * k_blocks, _scale_bytes(size)))
    if not out.numel():
        return out
    count = math.prod(lead) * projections
    stacked, made = scale.reshape(count, size, groups), out.view(torch.uint8).view(count, k_blocks, -1)
    factors = tensor_scale if tensor_scale.dim() > len(lead) else tensor_scale[..., None]
    factors = factors.expand(*lead, projections) if factors.shape[-1] == 1 else factors
    for matrix, factor, target in zip(stacked, factors.reshape(count, -1), made, strict=True):
        target.copy_(_arranged_matrix(matrix, factor))
    return out


def _arranged_matrix(scale: Tensor, factor: Tensor) -> Tensor:
    """Arrange the scales (size, groups) of one matrix. factor: tensor scales (1,), or (size,) of its rows."""
    size, groups = scale.shape
    rows, k_blocks = ceil_div(size, BLOCK), ceil_div(groups, _SCALES)
    one, factor = factor[:1].view(torch.int32), factor.expand(size)
    factors = pad(factor, (0, BLOCK * rows - size), value=math.nan).view(rows, BLOCK)
    largest_factor = factors.where(factors.isfinite(), -math.inf).amax(1)
    largest_factor = largest_factor.where(largest_factor.isfinite(), math.nan)
    of_row = largest_factor.repeat_interleave(BLOCK)[:size]
    bits = (scale.float() * torch.where(factor == of_row, 1, factor / of_row)[:, None]).view(torch.int32)
    is_number = (bits <= _LARGEST) & ((bits >= 0) | (bits == -(1 << 31)))
    bits = bits + 0x7FFFF + (bits >> 20 & 1)  # rounded to three bits of mantissa, to the nearest even
    exponent, is_zero = bits >> 23, bits & 0x7F800000 == 0
    blocks = pad(exponent.where(is_number & ~is_zero, 0), (0, _SCALES * k_blocks - groups, 0, BLOCK * rows - size))
    largest = blocks.view(rows, BLOCK, k_blocks, _SCALES).amax((1, 3))
    of_block = largest.repeat_interleave(BLOCK, 0)[:size].repeat_interleave(_SCALES, 1)[:, :groups]
    codes = _ENTRY * (of_block - exponent).clamp(max=_MOST_BELOW) + (bits >> 20 & 7)
    codes = codes.where(~is_zero, SCALE_ZERO).where(is_number, SCALE_NAN).to(torch.uint8)
    codes = pad(codes, (0, _SCALES * k_blocks - groups), value=SCALE_ZERO).view(size, k_blocks, _SCALES)
    block_scale = largest_factor[:, None] * power_of_two(largest - 127 - SCALE_BITS)
    words = torch.cat((block_scale.view(torch.int32).T, largest.T, one.expand(k_blocks, 1)), 1)
    joined = torch.cat((codes.transpose(0, 1).flatten(1), words.view(torch.uint8)), 1)
    return pad(joined, (0, _scale_bytes(size) - joined.shape[1]))


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float32. exponent: int32, brought to the range of normal numbers."""
    return (exponent.clamp(-126, 127) + 127 << 23).view(torch.float32)


def stored_scales(arranged: Tensor, n: int, k: int, projections: int = 1) -> tuple[Tensor, Tensor]:
    """Return the scales (..., n, k/16) that `arranged_scales` has arranged, and the tensor scales.

    The latter are (...), or (..., 2) of two projections.
    """
    below, mantissa, largest, _, factor = scale_parts(arranged, n, k, projections)
    values = (1 + mantissa / 8) * power_of_two(largest - below)
    values = values.where(below >= 0, 0).where(mantissa >= 0, math.nan)
    *lead, _, _ = arranged.shape
    factor = factor.view(*lead, projections) if projections > 1 else factor.view(lead)
    return values.to(arranged.dtype).reshape(*lead, n, k // 16), factor


def scale_parts(arranged: Tensor, n: int, k: int, projections: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what arranged scales hold, of M matrices (size, k) in all.

    Returns for each feature and group (M, size, k/16) in int32 how far its exponent is below the largest of its block,
    -1 for a scale of 0, the bits of its mantissa, -1 for NaN, and that largest exponent; for each block (M, ceil(size /
    128), ceil(k/128)) the factor of its E4M3 values; and the tensor scales (M,).
    """
    size, k_blocks, groups = n // projections, ceil_div(k, BLOCK), k // 16
    rows, count = ceil_div(size, BLOCK), math.prod(arranged.shape[:-2]) * projections
    whole = arranged.contiguous().view(torch.uint8).view(count, k_blocks, _scale_bytes(size))
    codes = whole[..., : _SCALES * size].reshape(count, k_blocks, size, _SCALES).transpose(1, 2)
    codes = codes.flatten(2)[..., :groups].int()
    words = whole[..., _SCALES * size :].contiguous().view(torch.int32)
    block_scale, largest = (words[..., i * rows : (i + 1) * rows].transpose(1, 2) for i in range(2))
    largest = (largest - 127).repeat_interleave(BLOCK, 1)[:, :size].repeat_interleave(_SCALES, 2)[..., :groups]
    below = (codes // _ENTRY).where(codes != SCALE_ZERO, -1)
    factor = words[:, :1, 2 * rows].contiguous().view(torch.float32)
    mantissa = (codes % _ENTRY).where(codes != SCALE_NAN, -1)
    return below, mantissa, largest, block_scale.contiguous().view(torch.float32), factor.flatten()


def has_nan_scale(arranged: Tensor, size: int) -> Tensor:
    """Return whether a scale of NVFP4 is NaN. arranged: (..., bytes) of projections with `size` features."""
    return (arranged.view(torch.uint8)[..., : _SCALES * size] == SCALE_NAN).any()


def _scale_bytes(size: int) -> int:
    """Return the bytes of the scales of a projection of NVFP4 with `size` features and a block along K."""
    return align(_SCALES * size + 4 * (2 * ceil_div(size, BLOCK) + 1), 16)


def _nvfp4(data: Tensor, scale: Tensor, tensor_scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    return arranged_codes(data), arranged_scales(scale, tensor_scale, projections)


def _nvfp4_fake(data: Tensor, scale: Tensor, tensor_scale: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    *lead, n, half = data.shape
    shape = arranged_shape(n, 2 * half, projections, "nvfp4")
    return torch.empty_like(data, memory_format=torch.contiguous_format), scale.new_empty((*lead, *shape))


_arrange_nvfp4 = define(
    "arrange_nvfp4(Tensor data, Tensor scale, Tensor tensor_scale, SymInt projections) -> (Tensor, Tensor)",
    _nvfp4,
    _nvfp4_fake,
)


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
