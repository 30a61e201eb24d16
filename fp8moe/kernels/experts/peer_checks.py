"""Checks of what goes to the memory of peers, in the manner of `runtime.checks`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks
from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.runtime.checks import FLOATING, check_dtype, check_int, check_tensor
from fp8moe.runtime.peer_table import MAX_PEERS

_PARTS = {"data": torch.float8_e4m3fn, "scale": torch.float32, "index": torch.int32}


def dispatch(
    x: Tensor, index: Tensor, buffers: Sequence[tuple[Tensor, Tensor, Tensor]], rank: int, num_experts: int
) -> None:
    """Dtypes, sizes, layouts and devices of the arguments of `dispatch`."""
    for name, value in (("x", x), ("top_k_index", index)):
        check_tensor(name, value)
    check_dtype("x", x, *FLOATING)
    if x.dim() != 2 or x.shape[1] % 16:
        raise ValueError(f"x: expected shape (N, H) with H a multiple of 16, got {tuple(x.shape)}")
    checks.routed_index(index, x, "x")
    _peers(buffers, rank)
    _experts(num_experts, len(buffers))
    room = buffers[0][0].shape[0] if buffers[0][0].dim() else 0
    if room % len(buffers) or room < x.shape[0] * len(buffers):
        raise ValueError(
            f"buffers: expected {len(buffers)} * T slots with T at least {x.shape[0]}, the tokens of x, got {room}"
        )
    hidden, top_k = x.shape[1], index.shape[1]
    shapes = (room, hidden), (room, ceil_div(hidden, BLOCK)), (room, top_k)
    for i, buffer in enumerate(buffers):
        for (name, dtype), part, shape in zip(_PARTS.items(), buffer, shapes, strict=True):
            _target(f"buffers[{i}].{name}", part, dtype, shape)


def _experts(num_experts: int, ranks: int) -> None:
    check_int("num_experts", num_experts)
    if not 0 <= num_experts <= ranks * checks.MAX_EXPERTS or num_experts % ranks:
        most = f"{checks.MAX_EXPERTS} for each"
        raise ValueError(f"num_experts: expected a multiple of {ranks}, the ranks, up to {most}, got {num_experts}")


def _peers(buffers: Sequence, rank: int) -> None:
    if not 1 <= len(buffers) <= MAX_PEERS:
        raise ValueError(f"buffers: expected those of 1 to {MAX_PEERS} ranks, got {len(buffers)}")
    check_int("rank", rank)
    if not 0 <= rank < len(buffers):
        raise ValueError(f"rank: expected 0 to {len(buffers) - 1}, the buffers there are, got {rank}")


def _target(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """That a kernel can write it; it may be on another device than what is written."""
    check_dtype(name, value, dtype)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    if not value.is_contiguous() or value.data_ptr() % 16:
        raise ValueError(f"{name}: expected contiguous and at a multiple of 16 bytes, got strides {value.stride()}")
