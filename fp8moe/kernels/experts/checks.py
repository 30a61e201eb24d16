"""Checks of the arguments of an experts layer, in the manner of `checks`."""

import torch
from torch import Tensor

from fp8moe.quant.checks import FLOAT32, check_scale, fp8_data
from fp8moe.quant.formats import ceil_div


def experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    gated: bool,
    capacity: int | None,
) -> None:
    """Dtypes, shapes and devices of the input and the parameters."""
    _floating("hidden_states", hidden_states)
    projections = 2 if gated else 1
    up_name = "gate_up_proj" if gated else "up_proj"
    count, rows, hidden = fp8_data(up_name, up, "(E, 2I, H)" if gated else "(E, I, H)")
    if rows % projections:
        raise ValueError(f"{up_name}: expected shape (E, 2I, H), gate rows then up rows, got {tuple(up.shape)}")
    size = rows // projections
    if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden:
        raise ValueError(
            f"hidden_states: expected shape (T, {hidden}) to match {up_name} {tuple(up.shape)}, "
            f"got {tuple(hidden_states.shape)}"
        )
    _routing(top_k_index, top_k_weights, hidden_states)
    if fp8_data("down_proj", down, "(E, H, I)") != (count, hidden, size):
        raise ValueError(
            f"down_proj: expected shape {(count, hidden, size)} to match {up_name} {tuple(up.shape)}, "
            f"got {tuple(down.shape)}"
        )
    device = hidden_states.device
    for name, value in ((up_name, up), ("down_proj", down)):
        if value.device != device:
            raise ValueError(f"{name}: expected on {device} like hidden_states, got {value.device}")
    blocks, hidden_blocks = ceil_div(size, 128), ceil_div(hidden, 128)
    check_scale(f"{up_name}_scale_inv", up_scale, (count, projections * blocks, hidden_blocks), device)
    check_scale("down_proj_scale_inv", down_scale, (count, hidden_blocks, blocks), device)
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity: expected at least one row an expert, got {capacity}")


def _routing(index: Tensor, weights: Tensor, hidden_states: Tensor) -> None:
    device = hidden_states.device
    if index.dtype is not torch.int32 and index.dtype is not torch.int64:
        raise TypeError(f"top_k_index: expected int32 or int64, got {index.dtype}")
    if index.dim() != 2 or index.shape[0] != hidden_states.shape[0]:
        raise ValueError(f"top_k_index: expected shape ({hidden_states.shape[0]}, top_k), got {tuple(index.shape)}")
    _floating("top_k_weights", weights)
    if weights.shape != index.shape:
        raise ValueError(
            f"top_k_weights: expected shape {tuple(index.shape)} like top_k_index, got {tuple(weights.shape)}"
        )
    for name, value in (("top_k_index", index), ("top_k_weights", weights)):
        if value.device != device:
            raise ValueError(f"{name}: expected on {device} like hidden_states, got {value.device}")


def _floating(name: str, value: Tensor) -> None:
    dtype = value.dtype
    if dtype is not torch.bfloat16 and dtype is not torch.float16 and dtype is not FLOAT32:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {dtype}")
