"""What a trainable expert computes between its GEMMs, forward and backward, each fused with the quantization behind it.

The results are quantized along rows and along columns, for the next GEMM and for the weight gradient: DeepSeek-V3,
arXiv:2412.19437, section 3.3.
"""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks, swiglu_quantize_plan, swiglu_quantize_reference
from fp8moe.quant.transpose import Transposed, empty_results, transposed
from fp8moe.quant.transpose_reference import Results
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


def swiglu_quantize(gate_up: Tensor, group_offsets: Tensor, *, activation: Activation) -> Transposed:
    """``activation(gate_up)`` of every group's rows, computed in float32, rounded to bfloat16 and quantized both ways.

    gate_up: (R, 2I) bfloat16, gate then up, any strides; I a multiple of 128.
    group_offsets: (E+1,) int32, as for `quantize_with_transpose`, which also describes the result.
    activation: a SwiGLU.
    Returns `Transposed` of (R, I), detached from the autograd graph.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device or activation.
    """
    check_tensor("gate_up", gate_up)
    check_tensor("group_offsets", group_offsets)
    check_swiglu(activation)
    return transposed(
        torch.ops.fp8moe.swiglu_quantize(gate_up.detach(), group_offsets, activation.limit, activation.alpha)
    )


def swiglu_backward_quantize(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, group_offsets: Tensor, *, activation: Activation
) -> tuple[Transposed, Tensor]:
    """The backward of ``row_weights * activation(gate_up)`` for every group's rows, in float32; the gradient of gate_up
    is rounded to bfloat16 and quantized both ways.

    gate_up: (R, 2I) bfloat16, gate then up, as in the forward; I a multiple of 128.
    grad: (R, I) bfloat16, with respect to the weighted result.
    row_weights: (R,) float32.
    group_offsets, activation: as for `swiglu_quantize`. Where a limit clamps gate or up, it gets no gradient.
    Returns `Transposed` of the gradient of gate_up (R, 2I), and the gradient of row_weights (R,) float32:
    ``sum over i of activation(gate_up)[r, i] * grad[r, i]``. Rows of no group are uninitialized in both.
    Equal inputs give equal bits. The results are detached from the autograd graph.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device or activation.
    """
    operands = {"gate_up": gate_up, "grad": grad, "row_weights": row_weights, "group_offsets": group_offsets}
    for name, value in operands.items():
        check_tensor(name, value)
    check_swiglu(activation)
    *results, dots = torch.ops.fp8moe.swiglu_backward_quantize(
        *(value.detach() for value in operands.values()), activation.limit, activation.alpha
    )
    return transposed(results), dots


def check_swiglu(activation: Activation) -> None:
    if not activation.is_swiglu:
        raise ValueError(f"activation: expected a gated silu, got {activation}")


def _forward(gate_up: Tensor, group_offsets: Tensor, limit: float | None, alpha: float | None) -> Results:
    rows, size, groups = checks.swiglu(gate_up, group_offsets)
    activation = Activation(limit, alpha)
    if not use_cuda(gate_up):
        return swiglu_quantize_reference.swiglu_quantize(gate_up, group_offsets, activation)
    results = empty_results(gate_up, rows, size, groups)
    swiglu_quantize_plan.swiglu_quantize(gate_up, group_offsets, activation, results)
    return results


def _forward_fake(gate_up: Tensor, group_offsets: Tensor, limit: float | None, alpha: float | None) -> Results:
    rows, size, groups = checks.swiglu(gate_up, group_offsets)
    return empty_results(gate_up, rows, size, groups)


def _backward(*arguments: Tensor | float | None) -> tuple[Tensor, ...]:
    *operands, limit, alpha = arguments
    activation = Activation(limit, alpha)
    if not use_cuda(operands[0]):
        checks.swiglu_backward(*operands)
        results, dots = swiglu_quantize_reference.swiglu_backward_quantize(*operands, activation)
    else:
        *results, _ = _backward_fake(*arguments)
        dots = swiglu_quantize_plan.swiglu_backward_quantize(*operands, activation, results)
    return *results, dots


def _backward_fake(*arguments: Tensor | float | None) -> tuple[Tensor, ...]:
    *operands, _, _ = arguments
    rows, size, groups = checks.swiglu_backward(*operands)
    gate_up = operands[0]
    return *empty_results(gate_up, rows, 2 * size, groups), gate_up.new_empty((rows,), dtype=torch.float32)


_FORM = "float? limit, float? alpha"
_RESULTS = "Tensor, Tensor, Tensor, Tensor, Tensor"
define(f"swiglu_quantize(Tensor gate_up, Tensor group_offsets, {_FORM}) -> ({_RESULTS})", _forward, _forward_fake)
define(
    f"swiglu_backward_quantize(Tensor gate_up, Tensor grad, Tensor row_weights, Tensor group_offsets, {_FORM}) "
    f"-> ({_RESULTS}, Tensor)",
    _backward,
    _backward_fake,
)
