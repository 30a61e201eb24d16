"""What an experts layer computes with, and the sizes that its kernels want."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Operands(NamedTuple):
    """The input, its routing and the FP8 weights of an experts layer, as `forward.experts` describes them."""

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    up: Tensor
    up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    residual: Tensor | None = None


def pad_weights(up: Tensor, down: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """FP8 weights up (E, 2I or I, H) and down (E, H, I) with I a multiple of `multiple` and H of 16.

    Themselves, or copies padded with zeros, which fall into blocks that are there already: the scales stay as they are.
    """
    hidden, size = down.shape[1:]
    pad_hidden, pad_size = -hidden % 16, -size % multiple
    if not (pad_hidden or pad_size):
        return up, down
    projections = up.view(torch.uint8).unflatten(1, (-1, size))
    padded_up = F.pad(projections, (0, pad_hidden, 0, pad_size)).flatten(1, 2)
    padded_down = F.pad(down.view(torch.uint8), (0, pad_size, 0, pad_hidden))
    return padded_up.view(up.dtype), padded_down.view(down.dtype)


def pad_columns(x: Tensor, columns: int) -> Tensor:
    """x (M, H) itself or a copy with `columns` columns, the last ones zeros."""
    return x if x.shape[1] == columns else F.pad(x, (0, columns - x.shape[1]))


def without_padding(out: Tensor, columns: int) -> Tensor:
    """The first `columns` columns of `out` (M, H): itself or a contiguous copy."""
    return out if out.shape[1] == columns else out[:, :columns].clone(memory_format=torch.contiguous_format)
