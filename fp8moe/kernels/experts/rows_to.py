"""The results of one rank's experts, each row to the GPU whose token it is: GPUs only."""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import plan
from fp8moe.kernels.experts.layer import hidden_rows
from fp8moe.kernels.experts.operands import Operands, Share, pad_columns, pad_weights, tiles_of
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.gemm import grouped_plan
from fp8moe.kernels.gemm.epilogue import PeerStore
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.peer_table import Targets


def experts_rows_to(
    targets: Targets,
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    first_expert: int,
    num_experts: int,
    row_dtype: torch.dtype,
    num_rows: int,
    first_row: int,
) -> None:
    """Write the results of GEMM 2 for the assignments that `experts_partial` computes of the same arguments.

    That of assignment t * K + k goes to its row on the peer whose token t is. Rows of other assignments stay as they
    are. The callers have checked the arguments; there is at least one token, and H is a multiple of 16.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else x
    up, down = pad_weights(up_proj.data, down_proj.data, 16)
    operands = Operands(data, top_k_index, None, up, up_proj.scale, down, down_proj.scale, hidden_scale=scale)
    share = Share(first_expert, num_experts, first_row, num_rows, row_dtype)
    if activation.is_swiglu:
        known = plan.find(operands, activation, None, share, targets)
        plan.experts(operands, activation, None, share, targets) if known is None else known.run(operands, targets)
    else:
        _composed(operands, activation, share, targets)


def _composed(operands: Operands, activation: Activation, share: Share, targets: Targets) -> None:
    """From the operators of the layer."""
    x, index, _, up, up_scale, down, down_scale, _, x_scale, *_ = operands
    count, num_rows = up.shape[0], share.rows(index.numel())
    window = {"first_expert": share.first_expert, "first_row": share.first_row, "num_rows": num_rows}
    groups, rows = sort_by_expert(index, count, **window)
    x = pad_columns(x, up.shape[2])
    a = permute_quantize(x, rows, num_rows) if x_scale is None else permute_fp8(FP8Tensor(x, x_scale), rows, num_rows)
    tiles = tiles_of(index.numel(), share.num_experts)
    h = hidden_rows(a, FP8Tensor(up, up_scale), groups, activation, tiles)
    grouped_plan.grouped_gemm_to(
        *(h, FP8Tensor(down, down_scale), groups, _assignments(rows, num_rows)),
        *(PeerStore(share.row_dtype, *targets.form), targets),
        **tiles,
    )


def _assignments(rows: Tensor, num_rows: int) -> Tensor:
    """The assignment that has each row, (num_rows,) int32; 0 for a row of none."""
    flat = torch.where(rows >= 0, rows, num_rows).flatten().long()
    order = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    return order.new_zeros(num_rows + 1).scatter_(0, flat, order)[:num_rows]
