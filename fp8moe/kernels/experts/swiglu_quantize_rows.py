"""`swiglu_quantize` and its backward where no weight gradient follows: by rows alone, and if asked for unquantized too.

Adapters of frozen experts multiply the values that are not quantized.
"""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks, swiglu_quantize_plan, swiglu_quantize_reference
from fp8moe.kernels.experts.swiglu_quantize import check_swiglu
from fp8moe.quant.formats import BLOCK, FP8Tensor, empty_mn_major
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


def swiglu_quantize_rows(
    gate_up: Tensor, group_offsets: Tensor, *, activation: Activation, values: bool = False
) -> tuple[FP8Tensor, Tensor]:
    """The rows of `swiglu_quantize`, which also describes the arguments and errors, with the same bits.

    Returns data (R, I) and scale (R, I/128) MN-major; and with `values` what was quantized, (R, I) bfloat16, otherwise
    an empty tensor. Rows of no group are uninitialized.
    """
    check_tensor("gate_up", gate_up)
    check_tensor("group_offsets", group_offsets)
    check_swiglu(activation)
    data, scale, h = torch.ops.fp8moe.swiglu_quantize_rows(
        gate_up.detach(), group_offsets, activation.limit, activation.alpha, values
    )
    return FP8Tensor(data, scale), h


def swiglu_backward_quantize_rows(
    gate_up: Tensor,
    grad: Tensor,
    row_weights: Tensor,
    group_offsets: Tensor,
    *,
    activation: Activation,
    values: bool = False,
) -> tuple[FP8Tensor, Tensor, Tensor, Tensor]:
    """The rows of `swiglu_backward_quantize`, which also describes the arguments and errors, with the same bits.

    Returns data (R, 2I) and scale (R, 2I/128) MN-major of the gradient of gate_up, and the gradient of row_weights; and
    with `values` what was quantized, (R, 2I) bfloat16, and ``activation(gate_up)`` (R, I) as `swiglu_quantize_rows`
    returns it, otherwise empty tensors. Rows of no group are uninitialized.
    """
    operands = {"gate_up": gate_up, "grad": grad, "row_weights": row_weights, "group_offsets": group_offsets}
    for name, value in operands.items():
        check_tensor(name, value)
    check_swiglu(activation)
    data, scale, *others = torch.ops.fp8moe.swiglu_backward_quantize_rows(
        *(value.detach() for value in operands.values()), activation.limit, activation.alpha, values
    )
    return FP8Tensor(data, scale), *others


def _forward(
    gate_up: Tensor, group_offsets: Tensor, limit: float | None, alpha: float | None, values: bool
) -> tuple[Tensor, ...]:
    data, scale, h = _forward_fake(gate_up, group_offsets, limit, alpha, values)
    activation = Activation(limit, alpha)
    if use_cuda(gate_up):
        results = data, scale, None, None, None
        swiglu_quantize_plan.swiglu_quantize(gate_up, group_offsets, activation, results, h if values else None)
        return data, scale, h
    *rows, exact = swiglu_quantize_reference.swiglu_quantize_rows(gate_up, activation)
    return *rows, exact if values else h


def _forward_fake(
    gate_up: Tensor, group_offsets: Tensor, limit: float | None, alpha: float | None, values: bool
) -> tuple[Tensor, ...]:
    rows, size, _ = checks.swiglu(gate_up, group_offsets)
    return *_empty_rows(gate_up, rows, size), gate_up.new_empty((rows, size) if values else 0)


def _backward(*arguments: Tensor | float | bool | None) -> tuple[Tensor, ...]:
    *operands, limit, alpha, values = arguments
    data, scale, dots, *beside = _backward_fake(*arguments)
    activation = Activation(limit, alpha)
    if use_cuda(operands[0]):
        results = data, scale, None, None, None
        dots = swiglu_quantize_plan.swiglu_backward_quantize(
            *operands, activation, results, *(beside if values else ())
        )
        return data, scale, dots, *beside
    *results, d_gate_up, h = swiglu_quantize_reference.swiglu_backward_quantize_rows(*operands[:3], activation)
    return *results, *((d_gate_up, h) if values else beside)


def _backward_fake(*arguments: Tensor | float | bool | None) -> tuple[Tensor, ...]:
    *operands, _, _, values = arguments
    rows, size, _ = checks.swiglu_backward(*operands)
    gate_up = operands[0]
    dots = gate_up.new_empty((rows,), dtype=torch.float32)
    beside = (gate_up.new_empty((rows, width) if values else 0) for width in (2 * size, size))
    return *_empty_rows(gate_up, rows, 2 * size), dots, *beside


def _empty_rows(like: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Uninitialized data and scale, on the device of `like`."""
    data = like.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    return data, empty_mn_major(rows, width // BLOCK, device=like.device)


_FORM = "float? limit, float? alpha, bool values"
define(
    f"swiglu_quantize_rows(Tensor gate_up, Tensor group_offsets, {_FORM}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
define(
    f"swiglu_backward_quantize_rows(Tensor gate_up, Tensor grad, Tensor row_weights, Tensor group_offsets, {_FORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
