"""Launches ``cuda/swiglu_quantize.cu`` and ``cuda/swiglu_backward_quantize.cu``. Arguments are checked by the callers.

Results are those of `swiglu_quantize_reference` up to the GPU's own exponential.
"""

import ctypes
import enum

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.quant.formats import BLOCK, padded_rows
from fp8moe.quant.transpose_plan import TILE_BYTES, Plan, tile_spec, write_offsets
from fp8moe.runtime.checks import row_major
from fp8moe.runtime.jit import KernelSpec
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_FORM = (("limit", ctypes.c_float), ("alpha", ctypes.c_float))

Quantized = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Data and scale of the rows; those of the columns and padded offsets, or None three times."""


class Beside(enum.IntEnum):
    """What a kernel writes beside quantized rows, as cuda/swiglu_operands.cuh numbers it."""

    NOTHING = 0
    COLUMNS = 1
    VALUES = 2

    @classmethod
    def of(cls, results: Quantized, values: Tensor | None) -> "Beside":
        if results[2] is not None:
            return cls.COLUMNS
        return cls.NOTHING if values is None else cls.VALUES


class _Source(ctypes.Structure):
    """``struct Source`` of cuda/swiglu_quantize.cu."""

    _fields_ = (*((name, ctypes.c_int64) for name in ("gate_up", "values", "row_stride")), *_FORM)


class _BackwardSource(ctypes.Structure):
    """``struct Source`` of cuda/swiglu_backward_quantize.cu."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("gate_up", "grad", "weights", "dots", "d_gate_up", "values")),
        *((name, ctypes.c_int64) for name in ("row_stride", "grad_stride")),
        *_FORM,
    )


def kernel_spec(activation: Activation, backward: bool, beside: Beside) -> KernelSpec:
    """The kernel for a SwiGLU of bfloat16 rows, or for its gradients."""
    # They wait in shared memory, where the transposed tile takes the place of the first.
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


_plans: PlanCache[Plan] = PlanCache()


def swiglu_quantize(
    gate_up: Tensor, group_offsets: Tensor, activation: Activation, results: Quantized, values: Tensor | None = None
) -> None:
    """Fill `results`, and `values` (R, I) bfloat16, as ``swiglu_quantize`` and ``swiglu_quantize_rows`` describe."""
    if _nothing(group_offsets, results):
        return
    gate_up, group_offsets = row_major(gate_up), group_offsets.contiguous()
    row_stride, index = gate_up.stride(0), gate_up.get_device()
    (rows, width), groups = results[0].shape, group_offsets.shape[0] - 1
    beside = Beside.of(results, values)

    def build() -> Plan:
        source = _Source(row_stride=row_stride, **_form(activation))
        sizes = {"rows": rows, "width": width, "groups": groups, "column_tiles": width // BLOCK}
        return Plan(kernel_spec(activation, False, beside), source, **sizes)

    with device_guard(index):
        plan = _plans.get((index, activation, row_stride, rows, width, groups, beside), build)
        plan.launch(current_stream(index), results, group_offsets, gate_up=gate_up, values=values)


def swiglu_backward_quantize(
    gate_up: Tensor,
    grad: Tensor,
    row_weights: Tensor,
    group_offsets: Tensor,
    activation: Activation,
    results: Quantized,
    d_gate_up: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Fill `results`, and d_gate_up (R, 2I) and `values` (R, I) bfloat16, both or none, as
    ``swiglu_backward_quantize`` and ``swiglu_backward_quantize_rows`` describe, and return the dots (R,)."""
    rows, width = results[0].shape
    if _nothing(group_offsets, results):
        return torch.zeros(rows, dtype=torch.float32, device=gate_up.device)
    gate_up, grad = row_major(gate_up), row_major(grad)
    group_offsets, row_weights = group_offsets.contiguous(), row_weights.contiguous()
    row_stride, grad_stride, index = gate_up.stride(0), grad.stride(0), gate_up.get_device()
    column_tiles, groups = width // 2 // BLOCK, group_offsets.shape[0] - 1
    beside = Beside.of(results, values)
    # A part of each dot per tile, summed in a fixed order below.
    dots = torch.empty((column_tiles, rows), dtype=torch.float32, device=gate_up.device)

    def build() -> Plan:
        source = _BackwardSource(row_stride=row_stride, grad_stride=grad_stride, **_form(activation))
        sizes = {"rows": rows, "width": width, "groups": groups, "column_tiles": column_tiles}
        return Plan(kernel_spec(activation, True, beside), source, **sizes)

    with device_guard(index):
        plan = _plans.get((index, activation, row_stride, grad_stride, rows, width, groups, beside), build)
        operands = {"gate_up": gate_up, "grad": grad, "weights": row_weights, "dots": dots}
        plan.launch(current_stream(index), results, group_offsets, **operands, d_gate_up=d_gate_up, values=values)
    return dots.sum(0)


def _nothing(group_offsets: Tensor, results: Quantized) -> bool:
    """Whether there is nothing to quantize: then all that is to be written are the offsets, which it does."""
    rows, width = results[0].shape
    if padded_rows(rows, group_offsets.shape[0] - 1) * width:
        return False
    if results[4] is not None:
        write_offsets(group_offsets, rows, results[4])
    return True


def _form(activation: Activation) -> dict[str, float]:
    return {"limit": activation.limit or 0.0, "alpha": activation.alpha or 0.0}
