"""SwiGLU between the two GEMMs of trainable experts: forward and backward, each fused with quantization."""

import ctypes
import enum
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation, weighted_backward
from fp8moe.quant import reference
from fp8moe.quant.checks import check_groups, check_vector
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, empty_quantized, padded_rows
from fp8moe.quant.reference import Results, pad_groups
from fp8moe.quant.transpose import TILE_BYTES, empty_results, strip_width, tile_launcher, tile_spec
from fp8moe.runtime.checks import check_dtype, check_like, check_tensor, row_major
from fp8moe.runtime.jit import KernelSpec
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import Signature, operator

_FORM = (("limit", ctypes.c_float), ("alpha", ctypes.c_float))


class Beside(enum.IntEnum):
    """The extra results of a SwiGLU kernel, besides its quantized rows; numbered as in cuda/ops/swiglu_operands.cuh.

    COLUMNS: quantized transposes, with every group padded to a multiple of 128; only of the backward. VALUES: bfloat16.
    """

    NOTHING = 0
    COLUMNS = 1
    VALUES = 2


class Activated(NamedTuple):
    """The result (R, I) of an activation, quantized 1x128 by rows, and optionally in bfloat16."""

    rows: FP8Tensor
    values: Tensor | None = None


class ActivationGradient(NamedTuple):
    """Gradients of the activation's input and of the row weights, as `swiglu_backward_quantize` computes them.

    rows, columns, offsets: the gradient of the input, quantized by rows, optionally also by columns, and the offsets of
    the padded groups of columns, see `quantize_with_transpose`. dots: (R,), the gradient of the row weights. h_columns:
    the weighted result of the activation, quantized by columns in blocks of 128x128. d_projected: the gradient of the
    input in bfloat16. values: the activation's result in bfloat16.
    """

    rows: FP8Tensor
    dots: Tensor
    columns: FP8Tensor | None = None
    offsets: Tensor | None = None
    h_columns: FP8Tensor | None = None
    d_projected: Tensor | None = None
    values: Tensor | None = None


def swiglu_quantize(
    gate_up: Tensor, group_offsets: Tensor, *, activation: Activation, beside: Beside = Beside.NOTHING
) -> Activated:
    """Compute ``activation(gate_up)`` of every group's rows in float32, round it to bfloat16 and quantize it.

    gate_up: (R, 2I) bfloat16, gate then up, any strides; I a multiple of 128.
    group_offsets: (E+1,) int32, as for `quantize_with_transpose`.
    activation: a SwiGLU.
    beside: what to return besides the quantized rows; it does not change the bits of the rows. NOTHING, or VALUES:
        (R, I) bfloat16, the input of LoRA adapters.
    Returns `Activated`, detached from the autograd graph. Rows of no group are uninitialized.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, activation or beside.
    """
    _check_types(activation, gate_up=gate_up, group_offsets=group_offsets)
    operands = SwigluOperands(gate_up.detach(), group_offsets, activation, beside)
    data, scale, *values = _swiglu_quantize(*_FORWARD.pack(operands))
    return Activated(FP8Tensor(data, scale), *values)


