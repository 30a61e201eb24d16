"""`combine`: the weighted sum of each token's rows, optionally followed by RMSNorm in the same kernel."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm import row_threads
from fp8moe.kernels.experts import checks, reference
from fp8moe.kernels.experts.routing import INDEX_TYPES
from fp8moe.quant.formats import align, ceil_div
from fp8moe.quant.quantize import INPUT_TYPES, input_defines, quantizer_defines
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import aligned, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned, resident_blocks
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import WARP

_WARPS = 4  # warps of a thread block
_BLOCKS_PER_SM = 8  # thread blocks that an SM runs at once
_MAX_NORM_TOKENS = 64
_MAX_NORM_BYTES = 32 << 10  # most bytes of a row for combine_norm.cu, whose thread blocks keep a row in registers


def combine(
    y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, *, residual: Tensor | None = None
) -> Tensor:
    """Return ``out[t] = sum over k of weights[t, k] * y[rows[t, k]]``, in float32 in the order of k, rounded once.

    y: (num_rows, H) bfloat16 or float32, any strides; H a multiple of 8, num_rows < 2**31.
    rows: (T, K) int32, as `sort_by_expert` returns it. Assignments whose row is outside [0, num_rows) add nothing. Only
        rows of y with an assignment are read, so a NaN in another row has no effect.
    weights: (T, K) bfloat16, float16 or float32.
    out_dtype: bfloat16, float16 or float32.
    residual: (T, H) in out_dtype, added to the rounded sum, or None.
    Returns (T, H). Equal inputs give equal bits. There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device.
    """
    for name, value in (("y", y), ("rows", rows), ("weights", weights)):
        check_tensor(name, value)
    if residual is not None:
        check_tensor("residual", residual)
    return autograd.run(_combine, "fp8moe.kernels.experts.combine", y, rows, weights, out_dtype, residual)


class _RoutingSizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("tokens", "top_k", "bound"))


class _CombineSizes(ctypes.Structure):
    _fields_ = (("routing", _RoutingSizes), ("warps", ctypes.c_uint32))


class Dtypes(NamedTuple):
    """Dtypes of the operands. index: dtype of `rows` if `rows` has expert indices (see `launcher`), otherwise None."""

    y: torch.dtype
    weights: torch.dtype
    out: torch.dtype
    index: torch.dtype | None = None


def _warp_columns(y_dtype: torch.dtype) -> int:
    """Return the number of columns that a warp processes at a time: 16 bytes per lane."""
    return WARP * 16 // y_dtype.itemsize


def kernel_spec(hidden: int, dtypes: Dtypes) -> KernelSpec:
    """Return the kernel for rows of `hidden` columns in these dtypes."""
    types = (
        ("WEIGHT", INPUT_TYPES[dtypes.weights]),
        ("OUTPUT", INPUT_TYPES[dtypes.out]),
        ("ROW", INDEX_TYPES[dtypes.index or torch.int32]),
        ("PLACED", int(dtypes.index is not None)),
    )
    sizes = (
        ("WARPS", _WARPS),
        ("WARP_COLUMNS", _warp_columns(dtypes.y)),
        ("HIDDEN", hidden),
        ("SIZES_BYTES", ctypes.sizeof(_CombineSizes)),
    )
    return KernelSpec("combine.cu", "combine", (*input_defines(dtypes.y), *types, *sizes))


@planned
def launcher(
    device_index: int,
    tokens: int,
    hidden: int,
    top_k: int,
    bound: int,
    dtypes: Dtypes,
    *,
    sparse: bool = False,
    pdl: bool = False,
) -> PointerLauncher:
    """Return the launcher of combine.cu, to be called with (y, rows, weights, residual, known, now, out).

    y: (bound, hidden). rows, weights: (tokens, top_k). residual, out: (tokens, hidden). The numbers `tokens` and
        `hidden` are not 0. All tensors are contiguous; y, residual and out are at multiples of 16 bytes.
    known: bool (tokens,), the tokens that have a residual; None: all tokens have one, or residual is None.
    now: bool (tokens,), an output: the tokens that have a sum. Only rows of these tokens are written to out. None: all
        of out is written.
    sparse: most tokens have no row; affects only speed.

    If dtypes.index is given, `rows` contains expert indices: assignment t * top_k + k then has row t * top_k + k of y,
    (tokens * top_k, hidden), or no row if its expert is outside [0, bound).
    """
    warps = 1 if sparse else ceil_div(hidden, _warp_columns(dtypes.y))  # warps that share a token
    blocks = ceil_div(tokens * warps, _WARPS)
    return PointerLauncher(
        load(kernel_spec(hidden, dtypes)),
        grid=min(blocks, resident_blocks(_BLOCKS_PER_SM, device_index)) if sparse else blocks,
        block=_WARPS * WARP,
        pdl=pdl,
        pointers=4,
        args=((ctypes.c_int64 * 3)(), _CombineSizes(_RoutingSizes(tokens, top_k, bound), warps)),
    )


def joins_norm(tokens: int, hidden: int, dtypes: Dtypes) -> bool:
    """Return whether one kernel can sum the rows of each token, add the residual and normalize the result.

    The kernel uses one thread block per token, which has few loads in flight and so is slow for many tokens.
    """
    fits = 0 < hidden * dtypes.out.itemsize <= _MAX_NORM_BYTES
    return 0 < tokens <= _MAX_NORM_TOKENS and fits and dtypes.y is dtypes.out and dtypes.index is None


def _norm_threads(hidden: int, dtype: torch.dtype) -> int:
    return align(row_threads(hidden * dtype.itemsize), WARP)


def norm_kernel_spec(hidden: int, dtypes: Dtypes) -> KernelSpec:
    """Return the kernel that sums rows of `hidden` columns and normalizes the sums."""
    types = ("WEIGHT", INPUT_TYPES[dtypes.weights]), ("ROW", INDEX_TYPES[torch.int32]), ("PLACED", 0)
    sizes = ("HIDDEN", hidden), ("ROW_THREADS", _norm_threads(hidden, dtypes.out))
    return KernelSpec("combine_norm.cu", "combine_norm", (*quantizer_defines(dtypes.out), *types, *sizes))


@planned
def norm_launcher(
    device_index: int,
    tokens: int,
    hidden: int,
    top_k: int,
    bound: int,
    dtypes: Dtypes,
    eps: float,
    *,
    pdl: bool = False,
) -> PointerLauncher:
    """Return the launcher, called with (y, rows, weights, residual, norm weight (hidden,), out, values, data, scale).

    y, rows, weights, residual, out: as for `launcher`. values: (tokens, hidden), the RMSNorm of out, in the dtype of
    out. data, scale: the norm quantized 1x128, scale MN-major. If values are not wanted, pass None for values; if
    data and scale are not wanted, pass None for both. `joins_norm` must be True for the sizes. With pdl, all operands
    but y must have been written before the previous kernel began.
    """
    return PointerLauncher(
        load(norm_kernel_spec(hidden, dtypes)),
        grid=tokens,
        block=_norm_threads(hidden, dtypes.out),
        pdl=pdl,
        pointers=5,
        args=((ctypes.c_int64 * 4)(), _RoutingSizes(tokens, top_k, bound), ctypes.c_float(eps)),
    )


def _launch(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    out = _empty(y, rows, weights, out_dtype)
    if out.numel():
        residual = residual if residual is None else aligned(residual)
        sizes = *out.shape, rows.shape[1], y.shape[0]
        launch = launcher(y.get_device(), *sizes, Dtypes(y.dtype, weights.dtype, out_dtype))
        launch(aligned(y), rows.contiguous(), weights.contiguous(), residual, None, None, out)
    return out


def _empty(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    return y.new_empty((rows.shape[0], y.shape[1]), dtype=out_dtype)


_combine = operator(
    "combine(Tensor y, Tensor rows, Tensor weights, ScalarType out_dtype, Tensor? residual=None) -> Tensor",
    check=checks.combine,
    cuda=_launch,
    reference=reference.combine,
    fake=_empty,
    forward_only=True,
)
