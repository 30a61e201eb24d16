"""Transports: collectives that send tokens to the ranks of their experts, and results back."""

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

# PyTorch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ALIGNMENT = 16  # bytes; each part of a packed row begins at a multiple of this, as kernels require

# If one rank's partial sums have at least this many bytes, `Replicated` adds them up in slices. This takes two
# collectives instead of one, but the two together move fewer bytes. At NCCL's 200 GB/s on a node, 4 MB take 20 us, the
# cost of starting another collective.
_SLICED_FROM = 4 << 20

# For each token that a rank need not receive, all_to_all saves _MICROSECONDS_A_ROW compared with gather; each call of
# all_to_all takes _MICROSECONDS_A_CALL more. Measured on two H200s over NVLink with DeepSeek-V3's layer: NCCL moves
# 200 GB/s; gather sends 7392 bytes per token to each other rank and gets 28672 back. Eager all_to_all of few tokens
# takes 1.5 ms more, as the CPU waits for sizes.
_MICROSECONDS_A_ROW = 0.18
_MICROSECONDS_A_CALL = 1500


class Tokens(NamedTuple):
    """T tokens with their routing.

    hidden_states: (T, H), quantized 1x128 or not. top_k_index: (T, K) int32 or int64. top_k_weights: (T, K).
    """

    hidden_states: Tensor | FP8Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


class Transport(ABC):
    """Sends the tokens of one call to the ranks of their experts, and partial sums back.

    room: number of rows that `send` packs the tokens of this rank into; rows beyond its tokens are padding.
    num_rows: number of (token, expert) assignments to this rank's experts, or None if the CPU does not know it.
    """

    room: int
    num_rows: int | None = None

    @abstractmethod
    def out(self, rows: Tensor) -> Tensor:
        """Send one row per token of this rank, (T, C) or (room, C); return one row per received token, (N, C)."""

    @abstractmethod
    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """Send one row per received token, (N, C), back to the token's rank, which adds up the rows of each token.

        Returns each token's sum (T, C), added in float32 in the order of ranks, rounded once to `dtype`.
        residual: (T, C) of `dtype`, added to the result, or None. Without a residual this is the adjoint of `out`.
        """

    def send(self, tokens: Tokens) -> Tokens:
        """Send the tokens of this rank, packed into one row each, in one collective; return the received tokens."""
        return _unpack(self.out(_pack(tokens, self.room)), tokens)


class Gather(Transport):
    """Sends all tokens to every rank, and partial sums back to the tokens' ranks.

    Each of its two collectives moves W times the largest token count of any rank, a size that the CPU knows.
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
    """Sends each token once to every rank that has one of its experts. Not for CUDA graphs, as the CPU reads sizes.

    One collective exchanges sizes; one sends one row per (token, rank) pair, and one returns one row per pair.

    sent, received: numbers of tokens to and from each rank. assignments_sent, assignments_received: numbers of
    (token, expert) assignments to and from each rank. token_rows (T, W) int32: entry [t, r] is the position of token t
    for rank r among the rows to send, sorted by rank. assignment_rows (T, K) int32: the position of each assignment
    among all assignments, sorted by rank.
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
    """Sends partial sums to all ranks; tokens need not be sent, as all ranks have them.

    Every rank adds up the partial sums of all ranks. If there are many tokens, each rank adds up the partial sums of
    only a slice of the tokens, and a second collective shares the sums.
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
    """Sends one result row per assignment back to the token's rank, which adds up the rows as one GPU would.

    An assignment is a (token, expert) pair. transport: the Transport that sends the tokens. row_index: (T, K) int32,
    the row of each assignment of this rank's tokens in the result of `back`.
    """

    transport: Transport
    row_index: Tensor

    @abstractmethod
    def back(self, y: Tensor, rows: Tensor) -> Tensor:
        """Send result rows y (R, H) to the tokens' ranks; return the rows that this rank receives, (P, H).

        rows: (N, K), the row in y of each assignment of the N received tokens; -1 for experts of other ranks.
        """

    @abstractmethod
    def out(self, grad: Tensor, rows: Tensor, count: int) -> Tensor:
        """Apply the adjoint of `back`: send a gradient (P, H) of its result to the experts' ranks.

        Returns the gradient (count, H) of y. Rows of y without an assignment get arbitrary values.
        """


class ExactAllToAll(ExactTransport):
    """Exchanges exactly one row per assignment. Not for CUDA graphs, as the CPU must know the numbers of rows."""

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
        """Return the row of each assignment to this rank, 1-D, in the order of tokens. rows: as for `back`."""
        here = sort_by_expert(torch.where(rows >= 0, 0, -1), 1).rows
        return rows.flatten().index_select(0, _inverse(here, self.transport.num_rows))


class ExactGather(ExactTransport):
    """Exchanges T * K rows with every rank. For CUDA graphs, where no size may depend on the routing."""

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
    """Return the faster method over NCCL, "gather" or "all_to_all", estimated from the rows that each sends.

    tokens: the largest token count of any rank, so that all ranks choose the same method.
    """
    spared = (1 - 1 / world) ** top_k  # the fraction of ranks that have no expert of a given token
    saved = _MICROSECONDS_A_ROW * tokens * (world - 1) * spared
    return "all_to_all" if saved > _MICROSECONDS_A_CALL else "gather"


def _owners(top_k_index: Tensor, num_experts: int, world: int) -> Tensor:
    """Return the rank that has the expert of each assignment, (T, K) int64; -1 if no expert has the index."""
    index = top_k_index.long()
    inside = (index >= 0) & (index < num_experts)
    return torch.where(inside, index.div(num_experts // world, rounding_mode="floor"), -1)


def _inverse(row_index: Tensor, count: int) -> Tensor:
    """Return (count,) int64: the position of each row number below `count` in the flattened `row_index`.

    The position is 0 for a row number that does not occur.
    """
    flat = torch.where(row_index >= 0, row_index, count).flatten().long()
    order = torch.arange(flat.numel(), device=flat.device)
    return order.new_zeros(count + 1).scatter_(0, flat, order)[:count]


def all_gather(group: ProcessGroup, rows: Tensor) -> Tensor:
    """Return the rows of all ranks, (W * R, C). rows: this rank's rows (R, C); R must be the same on all ranks."""
    out = rows.new_empty((dist.get_world_size(group) * rows.shape[0], rows.shape[1]))
    if out.numel():
        _all_gather(_bytes(out), _bytes(rows.contiguous()), group=group)
    return out