def swiglu_backward_quantize(
    gate_up: Tensor,
    grad: Tensor,
    row_weights: Tensor,
    group_offsets: Tensor,
    *,
    activation: Activation,
    beside: Beside = Beside.NOTHING,
) -> ActivationGradient:
    """Compute the backward of ``row_weights * activation(gate_up)`` for every group's rows, in float32.

    The gradient of gate_up is rounded to bfloat16 and quantized.

    gate_up: (R, 2I) bfloat16, gate then up, as in the forward; I a multiple of 128.
    grad: (R, I) bfloat16, the gradient of the weighted result.
    row_weights: (R,) float32.
    group_offsets, activation: as for `swiglu_quantize`. Gate or up values clamped by the limit get no gradient.
    beside: what to return besides the quantized rows and the gradient of row_weights, whose bits it does not change.
        COLUMNS: the gradient of gate_up (R, 2I) and ``row_weights * activation(gate_up)`` (R, I), both rounded to
        bfloat16 and quantized by columns, for the weight gradients: DeepSeek-V3, arXiv:2412.19437, section 3.3. The
        latter has scales of 128x128 blocks. `quantize_with_transpose` describes columns and offsets. VALUES: the
        gradient and ``activation(gate_up)`` in bfloat16.
    Returns `ActivationGradient`: the gradient of gate_up (R, 2I), and the gradient of row_weights (R,) float32, which
    is ``sum over i of activation(gate_up)[r, i] * grad[r, i]``. Rows of no group are uninitialized in both gradients.
    Equal inputs give equal bits. The results are detached from the autograd graph.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device or activation.
    """
    _check_types(activation, gate_up=gate_up, grad=grad, row_weights=row_weights, group_offsets=group_offsets)
    tensors = gate_up.detach(), grad.detach(), row_weights.detach(), group_offsets
    data, scale, *more = _swiglu_backward_quantize(
        *_BACKWARD.pack(SwigluBackwardOperands(*tensors, activation, beside))
    )
    if beside is Beside.COLUMNS:
        *columns, offsets, dots, h_data, h_scale = more
        return ActivationGradient(
            FP8Tensor(data, scale), dots, FP8Tensor(*columns), offsets, FP8Tensor(h_data, h_scale)
        )
    dots, *values = more
    return ActivationGradient(FP8Tensor(data, scale), dots, None, None, None, *values)


class SwigluOperands(NamedTuple):
    """Arguments of the operator that computes `swiglu_quantize`."""

    gate_up: Tensor
    group_offsets: Tensor
    activation: Activation
    beside: Annotated[int, "int"] = Beside.NOTHING

    def widths(self) -> tuple[int, ...]:
        """Return the number of columns of the activation's result (I), as a tuple of length 1."""
        return (self.gate_up.shape[1] // 2,)


class SwigluBackwardOperands(NamedTuple):
    """Arguments of the operator that computes `swiglu_backward_quantize`."""

    gate_up: Tensor
    grad: Tensor
    row_weights: Tensor
    group_offsets: Tensor
    activation: Activation
    beside: Annotated[int, "int"] = Beside.NOTHING

    def widths(self) -> tuple[int, ...]:
        """Return the numbers of columns of the gradient of gate_up (2I) and of the activation's result (I)."""
        return self.gate_up.shape[1], self.gate_up.shape[1] // 2


_AnyOperands = SwigluOperands | SwigluBackwardOperands


class _Source(ctypes.Structure):
    """``struct Source`` of cuda/ops/swiglu_quantize.cu."""

    _pointers_ = 2
    _fields_ = (*((name, ctypes.c_int64) for name in ("gate_up", "values", "row_stride")), *_FORM)


class _BackwardSource(ctypes.Structure):
    """``struct Source`` of cuda/ops/swiglu_backward_quantize.cu."""

    _pointers_ = 8
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("gate_up", "grad", "weights", "dots")),
        *((name, ctypes.c_int64) for name in ("d_gate_up", "values", "columns", "column_scale")),
        *((name, ctypes.c_int64) for name in ("column_scale_pitch", "row_stride", "grad_stride")),
        *_FORM,
    )


def kernel_spec(activation: Activation, backward: bool, beside: Beside) -> KernelSpec:
    """Return the kernel that computes a SwiGLU of bfloat16 rows, or its gradient if `backward`, and quantizes it."""
    # Shared memory holds tiles of gate, up and, in the backward, grad; the transposed tile overwrites the first tile.
    operands = 3 if backward else 2
    return tile_spec(
        "swiglu_backward_quantize" if backward else "swiglu_quantize",
        _BackwardSource if backward else _Source,
        torch.bfloat16,
        shared_bytes=operands * TILE_BYTES * torch.bfloat16.itemsize,
        OPERANDS=operands,
        SWIGLU_FORM=activation.form,
        BESIDE=beside.value,
    )


