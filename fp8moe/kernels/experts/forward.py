"""The experts of a mixture-of-experts layer as one operator, ``fp8moe::experts``.

Assignments of tokens to experts are sorted by expert; tokens are quantized 1x128 into that order; GEMM 1, activation
and quantization; GEMM 2; each token's weighted sum over its rows.
"""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks, plan
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.operands import Operands, pad_columns, pad_weights, without_padding
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.gemm.grouped import compute, grouped_gemm_swiglu
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.operators import define


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
    known = plan.find(operands, activation, capacity)
    if known is not None:
        return known.run(operands)
    checks.experts(operands, activation.gated, capacity)
    x, up, down = operands.hidden_states, operands.up, operands.down
    hidden = x.shape[1]
    if not (operands.top_k_index.numel() and up.numel() and down.numel()):
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return out if operands.residual is None else operands.residual + out
    up, down = pad_weights(up, down, 16)
    if up.shape[2] != hidden and operands.residual is not None:
        return operands.residual + _experts(*arguments[:-1], None)
    operands = operands._replace(hidden_states=pad_columns(x, up.shape[2]), up=up, down=down)
    if activation.is_swiglu and use_cuda(x):
        out = plan.experts(operands, activation, capacity)
    else:
        out = _composed(operands, activation, capacity)
    return without_padding(out, hidden)


def _composed(operands: Operands, activation: Activation, capacity: int | None) -> Tensor:
    """The layer from its five operators, for any backend."""
    x, top_k_index, top_k_weights, up, up_scale, down, down_scale, residual = operands
    count = up.shape[0]
    expected_m = ceil_div(top_k_index.numel(), count)
    num_rows = top_k_index.numel() if capacity is None else count * capacity
    groups, rows = sort_by_expert(top_k_index, count, capacity=capacity)
    a = permute_quantize(x, rows, num_rows)
    if activation.is_swiglu:
        intermediate = grouped_gemm_swiglu(
            a, FP8Tensor(up, up_scale), groups, activation=activation, max_m=capacity, expected_m=expected_m
        )
    else:
        projected = _project(a, FP8Tensor(up, up_scale), groups, activation.gated, capacity, expected_m)
        intermediate = quantize_1x128(activation(projected))
        del projected
    del a  # its memory may serve the result of GEMM 2
    dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    y = torch.empty((num_rows, down.shape[1]), dtype=dtype, device=x.device)
    compute(intermediate, FP8Tensor(down, down_scale), groups, y, capacity, expected_m)
    return combine(y, rows, top_k_weights, x.dtype, residual=residual)


def _project(a: FP8Tensor, up: FP8Tensor, groups: Tensor, gated: bool, capacity: int | None, expected_m: int) -> Tensor:
    """GEMM 1 in float32: (rows, 2I), gate and up, or (rows, I)."""
    width = up.data.shape[1]
    parts = [up]
    if gated and width // 2 % BLOCK:
        # A block of 128 rows would hold rows of both projections, which have scales of their own.
        parts = list(zip(up.data.chunk(2, dim=1), up.scale.chunk(2, dim=1), strict=True))
    projected = torch.empty((a.data.shape[0], width), dtype=torch.float32, device=a.data.device)
    for out, part in zip(projected.chunk(len(parts), dim=1), parts, strict=True):
        compute(a, FP8Tensor(*part), groups, out, capacity, expected_m)
    return projected


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
