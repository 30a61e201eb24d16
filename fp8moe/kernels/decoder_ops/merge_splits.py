"""Attention from its parts: ``merge_splits``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div, empty_quantized
from fp8moe.quant.quantize import quantize_1x128, quantizer_defines
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import FLOATING, aligned, check_dtype, check_like, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import operator

MAX_ROWS = 65535  # one dimension of a grid
_GROUPS = 8
_VECTOR_BYTES = 16


def merge_splits(parts: Tensor, lse: Tensor, counts: Tensor, *, quantized: bool) -> Tensor | FP8Tensor:
    """The attention of one token a sequence, whose keys were attended to in parts of their own.

    parts: (B, key heads, splits, G, D) bfloat16, float16 or float32, the attention over each part of the keys for the
        G heads that share a key head. D a multiple of 8, B up to 65535.
    lse: (B, key heads, splits, G) float32, the logarithm of each softmax's sum of exponentials.
    counts: (B, key heads, splits) int32, keys in each part: one of none adds nothing and is not read.
    quantized: in blocks of 1x128, with the bits of ``quantize_1x128`` of the values.
    Returns (B, key heads * G * D) in the dtype of parts, or of it an FP8Tensor: the parts' sum with weights
    ``exp(lse) / sum(exp(lse))`` in float32, rounded once; zeros where there are no keys.

    Method: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023), the sum of its last step. There is no backward: calling it
    raises RuntimeError. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
    """
    for name, value in (("parts", parts), ("lse", lse), ("counts", counts)):
        check_tensor(name, value)
    op = _quantized_op if quantized else _values_op
    merged = autograd.run(op, "fp8moe.kernels.decoder_ops.merge_splits", parts, lse, counts)
    return FP8Tensor(*merged) if quantized else merged


def _check(parts: Tensor, lse: Tensor, counts: Tensor) -> None:
    check_dtype("parts", parts, *FLOATING)
    if parts.dim() != 5 or parts.shape[4] % 8 or parts.shape[0] > MAX_ROWS:
        raise ValueError(
            f"parts: expected shape (B, key heads, splits, G, D), B up to {MAX_ROWS} and D a multiple of 8, got "
            f"{tuple(parts.shape)}"
        )
    rows, key_heads, splits, shared, size = parts.shape
    check_like("lse", lse, (torch.float32,), (rows, key_heads, splits, shared), parts.device, "parts")
    check_like("counts", counts, (torch.int32,), (rows, key_heads, splits), parts.device, "parts")


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lse_part", "lse_head", "scale_pitch")),
        ("splits", ctypes.c_int32),
    )


def kernel_spec(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel for heads of `size` values of `dtype`."""
    sizes = (("HEADS", heads), ("KEY_HEADS", key_heads), ("SIZE", size), ("GROUPS", _GROUPS))
    defines = (*quantizer_defines(dtype), *sizes, ("SIZES_BYTES", ctypes.sizeof(_Sizes)))
    return KernelSpec("merge_splits.cu", "merge_splits", defines)


@planned
def launcher(
    device_index: int, shape: tuple[int, ...], lse_strides: tuple[int, ...], dtype: torch.dtype
) -> PointerLauncher:
    """The launcher for parts of this shape and `dtype`, lse, counts, values, data and scale, in this order.

    lse_strides: of lse (B * key heads * splits, G). None is for values, or for data and scale.
    """
    rows, key_heads, splits, shared, size = shape
    return PointerLauncher(
        load(kernel_spec(key_heads * shared, key_heads, size, dtype)),
        grid=(ceil_div(key_heads * shared * size, BLOCK), rows),
        block=_GROUPS * BLOCK * dtype.itemsize // _VECTOR_BYTES,
        pdl=True,
        pointers=6,
        args=(_Sizes(*lse_strides, align(rows, 4), splits),),
    )


def _launch(parts: Tensor, lse: Tensor, counts: Tensor, *results: Tensor | None) -> None:
    """Fill values, data and scale, those that are not None; operands in any layout."""
    if parts.shape[0] * _columns(parts):
        lse = lse.flatten(0, 2)
        launch = launcher(parts.get_device(), tuple(parts.shape), lse.stride(), parts.dtype)
        launch(aligned(parts), lse, counts.contiguous(), *results)


def _columns(parts: Tensor) -> int:
    _, key_heads, _, shared, size = parts.shape
    return key_heads * shared * size


def _empty(parts: Tensor, lse: Tensor, counts: Tensor) -> Tensor:
    return parts.new_empty((parts.shape[0], _columns(parts)))


def _values(parts: Tensor, lse: Tensor, counts: Tensor) -> Tensor:
    values = _empty(parts, lse, counts)
    _launch(parts, lse, counts, values, None, None)
    return values


def _reference(parts: Tensor, lse: Tensor, counts: Tensor) -> Tensor:
    none = (counts <= 0)[..., None]
    lse = lse.float().masked_fill(none, -torch.inf)
    largest = lse.amax(2, keepdim=True)
    weights = torch.exp(lse - largest).masked_fill(none, 0)
    total = weights.sum(2, keepdim=True)
    weights = torch.where(total == 0, 0, weights / total)[..., None]
    sums = (parts.float().masked_fill(none[..., None], 0) * weights).sum(2)
    return sums.to(parts.dtype).flatten(1)


def _empty_quantized(parts: Tensor, lse: Tensor, counts: Tensor) -> FP8Tensor:
    return empty_quantized(parts, parts.shape[0], _columns(parts))


def _quantized(parts: Tensor, lse: Tensor, counts: Tensor) -> FP8Tensor:
    quantized = _empty_quantized(parts, lse, counts)
    _launch(parts, lse, counts, None, *quantized)
    return quantized


_values_op = operator(
    "merge_splits -> Tensor",
    check=_check,
    cuda=_values,
    reference=_reference,
    fake=_empty,
    forward_only=True,
)
_quantized_op = operator(
    "merge_splits_quantized -> (Tensor, Tensor)",
    check=_check,
    cuda=_quantized,
    reference=lambda *operands: quantize_1x128(_reference(*operands)),
    fake=_empty_quantized,
    forward_only=True,
)
