"""Keys and values of a static cache in FP8: E4M3 codes, with one float32 scale for each token and head."""

import torch
from torch import Tensor

from fp8moe.quant import reference
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.checks import check_contiguous, check_like, check_tensor

MULTIPLE = 16
"""Divides the values of a head whose codes the kernels load: 16 bytes at a time."""


def quantized(x: Tensor) -> FP8Tensor:
    """Quantize heads x (..., D), each with one scale: data (..., D) and scale (..., 1), by the rules of `quant`."""
    return FP8Tensor(*reference.quantize_rows(x))


def dequantized(x: FP8Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (B, heads, T, D) of the first T columns of a cache, in a new cache of all its columns.

    A value is ``data * scale``, rounded once. The result has the strides of a cache; columns behind T are left out.
    """
    batch, heads, columns, size = x.data.shape
    whole = torch.empty((batch, heads, x.data.stride(1) // size, size), dtype=dtype, device=x.data.device)
    return whole[:, :, :columns].copy_(x.data).mul_(x.scale)


def parts(x: Tensor | FP8Tensor) -> tuple[Tensor, Tensor | None]:
    """Return keys or values of a cache, or their codes, and the scales of the codes."""
    return x if isinstance(x, FP8Tensor) else (x, None)


def first_columns(x: Tensor | FP8Tensor, end: int | None) -> Tensor | FP8Tensor:
    """Return the columns before ``end`` of keys or values of a cache; None: all."""
    if end is None:
        return x
    return FP8Tensor(*(part.narrow(2, 0, end) for part in x)) if isinstance(x, FP8Tensor) else x.narrow(2, 0, end)


def check_tensors(keys: Tensor | FP8Tensor, values: Tensor | FP8Tensor) -> None:
    """Raise TypeError unless keys and values are both tensors or both FP8Tensors."""
    if isinstance(keys, FP8Tensor) != isinstance(values, FP8Tensor):
        raise TypeError("values: expected an FP8Tensor if keys are one, and a tensor otherwise")
    for name, cache in (("keys", keys), ("values", values)):
        data, scale = parts(cache)
        check_tensor(name, data)
        if isinstance(cache, FP8Tensor):
            check_tensor(f"{name}.scale", scale)


def check_cache(
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    q: Tensor,
    shape: tuple[int, ...],
) -> None:
    """Check a cache of this shape (B, key heads, L, D), in the dtype of q or in FP8.

    The scales of FP8 are (B, key heads, L, 1) float32. Raises TypeError or ValueError.
    """
    for name, cache, scales in (("keys", keys, key_scales), ("values", values, value_scales)):
        check_like(name, cache, (q.dtype if scales is None else torch.float8_e4m3fn,), shape, q.device, "q")
        check_contiguous(name, cache)
        if scales is None:
            continue
        if q.dtype.itemsize != 2 or shape[-1] % MULTIPLE:
            raise ValueError(
                f"{name}: FP8 needs q in bfloat16 or float16 and heads of a multiple of {MULTIPLE} values, got "
                f"{q.dtype} and {shape[-1]}"
            )
        check_like(f"{name}.scale", scales, (torch.float32,), (*shape[:-1], 1), q.device, "q")
        check_contiguous(f"{name}.scale", scales)
