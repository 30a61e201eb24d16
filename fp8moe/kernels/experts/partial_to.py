"""The part of an experts layer that the experts of one rank compute, to the memory of all ranks: GPUs only."""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import combine_plan, layer, plan
from fp8moe.kernels.experts.operands import Operands, Share
from fp8moe.kernels.experts.peer_table import Targets
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.launch import current_stream, device_guard


def experts_partial_to(
    targets: Targets,
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    first_expert: int,
    num_experts: int,
    row_dtype: torch.dtype,
    num_rows: int,
    first_row: int,
    partial: Tensor | None,
    partial_known: Tensor | None = None,
) -> None:
    """Write what `experts_partial` returns of the same arguments to `targets`.

    The callers have checked them; there is at least one token, and H is a multiple of 16.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else x
    operands = Operands(data, top_k_index, top_k_weights, *up_proj, *down_proj, partial, scale, partial_known)
    share = Share(first_expert, num_experts, first_row, num_rows, row_dtype, torch.float32)
    known = plan.find(operands, activation, None, share, targets)
    if known is not None:
        known.run(operands, targets)
    elif activation.is_swiglu and down_proj.data.shape[2] % 16 == 0:
        plan.experts(operands, activation, None, share, targets)
    else:
        _write(layer.run(operands, activation, None, share), targets)


def _write(sums: Tensor, targets: Targets) -> None:
    """sums: (T, H) float32."""
    tokens, hidden = sums.shape
    rows = torch.arange(tokens, dtype=torch.int32, device=sums.device)
    ones = torch.ones(tokens, dtype=torch.float32, device=sums.device)
    device_index, dtypes = sums.get_device(), (torch.float32,) * 3
    options = {"peers": targets.peers, "to_all": targets.to_all}
    with device_guard(device_index):
        combine_plan.plan(tokens, hidden, 1, tokens, *dtypes, device_index, **options).launch(
            *(current_stream(device_index), sums.data_ptr(), rows.data_ptr(), ones.data_ptr(), 0, 0, 0),
            *targets.addresses,
        )
