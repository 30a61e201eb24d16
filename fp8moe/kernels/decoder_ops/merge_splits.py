"""Attention from its parts: ``merge_splits`` and the operators ``fp8moe::merge_splits`` and ``..._quantized``."""

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import merge_splits_plan, merge_splits_reference
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div, empty_mn_major
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import FLOATING, check_dtype, check_like, check_tensor
from fp8moe.runtime.operator import define

MAX_ROWS = 65535  # one dimension of a grid


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
    if quantized:
        return FP8Tensor(*autograd.run(_quantized_op, "fp8moe.kernels.decoder_ops.merge_splits", parts, lse, counts))
    return autograd.run(_values_op, "fp8moe.kernels.decoder_ops.merge_splits", parts, lse, counts)


def _check(parts: Tensor, lse: Tensor, counts: Tensor) -> tuple[int, int]:
    """The shape of the result."""
    check_dtype("parts", parts, *FLOATING)
    if parts.dim() != 5 or parts.shape[4] % 8 or parts.shape[0] > MAX_ROWS:
        raise ValueError(
            f"parts: expected shape (B, key heads, splits, G, D), B up to {MAX_ROWS} and D a multiple of 8, got "
            f"{tuple(parts.shape)}"
        )
    rows, key_heads, splits, shared, size = parts.shape
    check_like("lse", lse, (torch.float32,), (rows, key_heads, splits, shared), parts.device, "parts")
    check_like("counts", counts, (torch.int32,), (rows, key_heads, splits), parts.device, "parts")
    return rows, key_heads * shared * size


def _run(parts: Tensor, lse: Tensor, counts: Tensor, quantized: bool) -> tuple[Tensor | None, ...]:
    _check(parts, lse, counts)
    backend = merge_splits_plan if use_cuda(parts) else merge_splits_reference
    return backend.merge_splits(parts, lse, counts, quantized)


def _values(parts: Tensor, lse: Tensor, counts: Tensor) -> Tensor:
    return _run(parts, lse, counts, False)[0]


def _values_fake(parts: Tensor, lse: Tensor, counts: Tensor) -> Tensor:
    return parts.new_empty(_check(parts, lse, counts))


def _quantized(parts: Tensor, lse: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return _run(parts, lse, counts, True)[1:]


def _quantized_fake(parts: Tensor, lse: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = _check(parts, lse, counts)
    data = parts.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    return data, empty_mn_major(rows, ceil_div(columns, BLOCK), device=parts.device)


_ARGUMENTS = "Tensor parts, Tensor lse, Tensor counts"
_values_op = define(f"merge_splits({_ARGUMENTS}) -> Tensor", _values, _values_fake, forward_only=True)
_quantized_op = define(
    f"merge_splits_quantized({_ARGUMENTS}) -> (Tensor, Tensor)", _quantized, _quantized_fake, forward_only=True
)