@planned
def launcher(
    device_index: int, gate_up: Tensor, grad: Tensor | None, groups: int, activation: Activation, beside: Beside
) -> PointerLauncher:
    """Return the `tile_launcher`, called with *Results, the group offsets and the tensors of ``struct Source``.

    gate_up: (R, 2I), grad: (R, I) for the backward, None for the forward; both as `row_major` returns them.
    """
    rows, width = gate_up.shape
    column_tiles = width // 2 // BLOCK
    form = {"limit": activation.limit or 0.0, "alpha": activation.alpha or 0.0}
    if grad is None:
        source = _Source(row_stride=gate_up.stride(0), **form)
    else:
        pitches = {"column_scale_pitch": align(column_tiles, 4), "row_stride": gate_up.stride(0)}
        source = _BackwardSource(**pitches, grad_stride=grad.stride(0), **form)
    spec = kernel_spec(activation, grad is not None, beside)
    width = width // 2 if grad is None else width
    strip = strip_width(device_index, rows, groups, column_tiles)
    sizes = {"rows": rows, "width": width, "groups": groups, "column_tiles": column_tiles, "strip": strip}
    return tile_launcher(spec, source, **sizes)


def launch(operands: SwigluOperands, results: Results, values: Tensor | None = None) -> None:
    """Compute `swiglu_quantize` into `results`, and into `values` (R, I) bfloat16 if operands.beside is VALUES."""
    group_offsets = operands.group_offsets.contiguous()
    if not _nothing(group_offsets, results):
        gate_up, groups = row_major(operands.gate_up), group_offsets.shape[0] - 1
        run = launcher(gate_up.get_device(), gate_up, None, groups, operands.activation, Beside(operands.beside))
        run(*results, group_offsets, gate_up, values)