def _exchange(
    group: ProcessGroup, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """Run an all-to-all on rows sorted by destination rank; return the received rows sorted by source rank.

    sent, received: the numbers of rows that go to and come from each rank; None if all are equal.
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
    """Return an int32 tensor (tokens, ranks): entry [t, r] is the index of rank r's row for token t.

    The index is a position in the concatenation of `size` rows from each rank.
    """
    return torch.arange(ranks * size, dtype=torch.int32, device=device).view(ranks, size).t()[:tokens]


def _ordered_sum(rows: Tensor, row_index: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """Return the sum (T, C) of each token's rows, listed by row_index (T, W) int32 and added in that order.

    Sums are rounded once to `dtype`.
    """
    ones = torch.ones(row_index.shape, dtype=torch.float32, device=row_index.device)
    return weighted_sum(rows, row_index, ones, dtype, residual)


def weighted_sum(
    rows: Tensor, row_index: Tensor, weights: Tensor, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """Run the kernel `combine` for any number of columns and for float16 rows.

    Columns are padded to a multiple of 8. float16 rows are converted to float32.
    """
    rows, columns = rows.float() if rows.dtype is torch.float16 else rows, rows.shape[1]
    if columns % 8 == 0:
        return combine(rows, row_index, weights, dtype, residual=residual)
    total = combine(F.pad(rows, (0, -columns % 8)), row_index, weights, dtype)[:, :columns]
    return total.contiguous() if residual is None else residual + total


def _bytes(value: Tensor) -> Tensor:
    # All backends can send bytes; few can send float8, and not all can send bfloat16.
    return value.view(torch.uint8).view(-1)


def send(transport: Transport, tokens: Tokens) -> Tokens:
    """Call `Transport.send` differentiably: top_k_weights and hidden_states (not quantized) get gradients."""
    return Tokens(*_Send.apply(transport, *tokens))


def collect(transport: Transport, partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Call `Transport.back` differentiably; the backward sends the gradient in the dtype of the result."""
    return _Linear.apply(partial, lambda rows: transport.back(rows, dtype), lambda grad: transport.out(grad).float())


def permute(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Copy tokens x (N, H) to `count` rows sorted by expert, (count, H), differentiably.

    rows: (N, K), the row of each assignment. A row without an assignment holds an arbitrary token.
    """
    tokens, dtype = _inverse(rows, count).div(max(rows.shape[1], 1), rounding_mode="floor"), x.dtype
    return _Linear.apply(x, lambda x: x.index_select(0, tokens), lambda grad: _ordered_sum(grad, rows, dtype))


def combine_exact(exact: ExactTransport, y: Tensor, rows: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Send result rows y (R, H) to their ranks; return the weighted sums (T, H) of this rank's tokens, differentiably.

    rows: as for `ExactTransport.back`. y and top_k_weights get gradients.
    """
    count = len(y)
    returned = _Linear.apply(y, lambda y: exact.back(y, rows), lambda grad: exact.out(grad, rows, count))
    return _WeightedSum.apply(returned, exact.row_index, top_k_weights, dtype)


def _differentiated_once(backward: Callable) -> Callable:
    """Wrap the backward of an autograd.Function so that differentiating its gradients raises an error.

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
    """Connects a gradient to the tensors that it was computed from: differentiating the gradient raises an error."""

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
        # `Agreement.calls` has checked that all ranks need the same gradients, so all make the same collectives.
        back, needed = ctx.transport.back, ctx.needs_input_grad
        d_hidden = back(d_hidden, ctx.dtypes[0]) if needed[1] else None
        return None, d_hidden, None, back(d_weights.float(), ctx.dtypes[1]) if needed[3] else None


class _Linear(torch.autograd.Function):
    """Applies a linear function to x; `adjoint` maps the gradient of the result to the gradient of x."""

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
        d_y = y.new_zeros(len(y) + 1, y.shape[1])  # an extra last row receives the writes for assignments to no expert
        d_weights = torch.zeros_like(weights)
        # As on one GPU, the gradient of the routing weights is computed from the quantized gradient of the result.
        quantized, grad = dequantize(quantize_1x128(grad)), grad.float()
        for k in range(row_index.shape[1]):
            row, inside = row_index[:, k].long(), row_index[:, k] >= 0
            d_y.index_copy_(0, torch.where(inside, row, len(y)), (weights[:, k, None] * grad).to(y.dtype))
            if len(y):
                products = y.index_select(0, row.clamp(min=0)).float() * quantized
                d_weights[:, k] = torch.where(inside, products.sum(-1), 0)
        return d_y[:-1], None, d_weights, None


def _pack(tokens: Tokens, rows: int) -> Tensor:
    """Pack tokens into `rows` rows of bytes, viewed as int64. Top-k indices become int32; padding rows have -1."""
    x, index, weights = tokens
    if index.dtype is torch.int64:
        # indices that no expert has stay out of range when clamped
        index = index.clamp(-1, torch.iinfo(torch.int32).max)
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
    """Return (dtype, number of columns) of each part of a packed row."""
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
