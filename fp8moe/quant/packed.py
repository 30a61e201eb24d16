"""Quantize weights to four bits a value (MXFP4, INT4, NVFP4), with PyTorch operations on any device; unpack them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.quant.arranged import SCALE_BITS, arrange, power_of_two, projections_of, scale_parts, stored_codes
from fp8moe.quant.checks import check_packed
from fp8moe.quant.formats import BLOCK, FP8_MAX, MX_BLOCK, PACKED_FORMATS, FP8Tensor, PackedTensor, as_float, ceil_div
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.checks import FLOATING, check_dtype, check_int, check_tensor
from fp8moe.runtime.operator import define

_E8M0_NAN = 255  # a scale of MXFP4
_INT4_MAX = 7  # -8 is never written, so that codes are symmetric


def quantize_mxfp4(w: Tensor) -> PackedTensor:
    """Quantize weights to MXFP4: E2M1 codes, with a power of two for each row and 32 values along K.

    w: (..., N, K) bfloat16, float16 or float32, any strides; K a multiple of 32.
    Returns data uint8 (..., N, K/2) and scale uint8 (..., N, K/32), both contiguous, detached from the autograd graph.
    A group's scale is 2^(floor(log2(amax)) - 2), not less than 2^-127. Quotients are rounded to nearest, ties to the
    even code, and saturate at 6. A group with a NaN or infinity gets the scale NaN, and codes 0.
    Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or K.
    """
    check_tensor("w", w)
    return PackedTensor(*_quantize_mxfp4(detached(w)), "mxfp4")


def quantize_int4(w: Tensor, *, group: int = 128) -> PackedTensor:
    """Quantize weights to integers from -7 to 7, with a bfloat16 scale for each row and `group` values along K.

    w: (..., N, K) bfloat16, float16 or float32, any strides; K a multiple of `group`, which is 32 or 128.
    Returns data uint8 (..., N, K/2) and scale bfloat16 (..., N, K/group), both contiguous, detached from the autograd
    graph. A group's scale is amax / 7 rounded to bfloat16, and not less than its smallest normal number. Quotients of w
    and the rounded scale are rounded to nearest even. A group with a NaN or infinity gets the scale NaN, and codes 0.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, K or group.
    """
    check_tensor("w", w)
    check_int("group", group)
    return PackedTensor(*_quantize_int4(detached(w), group), "int4")


def quantize_arranged(w: Tensor, form: str, group: int) -> PackedTensor:
    """Quantize w (..., N, K) to a format, "mxfp4" and "nvfp4" arranged (`quant.arranged`), or "int4"."""
    if form == "int4":
        return quantize_int4(w, group=group)
    return arrange(quantize_mxfp4(w) if form == "mxfp4" else quantize_nvfp4(w))


def quantize_nvfp4(w: Tensor) -> PackedTensor:
    """Quantize weights to NVFP4: E2M1 codes, an E4M3 scale for each row and 16 values along K, and one for each matrix.

    w: (..., N, K) floating point, K a multiple of 32. Returns data uint8 (..., N, K/2), scale float8_e4m3fn (..., N,
    K/16) and tensor_scale float32 (...), the largest magnitude of a matrix / (6 * 448). A group's scale is its largest
    magnitude / 6 / tensor_scale, rounded to E4M3; quotients are rounded to the nearest code.
    Source: Pretraining Large Language Models with NVFP4, arXiv:2509.25149, appendix C.
    """
    groups = w.detach().float().unflatten(-1, (w.shape[-1] // 16, 16))
    largest = groups.abs().amax(-1)
    tiny = torch.finfo(torch.float32).tiny
    tensor_scale = (pad(largest.flatten(-2), (1, 0)).amax(-1) / (6 * FP8_MAX)).clamp(min=tiny)
    scale = (largest / 6 / tensor_scale[..., None, None]).to(torch.float8_e4m3fn)
    magnitude = groups.abs() / (scale.float() * tensor_scale[..., None, None])[..., None].clamp(min=tiny)
    codes = _e2m1_codes(magnitude.clamp(max=6)) + 8 * groups.signbit()
    return PackedTensor(_packed(codes.to(torch.uint8)), scale, "nvfp4", tensor_scale)


def blocks_of_nvfp4(data: Tensor, scale: Tensor) -> FP8Tensor:
    """Return arranged NVFP4 weights (..., N, K) as FP8 in blocks, with the values that kernels multiply.

    Returns data (..., N, K), a code times its group's scale rounded to E4M3 within its block, and scale float32
    (..., blocks of each projection along N, ceil(K/128)).
    """
    *lead, n, half = data.shape
    k, projections = 2 * half, projections_of(data, scale)
    below, mantissa, _, block_scale, _ = scale_parts(scale, n, k, projections)
    factor = ((1 + mantissa / 8) * power_of_two(SCALE_BITS - below)).where(below >= 0, 0).where(mantissa >= 0, math.nan)
    groups = e2m1_values(unpacked(stored_codes(data))).view(*factor.shape, 16)
    values = (groups * factor[..., None]).to(torch.float8_e4m3fn)
    return FP8Tensor(values.view(*lead, n, k), block_scale.reshape(*lead, -1, ceil_div(k, BLOCK)))


def dequantized(t: PackedTensor) -> Tensor:
    """Compute `dequantize` of a PackedTensor in float32. Raises its errors."""
    check_packed("t", t)
    data, scale, _, tensor_scale = t
    codes = packed_values(data, scale)
    values = codes.unflatten(-1, (scale.shape[-1], codes.shape[-1] // max(scale.shape[-1], 1)))
    values = (values * as_float(scale)[..., None]).flatten(-2)
    if tensor_scale is None:
        return values
    per_row = tensor_scale.dim() == data.dim() - 1
    return values * (tensor_scale[..., None] if per_row else tensor_scale[..., None, None])


def packed_values(data: Tensor, scale: Tensor) -> Tensor:
    """Return the values (..., K) in float32 of the codes of packed weights, without their scales."""
    codes = unpacked(data)
    return (codes ^ 8).float() - 8 if scale.dtype in PACKED_FORMATS["int4"].scale_dtypes else e2m1_values(codes)


def unpacked(data: Tensor) -> Tensor:
    """Return the codes (..., K) of packed weights, one a byte. data: uint8 (..., K/2)."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def e2m1_values(codes: Tensor) -> Tensor:
    """Return the values of E2M1 codes (uint8, below 16) in float32."""
    # With exponent and mantissa moved to the bits that these have in E4M3, a code is the value times 2^-6.
    return ((codes & 8) << 4 | (codes & 7) << 2).view(torch.float8_e4m3fn).float() * 64


