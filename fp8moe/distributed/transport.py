"""Collectives that send tokens to the ranks of their experts and results back."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8moe.kernels.experts.backward import no_double_backward
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.formats import FP8Tensor, align, ceil_div
from fp8moe.quant.quantize import dequantize, quantize_1x128

# PyTorch 2.13 has renamed all_gather_into_tensor.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ALIGNMENT = 16  # bytes: the parts of a packed row begin at its multiples, as kernels load them

# Bytes of one rank's partial sums from which two collectives with fewer bytes beat one: at NCCL's 200 GB/s on a node
# 4 MB take 20 us, the cost of starting another collective.
_SLICED_FROM = 4 << 20

# Measured on two H200s over NVLink with DeepSeek-V3's layer: NCCL moves 200 GB/s; gather sends 7392 bytes of a token to
# each other rank and gets 28672 back. Eager all_to_all of few tokens takes 1.5 ms more, as it waits for sizes.
_MICROSECONDS_A_ROW = 0.18
_MICROSECONDS_A_CALL = 1500


class Tokens(NamedTuple):
    """Inputs of experts for T tokens: (T, H), quantized 1x128 or not; (T, K) int32 or int64; (T, K)."""

    hidden_states: Tensor | FP8Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


class Transport(ABC):
    """Sends the tokens of one call to the ranks of their experts, and partial sums back.

    room: rows that `out` sends, at least the tokens of this rank.
    num_rows: assignments to this rank's experts, or None if the host does not know them.
    """

    room: int
    num_rows: int | None = None

    @abstractmethod
    def out(self, rows: Tensor) -> Tensor:
        """Send a row per token of this rank, (T, C) or (room, C). Returns a row per received token, (N, C)."""

    @abstractmethod
    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """Send rows (N, C) back to the tokens' ranks: the adjoint of `out`. residual: (T, C) of `dtype`, is added.

        Returns each token's sum (T, C), in float32 in the order of ranks, rounded once to `dtype`.
        """

    def send(self, tokens: Tokens) -> Tokens:
        """Send the tokens of this rank in one collective, a row for each. Returns the received tokens."""
        return _unpack(self.out(_pack(tokens, self.room)), tokens)


class Gather(Transport):
    """Sends all tokens to every rank, and partial sums back to the tokens' ranks.

    Two collectives of W times the most tokens of a rank, a size that the host knows.
    """

    def __init__(self, group: ProcessGroup, tokens: list[int]):
        self.group = group
        self.room = max(tokens)
        self.tokens = tokens[dist.get_rank(group)]

    def out(self, rows: Tensor) -> Tensor:
        return all_gather(self.group, _padded(rows, self.room))

    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        row_index = _rows_by_rank(dist.get_world_size(self.group), self.room, self.tokens, rows.device)
        return _ordered_sum(_exchange(self.group, rows), row_index, dtype, residual)


class AllToAll(Transport):
    """Sends each token once to every rank that has one of its experts. The host reads sizes: not for CUDA graphs.

    One collective for sizes, then two collectives with a row for each pair of a token and a rank.

    assignments_sent, assignments_received: how many, to and from each rank. assignment_rows: (T, K) int32, the row of
    each assignment among the sent ones, in the order of ranks.
    """

    def __init__(self, group: ProcessGroup, top_k_index: Tensor, num_experts: int):
        self.group = group
        world = dist.get_world_size(group)
        self.room = len(top_k_index)
        ranks = _owners(top_k_index, num_experts, world)
        assignments, self.assignment_rows = sort_by_expert(ranks, world)
        needed = torch.zeros(len(ranks), world + 1, dtype=torch.bool, device=ranks.device)
        needed.scatter_(1, torch.where(ranks >= 0, ranks, world), True)
        each = torch.arange(world, device=ranks.device)
        tokens, self.token_rows = sort_by_expert(torch.where(needed[:, :world], each, -1), world)
        numbers = torch.stack([tokens.diff(), assignments.diff()], dim=1)
        numbers = torch.cat([numbers, _exchange(group, numbers)], dim=1)
        self.sent, self.assignments_sent, self.received, self.assignments_received = numbers.t().tolist()
        self.num_rows = sum(self.assignments_received)

    def out(self, rows: Tensor) -> Tensor:
        tokens = _inverse(self.token_rows, sum(self.sent)).div(self.token_rows.shape[1], rounding_mode="floor")
        return _exchange(self.group, rows.index_select(0, tokens), self.sent, self.received)

    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        received = _exchange(self.group, rows, self.received, self.sent)
        return _ordered_sum(received, self.token_rows, dtype, residual)


class Replicated(Transport):
    """Sends partial sums to all ranks, which already have the tokens.

    Every rank adds up the partial sums of all ranks; if there are many, only for a slice of the tokens.
    """

    def __init__(self, group: ProcessGroup, tokens: list[int]):
        self.group = group
        self.room = tokens[0]

    def send(self, tokens: Tokens) -> Tokens:
        return tokens

    def out(self, rows: Tensor) -> Tensor:
        return rows

    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        world, tokens = dist.get_world_size(self.group), len(rows)
        if rows.nbytes < _SLICED_FROM:
            row_index = _rows_by_rank(world, tokens, tokens, rows.device)
            return _ordered_sum(all_gather(self.group, rows), row_index, dtype, residual)
        size = ceil_div(tokens, world)
        received = _exchange(self.group, _padded(rows, size * world))
        part = _ordered_sum(received, _rows_by_rank(world, size, size, rows.device), dtype)
        out = all_gather(self.group, part)[:tokens]
        return out if residual is None else residual + out


class ExactTransport(ABC):
    """Sends a result row for each assignment back to its token's rank, which adds them up as one GPU would.

    transport: sends the tokens. row_index: (T, K) int32, each assignment's row in the result of `back`.
    """

    transport: Transport
    row_index: Tensor

    @abstractmethod
    def back(self, y: Tensor, rows: Tensor) -> Tensor:
        """Send y (R, H) to the tokens' ranks. rows: (N, K), each assignment's row of y. Returns (P, H)."""

    @abstractmethod
    def out(self, grad: Tensor, rows: Tensor, count: int) -> Tensor:
        """Apply the adjoint of `back`: (P, H) -> (count, H); rows of no assignment hold any values."""


class ExactAllToAll(ExactTransport):
    """Exchanges as many rows as there are assignments: for eager calls."""

    def __init__(self, group: ProcessGroup, top_k_index: Tensor, num_experts: int):
        self.transport = AllToAll(group, top_k_index, num_experts)
        self.row_index = self.transport.assignment_rows

    def back(self, y: Tensor, rows: Tensor) -> Tensor:
        transport = self.transport
        y = y.index_select(0, self._rows_here(rows).long())
        return _exchange(transport.group, y, transport.assignments_received, transport.assignments_sent)

    def out(self, grad: Tensor, rows: Tensor, count: int) -> Tensor:
        transport = self.transport
        received = _exchange(transport.group, grad, transport.assignments_sent, transport.assignments_received)
        return received.index_select(0, _inverse(self._rows_here(rows), count))

    def _rows_here(self, rows: Tensor) -> Tensor:
        """Return the rows of the assignments to this rank, in the order of tokens."""
        here = sort_by_expert(torch.where(rows >= 0, 0, -1), 1).rows
        return rows.flatten().index_select(0, _inverse(here, self.transport.num_rows))


class ExactGather(ExactTransport):
    """Exchanges T * K rows with every rank: for CUDA graphs, where no size may depend on the routing."""

    def __init__(self, group: ProcessGroup, tokens: list[int], top_k_index: Tensor, num_experts: int):
        self.transport = Gather(group, tokens)
        world, (count, top_k) = dist.get_world_size(group), top_k_index.shape
        ranks = _owners(top_k_index, num_experts, world)
        own = torch.arange(count * top_k, device=ranks.device).view(count, top_k)
        self.row_index = torch.where(ranks >= 0, ranks * (self.transport.room * top_k) + own, -1).int()

    def back(self, y: Tensor, rows: Tensor) -> Tensor:
        return _exchange(self.transport.group, y.index_select(0, rows.flatten().clamp(min=0)))

    def out(self, grad: Tensor, rows: Tensor, count: int) -> Tensor:
        return _exchange(self.transport.group, grad).index_select(0, _inverse(rows, count))


def choose_method(tokens: int, top_k: int, world: int) -> str:
    """Return the method of "auto" over NCCL, by the rows of gather and all_to_all and the cost of a call.

    tokens: the most of a rank, so that the method is the same on all ranks.
    """
    spared = (1 - 1 / world) ** top_k  # share of the ranks that have no expert of a token
    saved = _MICROSECONDS_A_ROW * tokens * (world - 1) * spared
    return "all_to_all" if saved > _MICROSECONDS_A_CALL else "gather"


def _owners(top_k_index: Tensor, num_experts: int, world: int) -> Tensor:
    """Return the rank that has the expert of each assignment, (T, K) int64; -1 for none."""
    index = top_k_index.long()
    inside = (index >= 0) & (index < num_experts)
    return torch.where(inside, index.div(num_experts // world, rounding_mode="floor"), -1)


def _inverse(row_index: Tensor, count: int) -> Tensor:
    """Return the flat position in row_index of each of `count` rows, (count,) int64; 0 for rows that do not occur."""
    flat = torch.where(row_index >= 0, row_index, count).flatten().long()
    order = torch.arange(flat.numel(), device=flat.device)
    return order.new_zeros(count + 1).scatter_(0, flat, order)[:count]


def all_gather(group: ProcessGroup, rows: Tensor) -> Tensor:
    """Return the rows of all ranks, (W * R, C); every rank has R."""
    out = rows.new_empty((dist.get_world_size(group) * rows.shape[0], rows.shape[1]))
    if out.numel():
        _all_gather(_bytes(out), _bytes(rows.contiguous()), group=group)
    return out


def _exchange(
    group: ProcessGroup, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """Run an all-to-all: rows are in the order of their destination ranks, the result in the order of source ranks.

    sent, received: how many rows go to and come from each rank; None: equally many.
    """
    out = rows.new_empty((len(rows) if sent is None else sum(received), rows.shape[1]))
    width = rows.shape[1] * rows.itemsize
    splits = () if sent is None else ([n * width for n in received], [n * width for n in sent])
    if splits or rows.numel():
        dist.all_to_all_single(_bytes(out), _bytes(rows.contiguous()), *splits, group=group)
    return out


def _padded(rows: Tensor, count: int) -> Tensor:
    """Return `rows`, padded to `count` rows with zeros."""
    return rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)))


def _rows_by_rank(ranks: int, size: int, tokens: int, device: torch.device) -> Tensor:
    """Return the indices (tokens, ranks) int32 of each token's rows among `size` rows of each rank."""
    return torch.arange(ranks * size, dtype=torch.int32, device=device).view(ranks, size).t()[:tokens]


