"""Launches ``cuda/rotary.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import input_defines
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

_WARPS = 4  # of a thread block
_VECTOR_BYTES = 16
_MANY_ROWS = 256
_POINTERS = ("q", "k", "v", "cos", "sin", "q_weight", "k_weight", "query", "keys", "values", "columns")
_AT_ONCE = {False: 1, True: 4}  # heads of a lane, by whether there are many rows: few heads of few tokens fill no GPU


class _Arguments(ctypes.Structure):
    """``struct Arguments`` of cuda/rotary.cu."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "length")),
        *((name, ctypes.c_uint32) for name in ("batch", "tokens", "one_table", "copies")),
        ("eps", ctypes.c_float),
    )


class _Plan:
    """The kernel with its grid and all arguments but the pointers, on the current device."""

    def __init__(self, spec: KernelSpec, warps: int, **sizes: float):
        self._arguments = _Arguments(**sizes)
        grid = ceil_div(warps, _WARPS)
        self._launcher = Launcher(load(spec), grid=grid, block=_WARPS * WARP, pdl=True, args=(self._arguments,))

    def launch(self, stream: int, *tensors: Tensor | None) -> None:
        """tensors: in the order of _POINTERS."""
        with self._launcher.lock:
            for name, value in zip(_POINTERS, tensors, strict=True):
                setattr(self._arguments, name, 0 if value is None else value.data_ptr())
            self._launcher.launch(stream)


_plans: PlanCache[_Plan] = PlanCache()


def _lanes(size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Lanes for a head of `size` values, a power of two, and vectors of 16 bytes of each."""
    vectors = ceil_div(size * dtype.itemsize, _VECTOR_BYTES * WARP)
    lanes = ceil_div(size * dtype.itemsize, _VECTOR_BYTES * vectors)
    return 1 << (lanes - 1).bit_length(), vectors


def kernel_spec(
    dtype: torch.dtype, heads: int, key_heads: int, size: int, rotated: int, norm: bool, many: bool
) -> KernelSpec:
    """The kernel for heads of `size` values, with or without their norm; many: rows."""
    lanes, vectors = _lanes(size, dtype)
    constants = {
        **{"HEADS": heads, "KEY_HEADS": key_heads, "SIZE": size, "ROTATED": rotated, "NORM": int(norm)},
        **{"WARPS": _WARPS, "AT_ONCE": _AT_ONCE[many], "HEAD_LANES": lanes, "VECTORS": vectors},
        "ARGUMENTS_BYTES": ctypes.sizeof(_Arguments),
    }
    return KernelSpec("rotary.cu", "rotary", (*input_defines(dtype), *constants.items()))


def rotary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    copies: int,
) -> Tensor:
    """As ``block.rotary.rotary`` describes it, on operands that it has checked."""
    query = torch.empty((*q.shape[:2], copies * q.shape[2], q.shape[3]), dtype=q.dtype, device=q.device)
    if not (q.numel() or k.numel()):
        return query
    batch, tokens, heads, size = q.shape
    key_heads, length = keys.shape[1:3]
    q, k, v = map(_rows, (q, k, v))
    cos, sin = aligned(cos), aligned(sin)
    index = q.get_device()
    norm, rotated, dtype = q_weight is not None, cos.shape[2], q.dtype
    strides = {f"{name}_stride": x.stride(1 if tokens > 1 else 0) for name, x in (("q", q), ("k", k), ("v", v))}
    sizes = {
        **strides,
        "length": length,
        "batch": batch,
        "tokens": tokens,
        "one_table": cos.shape[0] == 1,
        "copies": copies,
        "eps": eps,
    }

    def build() -> _Plan:
        many = batch * tokens >= _MANY_ROWS
        heads_of_warp = _AT_ONCE[many] * WARP // _lanes(size, dtype)[0]
        warps = batch * tokens * ceil_div(heads + 2 * key_heads, heads_of_warp)
        return _Plan(kernel_spec(dtype, heads, key_heads, size, rotated, norm, many), warps, **sizes)

    with device_guard(index):
        plan = _plans.get((dtype, heads, key_heads, size, rotated, norm, *sizes.values(), index), build)
        plan.launch(current_stream(index), q, k, v, cos, sin, q_weight, k_weight, query, keys, values, columns)
    return query


def _rows(x: Tensor) -> Tensor:
    """x (B, T, heads, D) as the kernel reads it: itself where its rows lie evenly spaced, otherwise a copy."""
    batch, tokens, heads, size = x.shape
    sequence, token, head, value = x.stride()
    even = batch == 1 or tokens == 1 or sequence == tokens * token
    pitch = token if tokens > 1 else sequence
    whole = (heads == 1 or head == size) and value == 1 and not (pitch * x.itemsize % 16 or x.data_ptr() % 16)
    return x if even and whole else aligned(x.contiguous())