def _packed(codes: Tensor) -> Tensor:
    """Pack groups of codes, uint8 (N, K/group, group), to (N, K/2)."""
    codes = codes.flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _by_matrix(
    quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]], w: Tensor, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantize the matrices of w (..., N, K) one at a time. Temporary memory is several times the size of a matrix."""
    results = _empty(w, group, dtype)
    stacked = [value.reshape(math.prod(w.shape[:-2]), *value.shape[-2:]) for value in (w, *results)]
    for matrix, *parts in zip(*stacked, strict=True):
        for part, value in zip(parts, quantize(matrix, group), strict=True):
            part.copy_(value)
    return results


def _groups(w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return w (N, K) in float32 as (N, K/group, group), the largest magnitude of each group, and if it is finite."""
    groups = w.float().unflatten(-1, (w.shape[-1] // group, group))
    largest = groups.abs().amax(-1)
    return groups, largest, largest.isfinite()


def _mxfp4(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups, largest, finite = _groups(w, group)
    exponent = ((largest.view(torch.int32) >> 23) - 2).clamp(min=0)  # of the scale, plus 127 as in float32 and E8M0
    magnitude = groups.abs() * ((254 - exponent) << 23).view(torch.float32)[..., None]  # over the scale: below 8
    codes = _e2m1_codes(magnitude) + 8 * groups.signbit()
    scale = torch.where(finite, exponent, _E8M0_NAN).to(torch.uint8)
    return _packed(torch.where(finite[..., None], codes, 0).to(torch.uint8)), scale


def _e2m1_codes(magnitude: Tensor) -> Tensor:
    """Round magnitudes below 8 to codes of E2M1, to nearest, ties to the even code; they saturate at 6."""
    # E2M1 has steps of 1/2 below 2, of 1 below 4 and of 2 beyond; codes count steps, so even steps are even codes.
    binade = ((magnitude.view(torch.int32) >> 23) - 127).clamp(0, 2)
    steps = (magnitude * ((128 - binade) << 23).view(torch.float32)).round()
    return (steps + 2 * binade).clamp(max=7)


def _int4(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups, largest, finite = _groups(w, group)
    # Divide by a tensor, because on a GPU PyTorch replaces division by a number with multiplication by a reciprocal.
    scale = (largest / largest.new_full((), _INT4_MAX)).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, _INT4_MAX)
    codes = torch.where(finite[..., None], codes, 0).to(torch.int8).view(torch.uint8) & 15
    return _packed(codes), torch.where(finite, scale, torch.nan)


def _empty(w: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Check w and group. Returns uninitialized data and scale, of this dtype, for w."""
    check_dtype("w", w, *FLOATING)
    groups = PACKED_FORMATS["int4"].groups
    if group not in groups:
        raise ValueError(f"group: expected one of {groups}, got {group}")
    if w.dim() < 2 or w.shape[-1] % group:
        raise ValueError(f"w: expected shape (..., N, K) with K a multiple of {group}, got {tuple(w.shape)}")
    *lead, k = w.shape
    return w.new_empty((*lead, k // 2), dtype=torch.uint8), w.new_empty((*lead, k // group), dtype=dtype)


_quantize_mxfp4 = define(
    "quantize_mxfp4(Tensor w) -> (Tensor, Tensor)",
    lambda w: _by_matrix(_mxfp4, w, MX_BLOCK, torch.uint8),
    lambda w: _empty(w, MX_BLOCK, torch.uint8),
)
_quantize_int4 = define(
    "quantize_int4(Tensor w, SymInt group) -> (Tensor, Tensor)",
    lambda w, group: _by_matrix(_int4, w, group, torch.bfloat16),
    lambda w, group: _empty(w, group, torch.bfloat16),
)