def _ordered_sum(rows: Tensor, row_index: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """Sum each token's rows (R, C) in the order of row_index (T, W) int32. Returns (T, C), rounded once."""
    ones = torch.ones(row_index.shape, dtype=torch.float32, device=row_index.device)
    return weighted_sum(rows, row_index, ones, dtype, residual)


def weighted_sum(
    rows: Tensor, row_index: Tensor, weights: Tensor, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """Compute `combine` for any number of columns, and for float16 too."""
    rows, columns = rows.float() if rows.dtype is torch.float16 else rows, rows.shape[1]
    if columns % 8 == 0:
        return combine(rows, row_index, weights, dtype, residual=residual)
    total = combine(F.pad(rows, (0, -columns % 8)), row_index, weights, dtype)[:, :columns]
    return total.contiguous() if residual is None else residual + total


def _bytes(value: Tensor) -> Tensor:
    # All backends send bytes; few send float8, and not all bfloat16.
    return value.view(torch.uint8).view(-1)


def send(transport: Transport, tokens: Tokens) -> Tokens:
    """Compute `Transport.send` with gradients of hidden_states, not quantized, and top_k_weights."""
    return Tokens(*_Send.apply(transport, *tokens))


def collect(transport: Transport, partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `Transport.back` with a gradient, which is sent in the dtype of the result."""
    return _Linear.apply(partial, lambda rows: transport.back(rows, dtype), lambda grad: transport.out(grad).float())


def permute(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Copy tokens x (N, H) to expert rows, differentiably. rows: (N, K), the row of each assignment.

    Returns (count, H); rows without an assignment hold an arbitrary token.
    """
    tokens, dtype = _inverse(rows, count).div(max(rows.shape[1], 1), rounding_mode="floor"), x.dtype
    return _Linear.apply(x, lambda x: x.index_select(0, tokens), lambda grad: _ordered_sum(grad, rows, dtype))


def combine_exact(exact: ExactTransport, y: Tensor, rows: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sums (T, H) of the rows y (R, H) of all ranks, with gradients of y and top_k_weights."""
    count = len(y)
    returned = _Linear.apply(y, lambda y: exact.back(y, rows), lambda grad: exact.out(grad, rows, count))
    return _WeightedSum.apply(returned, exact.row_index, top_k_weights, dtype)


def _differentiated_once(backward: Callable) -> Callable:
    """Wrap a backward of an autograd.Function: differentiating its gradients raises an error.

    Autograd does not see collectives, so a second derivative would lack the terms of other ranks.
    """

    @functools.wraps(backward)
    def run(ctx, *grads: Tensor) -> tuple:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        return tuple(value if value is None else _Once.apply(value, *grads, *ctx.saved_tensors) for value in results)

    return run


class _Once(torch.autograd.Function):
    """Ties a gradient to the tensors that it was computed from, so that differentiating it raises an error."""

    @staticmethod
    def forward(ctx, value, *_):
        return value.view_as(value)

    backward = staticmethod(no_double_backward)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transport, hidden_states, top_k_index, top_k_weights):
        ctx.transport, ctx.dtypes = transport, (hidden_states.dtype, top_k_weights.dtype)
        tokens = transport.send(Tokens(hidden_states, top_k_index, top_k_weights))
        ctx.mark_non_differentiable(tokens.top_k_index)
        return tuple(tokens)

    @staticmethod
    @_differentiated_once
    def backward(ctx, d_hidden, _, d_weights):
        # The needed gradients are the same on all ranks: the ranks have agreed on them.
        back, needed = ctx.transport.back, ctx.needs_input_grad
        d_hidden = back(d_hidden, ctx.dtypes[0]) if needed[1] else None
        return None, d_hidden, None, back(d_weights.float(), ctx.dtypes[1]) if needed[3] else None


class _Linear(torch.autograd.Function):
    """``function(x)`` for a linear function; `adjoint` maps the gradient of the result to that of x."""

    @staticmethod
    def forward(ctx, x, function, adjoint):
        ctx.adjoint = adjoint
        return function(x)

    @staticmethod
    @_differentiated_once
    def backward(ctx, grad):
        return ctx.adjoint(grad), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row_index, weights, dtype):
        ctx.save_for_backward(y, row_index, weights)
        return weighted_sum(y, row_index, weights, dtype)

    @staticmethod
    @_differentiated_once
    def backward(ctx, grad):
        y, row_index, weights = ctx.saved_tensors
        d_y = y.new_zeros(len(y) + 1, y.shape[1])  # assignments to no expert write to the last row
        d_weights = torch.zeros_like(weights)
        # As on one GPU, the gradient of the weights uses the quantized gradient of the result.
        quantized, grad = dequantize(quantize_1x128(grad)), grad.float()
        for k in range(row_index.shape[1]):
            row, inside = row_index[:, k].long(), row_index[:, k] >= 0
            d_y.index_copy_(0, torch.where(inside, row, len(y)), (weights[:, k, None] * grad).to(y.dtype))
            if len(y):
                products = y.index_select(0, row.clamp(min=0)).float() * quantized
                d_weights[:, k] = torch.where(inside, products.sum(-1), 0)
        return d_y[:-1], None, d_weights, None


def _pack(tokens: Tokens, rows: int) -> Tensor:
    """Pack tokens into `rows` rows of raw int64; padding rows have no experts. Indices become int32."""
    x, index, weights = tokens
    if index.dtype is torch.int64:
        index = index.clamp(-1, torch.iinfo(torch.int32).max)  # a clamped index is still no expert
    parts = [*(x if isinstance(x, FP8Tensor) else (x,)), index, weights]
    columns = _columns(tokens)
    width = sum(align(count * dtype.itemsize, _ALIGNMENT) for dtype, count in columns)
    out = torch.empty((rows, width // 8), dtype=torch.int64, device=index.device)
    views = _views(out, columns)
    for view, part in zip(views, parts, strict=True):
        view[: len(part)].copy_(part)
    if len(index) < rows:
        out[len(index) :].zero_()
        views[-2][len(index) :] = -1
    return out


def _unpack(rows: Tensor, like: Tokens) -> Tokens:
    """Return the tokens in packed rows, as views. like: tokens with the same dtypes and columns."""
    *x, index, weights = _views(rows, _columns(like))
    return Tokens(x[0] if len(x) == 1 else FP8Tensor(*x), index, weights)


def _columns(tokens: Tokens) -> list[tuple[torch.dtype, int]]:
    """Return dtype and number of columns of each part."""
    x, index, _ = tokens
    values, top_k = x if isinstance(x, FP8Tensor) else (x,), index.shape[1]
    return [*((value.dtype, value.shape[1]) for value in values), (torch.int32, top_k), (torch.float32, top_k)]


def _views(rows: Tensor, columns: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    rows, views, begin = rows.view(torch.uint8), [], 0
    for dtype, count in columns:
        nbytes = count * dtype.itemsize
        views.append(rows[:, begin : begin + nbytes].view(dtype))
        begin += align(nbytes, _ALIGNMENT)
    return views
