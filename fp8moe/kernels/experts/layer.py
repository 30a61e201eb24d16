"""The steps of an experts layer, or of a share of one, on checked operands and any backend.

Assignments of tokens to experts are sorted by expert; tokens are quantized 1x128 into that order; GEMM 1, activation
and quantization; GEMM 2; each token's weighted sum over its rows.
"""

from typing import Any

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import plan
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.operands import Operands, Share, pad_columns, pad_weights, tiles_of, without_padding
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.gemm.grouped import compute, grouped_gemm_swiglu
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime.backend import use_cuda


def run(operands: Operands, activation: Activation, capacity: int | None, share: Share) -> Tensor:
    """The weighted sums (T, H), with the residual where there is one."""
    x, hidden = operands.hidden_states, operands.hidden_states.shape[1]
    num_rows = share.rows(operands.top_k_index.numel())
    some = num_rows and operands.up.numel() and operands.down.numel()
    if some:
        up, down = pad_weights(operands.up, operands.down, 16)
        operands = operands._replace(up=up, down=down)
    by_plan = some and activation.is_swiglu and use_cuda(x)
    if by_plan and operands.up.shape[2] == hidden:
        return plan.experts(operands, activation, capacity, share)
    operands = _of_all_tokens(operands)
    if not some:
        out = x.new_zeros(x.shape, dtype=share.dtypes(x.dtype)[1])
        return out if operands.residual is None else operands.residual + out
    if operands.up.shape[2] != hidden and operands.residual is not None:
        return operands.residual + run(operands._replace(residual=None), activation, capacity, share)
    operands = operands._replace(hidden_states=pad_columns(x, operands.up.shape[2]))
    return without_padding((plan.experts if by_plan else _composed)(operands, activation, capacity, share), hidden)


def _of_all_tokens(operands: Operands) -> Operands:
    """With zeros for a residual that is not known, and a result that is known for all tokens."""
    if operands.known is not None:
        operands.known.fill_(True)
    residual = operands.residual
    if operands.residual_known is not None:
        residual = torch.where(operands.residual_known[:, None], residual, 0)
    return operands._replace(residual=residual, residual_known=None, known=None)


def _composed(operands: Operands, activation: Activation, capacity: int | None, share: Share) -> Tensor:
    """The layer from its five operators, for any backend."""
    x, top_k_index, top_k_weights, up, up_scale, down, down_scale, residual, x_scale, *_ = operands
    count, assignments = up.shape[0], top_k_index.numel()
    num_rows = share.rows(assignments) if capacity is None else count * capacity
    window = {} if capacity is not None else {"first_row": share.first_row, "num_rows": num_rows}
    groups, rows = sort_by_expert(top_k_index, count, capacity=capacity, first_expert=share.first_expert, **window)
    permuted = permute_quantize(x, rows, num_rows) if x_scale is None else permute_fp8((x, x_scale), rows, num_rows)
    tiles = tiles_of(assignments, share.num_experts or count, capacity)
    h = hidden_rows(permuted, FP8Tensor(up, up_scale), groups, activation, tiles)
    del permuted  # its memory may serve the result of GEMM 2
    row_dtype, out_dtype = share.dtypes(x.dtype)
    y = torch.empty((num_rows, down.shape[1]), dtype=row_dtype, device=x.device)
    compute(h, FP8Tensor(down, down_scale), groups, y, **tiles)
    return combine(y, rows, top_k_weights, out_dtype, residual=residual)


def hidden_rows(
    a: FP8Tensor,
    up: FP8Tensor,
    groups: Tensor,
    activation: Activation,
    tiles: dict[str, Any],
) -> FP8Tensor:
    """GEMM 1, the activation and its quantization: rows a (R, H) of groups -> (R, I). H and I are multiples of 16.

    tiles: max_m, expected_m and whole of `compute`.
    """
    if activation.is_swiglu:
        return grouped_gemm_swiglu(a, up, groups, activation=activation, **tiles)
    projected = _project(a, up, groups, activation.gated, tiles)
    return quantize_1x128(activation(projected))


def _project(a: FP8Tensor, up: FP8Tensor, groups: Tensor, gated: bool, tiles: dict[str, Any]) -> Tensor:
    """GEMM 1 in float32: (rows, 2I), gate and up, or (rows, I)."""
    width = up.data.shape[1]
    parts = [up]
    if gated and width // 2 % BLOCK:
        # A block of 128 rows would hold rows of both projections, which have scales of their own.
        parts = list(zip(up.data.chunk(2, dim=1), up.scale.chunk(2, dim=1), strict=True))
    projected = torch.empty((a.data.shape[0], width), dtype=torch.float32, device=a.data.device)
    for out, part in zip(projected.chunk(len(parts), dim=1), parts, strict=True):
        compute(a, FP8Tensor(*part), groups, out, **tiles)
    return projected