def launch_backward(operands: SwigluBackwardOperands, results: Results, *others: Tensor) -> Tensor:
    """Compute `swiglu_backward_quantize` into `results` and `others`; return the gradient of row_weights (R,).

    others: if operands.beside is COLUMNS, data (I, P) and scale (I/128, P/128) of the activation's quantized transpose,
        data in the layout of the gradient's and scale MN-major; if it is VALUES, the gradient of gate_up (R, 2I) and
        the activation (R, I) in bfloat16.
    """
    group_offsets = operands.group_offsets.contiguous()
    rows, size = operands.grad.shape
    if _nothing(group_offsets, results):
        return operands.row_weights.new_zeros(rows)
    gate_up, grad, groups = row_major(operands.gate_up), row_major(operands.grad), group_offsets.shape[0] - 1
    beside = Beside(operands.beside)
    values = others if beside is Beside.VALUES else (None, None)
    columns = others if beside is Beside.COLUMNS else (None, None)
    # The kernel writes one partial dot per row and tile of 128 columns; they are summed below in a fixed order.
    dots = gate_up.new_empty((size // BLOCK, rows), dtype=torch.float32)
    run = launcher(gate_up.get_device(), gate_up, grad, groups, operands.activation, beside)
    weights = operands.row_weights.contiguous()
    run(*results, group_offsets, gate_up, grad, weights, dots, *values, *columns)
    return dots.sum(0)


def _nothing(group_offsets: Tensor, results: Results) -> bool:
    """Return True if the results have no rows or columns; in that case, write `results.offsets`, which is not empty."""
    rows, width = results.rows.shape
    if padded_rows(rows, group_offsets.shape[0] - 1) * width:
        return False
    if results.offsets is not None:
        results.offsets.copy_(pad_groups(group_offsets, rows, group_offsets.device)[2])
    return True


# ---- the kernels' results in plain PyTorch, on any device; only the GPU's exponential may differ ----


def swiglu_values(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute the activation of gate_up (R, 2I) in float32 and return it as (R, I) in gate_up's dtype."""
    return activation(gate_up.float()).to(gate_up.dtype)


def swiglu_gradients(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of gate_up (R, 2I), `swiglu_values` (R, I), and the gradient of row_weights (R,).

    The first two have gate_up's dtype, the third is float32.
    """
    d_gate_up, h, dots = weighted_backward(gate_up, grad, row_weights, activation)
    return d_gate_up.to(gate_up.dtype), h.to(gate_up.dtype), dots


# ---- operators ----


def _check_types(activation: Activation, **tensors: Tensor) -> None:
    for name, value in tensors.items():
        check_tensor(name, value)
    if not activation.is_swiglu:
        raise ValueError(f"activation: expected a gated silu, got {activation}")


def _check_forward(operands: SwigluOperands) -> None:
    _check(operands)
    if operands.beside == Beside.COLUMNS:
        raise ValueError("beside: expected NOTHING or VALUES, got COLUMNS, which only the backward computes")


def _check(operands: _AnyOperands) -> None:
    gate_up = operands.gate_up
    check_dtype("gate_up", gate_up, torch.bfloat16)
    if gate_up.dim() != 2 or gate_up.shape[1] % (2 * BLOCK):
        raise ValueError(f"gate_up: expected shape (R, 2 * I) with I a multiple of {BLOCK}, got {tuple(gate_up.shape)}")
    check_groups(operands.group_offsets, gate_up.shape[0], gate_up.device)


def _check_backward(operands: SwigluBackwardOperands) -> None:
    _check(operands)
    rows, width = operands.gate_up.shape
    check_like("grad", operands.grad, (torch.bfloat16,), (rows, width // 2), operands.gate_up.device, "gate_up")
    check_vector("row_weights", operands.row_weights, torch.float32, rows, operands.gate_up.device)


def _empty(operands: _AnyOperands) -> tuple[Results, list[Tensor]]:
    """Return uninitialized `Results`, and a list of the uninitialized results that `launch_backward` calls others."""
    like, rows, widths = operands.gate_up, operands.gate_up.shape[0], operands.widths()
    if operands.beside == Beside.COLUMNS:
        groups = operands.group_offsets.shape[0] - 1
        return empty_results(like, rows, widths[0], groups), [
            *empty_quantized(like, widths[1], padded_rows(rows, groups), blocks=True)
        ]
    values = [like.new_empty((rows, width)) for width in widths] if operands.beside == Beside.VALUES else []
    return Results(*empty_quantized(like, rows, widths[0])), values


def _tensors(results: Results, *others: Tensor) -> list[Tensor]:
    return [part for part in (*results, *others) if part is not None]


def _launch(operands: SwigluOperands) -> list[Tensor]:
    results, values = _empty(operands)
    launch(operands, results, *values)
    return _tensors(results, *values)


def _reference(operands: SwigluOperands) -> list[Tensor]:
    values = swiglu_values(operands.gate_up, operands.activation)
    rows = reference.quantize_1x128(values, False)
    return [*rows, values] if operands.beside == Beside.VALUES else [*rows]


def _fake(operands: SwigluOperands) -> list[Tensor]:
    results, values = _empty(operands)
    return _tensors(results, *values)


def _launch_backward(operands: SwigluBackwardOperands) -> list[Tensor]:
    results, values = _empty(operands)
    return _tensors(results, launch_backward(operands, results, *values), *values)


def _reference_backward(operands: SwigluBackwardOperands) -> list[Tensor]:
    gate_up, grad, row_weights, group_offsets, activation, beside = operands
    d_gate_up, h, dots = swiglu_gradients(gate_up, grad, row_weights, activation)
    if beside == Beside.COLUMNS:
        h = (row_weights[:, None] * activation(gate_up.float())).to(gate_up.dtype)
        columns = reference.by_columns(h, group_offsets, blocks=True)[:2]
        return [*reference.both_ways(d_gate_up, group_offsets), dots, *columns]
    rows = reference.quantize_1x128(d_gate_up, False)
    return [*rows, dots, *([d_gate_up, h] if beside == Beside.VALUES else [])]


def _fake_backward(operands: SwigluBackwardOperands) -> list[Tensor]:
    results, values = _empty(operands)
    return _tensors(results, operands.row_weights.new_empty(operands.row_weights.shape), *values)


_FORWARD, _BACKWARD = Signature(SwigluOperands), Signature(SwigluBackwardOperands)
_swiglu_quantize = operator(
    "swiglu_quantize -> Tensor[]",
    signature=_FORWARD,
    check=_check_forward,
    cuda=_launch,
    reference=_reference,
    fake=_fake,
)
_swiglu_backward_quantize = operator(
    "swiglu_backward_quantize -> Tensor[]",
    signature=_BACKWARD,
    check=_check_backward,
    cuda=_launch_backward,
    reference=_reference_backward,
    fake=_fake_backward,
)
