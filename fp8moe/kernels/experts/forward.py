"""The experts of a mixture-of-experts layer as one operator, ``fp8moe::experts``."""

from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks, layer, plan
from fp8moe.kernels.experts.operands import WHOLE, Operands
from fp8moe.runtime import autograd
from fp8moe.runtime.operator import define


def experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_proj: Tensor,
    up_proj_scale_inv: Tensor,
    down_proj: Tensor,
    down_proj_scale_inv: Tensor,
    *,
    activation: Activation,
    capacity: int | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``sum over k of top_k_weights[t, k] * down_e(activation(up_e(hidden_states[t])))`` with e = top_k_index[t, k].

    hidden_states: (T, H) bfloat16, float16 or float32; any H.
    top_k_index: (T, K) int32 or int64. An index outside [0, E) adds nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up_proj: float8_e4m3fn (E, 2I, H), gate rows then up rows, or (E, I, H) where the activation has no gate; any I.
    up_proj_scale_inv: float32 (E, 2 * ceil(I/128), ceil(H/128)), the blocks of gate, then those of up, or without a
        gate (E, ceil(I/128), ceil(H/128)).
    down_proj: float8_e4m3fn (E, H, I); down_proj_scale_inv: float32 (E, ceil(H/128), ceil(I/128)).
    activation: a SwiGLU runs inside GEMM 1 and its quantization; another as PyTorch operations between the two.
    capacity: rows kept free for each expert (the masked layout), instead of rows one group after the other. An
        assignment beyond them adds nothing, so with distinct experts a token it is to be at least T.
    residual: (T, H) of the dtype of hidden_states, to which the rounded result is added, or None.
    Returns (T, H) in the dtype of hidden_states. Products are summed in float32, results of GEMM 2 rounded to bfloat16
    where hidden_states is bfloat16, and the weighted sum taken in float32 in the order of k.

    Where H or I is not a multiple of 16, the call pads copies of the operands with zeros. There is no backward: calling
    it raises RuntimeError.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or capacity.
    """
    return autograd.run(
        *(_experts_op, "fp8moe.GroupedExperts"),
        *(hidden_states, top_k_index, top_k_weights),
        *(up_proj, up_proj_scale_inv, down_proj, down_proj_scale_inv),
        *(activation.name, activation.gated, activation.limit, activation.alpha, capacity, residual),
    )


def _arguments(*arguments) -> tuple[Operands, Activation, int | None]:
    """The operator's arguments, in the order of its schema."""
    name, gated, limit, alpha, capacity, *residual = arguments[7:]
    return Operands(*arguments[:7], *residual), Activation(limit, alpha, name, gated), capacity


def _experts(*arguments) -> Tensor:
    operands, activation, capacity = _arguments(*arguments)
    known = plan.find(operands, activation, capacity, WHOLE)
    if known is not None:
        return known.run(operands)
    checks.experts(operands, activation.gated, capacity)
    return layer.run(operands, activation, capacity, WHOLE)


def _experts_fake(*arguments) -> Tensor:
    operands, activation, capacity = _arguments(*arguments)
    checks.experts(operands, activation.gated, capacity)
    return operands.hidden_states.new_empty(operands.hidden_states.shape)


_experts_op = define(
    "experts(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor up_proj, Tensor up_proj_scale_inv, "
    "Tensor down_proj, Tensor down_proj_scale_inv, str activation, bool gated, float? limit, float? alpha, "
    "SymInt? capacity, Tensor? residual=None) -> Tensor",
    _experts,
    _experts_fake,
    forward_only=True,
)
