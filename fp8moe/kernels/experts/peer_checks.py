"""Checks of what goes to the memory of peers, in the manner of `runtime.checks`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.peer_table import MAX_PEERS
from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_int, check_like, check_tensor

_PARTS = {
    "data": torch.float8_e4m3fn,
    "scale": torch.float32,
    "index": torch.int32,
    "weights": torch.float32,
}


def dispatch(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    buffers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    rank: int,
    num_experts: int,
) -> None:
    """Dtypes, sizes, layouts and devices of the arguments of `dispatch`."""
    for name, value in (("x", x), ("top_k_index", index), ("top_k_weights", weights)):
        check_tensor(name, value)
    check_dtype("x", x, *FLOATING)
    if x.dim() != 2 or x.shape[1] % 16:
        raise ValueError(f"x: expected shape (N, H) with H a multiple of 16, got {tuple(x.shape)}")
    checks.routed(index, weights, x, "x")
    _peers(buffers, rank, least=1)
    _experts(num_experts, len(buffers))
    room = buffers[0][0].shape[0] if buffers[0][0].dim() else 0
    if room % len(buffers) or room < x.shape[0] * len(buffers):
        raise ValueError(
            f"buffers: expected {len(buffers)} * T slots with T at least {x.shape[0]}, the tokens of x, got {room}"
        )
    hidden, top_k = x.shape[1], index.shape[1]
    shapes = (room, hidden), (room, ceil_div(hidden, BLOCK)), (room, top_k), (room, top_k)
    for i, buffer in enumerate(buffers):
        for (name, dtype), part, shape in zip(_PARTS.items(), buffer, shapes, strict=True):
            _target(f"buffers[{i}].{name}", part, dtype, shape)


def combine_to(
    y: Tensor,
    rows: Tensor,
    weights: Tensor,
    buffers: Sequence[Tensor],
    rank: int,
    to_all: bool,
    partial: Tensor | None,
) -> None:
    """The same of `combine_to`."""
    for name, value in (("y", y), ("rows", rows), ("weights", weights)):
        check_tensor(name, value)
    if partial is not None:
        check_tensor("partial", partial)
        check_like("partial", partial, (torch.float32,), (len(rows), y.shape[-1]), y.device, "y")
    checks.combine(y, rows, weights, torch.float32, None)
    _peers(buffers, rank, least=2)
    tokens, count = rows.shape[0], len(buffers)
    if tokens % count and not to_all:
        raise ValueError(f"rows: expected as many tokens of each of {count} ranks, got {tokens} in all")
    shape = (tokens * count if to_all else tokens, y.shape[1])
    for i, buffer in enumerate(buffers):
        _target(f"buffers[{i}]", buffer, torch.float32, shape)


def sum_partials(
    partials: Tensor, index: Tensor, ranks: int, num_experts: int, out_dtype: torch.dtype, residual: Tensor | None
) -> None:
    """The same of `sum_partials`."""
    for name, value in (("partials", partials), ("top_k_index", index)):
        check_tensor(name, value)
    check_dtype("partials", partials, torch.float32)
    check_int("ranks", ranks)
    if not 1 <= ranks <= MAX_PEERS:
        raise ValueError(f"ranks: expected 1 to {MAX_PEERS}, got {ranks}")
    _experts(num_experts, ranks)
    if partials.dim() != 2 or partials.shape[0] % ranks or partials.shape[1] % 8:
        raise ValueError(
            f"partials: expected shape ({ranks} * S, H) with H a multiple of 8, got {tuple(partials.shape)}"
        )
    check_dtype("top_k_index", index, torch.int32, torch.int64)
    slots = partials.shape[0] // ranks
    if index.dim() != 2 or len(index) > slots:
        raise ValueError(
            f"top_k_index: expected shape (T, K) with T at most {slots}, the rows of a rank, got {tuple(index.shape)}"
        )
    check_device("top_k_index", index, partials.device, "partials")
    checks.of_sums(out_dtype)
    if residual is not None:
        check_tensor("residual", residual)
        shape = (len(index), partials.shape[1])
        check_like("residual", residual, (out_dtype,), shape, partials.device, "partials")


def _experts(num_experts: int, ranks: int) -> None:
    check_int("num_experts", num_experts)
    if not 0 <= num_experts <= ranks * checks.MAX_EXPERTS or num_experts % ranks:
        most = f"{checks.MAX_EXPERTS} for each"
        raise ValueError(f"num_experts: expected a multiple of {ranks}, the ranks, up to {most}, got {num_experts}")


def _peers(buffers: Sequence, rank: int, least: int) -> None:
    if not least <= len(buffers) <= MAX_PEERS:
        raise ValueError(f"buffers: expected those of {least} to {MAX_PEERS} ranks, got {len(buffers)}")
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
