"""exact=True: a row back for each token and expert, so that the source adds up what one GPU would."""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8moe.distributed.collectives import exchange, ordered_sum, weighted_sum
from fp8moe.distributed.transport import AllToAll, Gather, Transport, differentiated_once, inverse, owners, with_adjoint
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.quantize import dequantize, quantize_1x128


class Pairs(ABC):
    """Returns rows in the order of experts to the ranks of their tokens.

    transport: sends the tokens. row_index: (T, K) int32, each assignment's row in the result of `back`.
    """

    transport: Transport
    row_index: Tensor

    @abstractmethod
    def back(self, y: Tensor, rows: Tensor) -> Tensor:
        """y (R, H), of assignments that have the rows (N, K) of it, to the ranks of their tokens: (P, H)."""

    @abstractmethod
    def out(self, grad: Tensor, rows: Tensor, count: int) -> Tensor:
        """The adjoint of `back`: (P, H) -> (count, H), with anything in rows of no assignment."""


class CountedPairs(Pairs):
    """Returns as many rows as there are assignments: for eager calls."""

    def __init__(self, group: ProcessGroup, top_k_index: Tensor, num_experts: int):
        self.transport = AllToAll(group, top_k_index, num_experts)
        self.row_index = self.transport.assignment_rows

    def back(self, y: Tensor, rows: Tensor) -> Tensor:
        transport = self.transport
        y = y.index_select(0, rows.flatten().index_select(0, self._order(rows)).long())
        return exchange(transport.group, y, transport.assignments_received, transport.assignments_sent)

    def out(self, grad: Tensor, rows: Tensor, count: int) -> Tensor:
        transport = self.transport
        received = exchange(transport.group, grad, transport.assignments_sent, transport.assignments_received)
        return received.index_select(0, inverse(rows.flatten().index_select(0, self._order(rows)), count))

    def _order(self, rows: Tensor) -> Tensor:
        """The assignments that are here, in the order of tokens."""
        here = torch.where(rows >= 0, 0, -1)
        return inverse(sort_by_expert(here, 1).rows, self.transport.num_rows)


class FixedPairs(Pairs):
    """Exchanges T * K rows with every rank: for CUDA graphs, where no size may depend on the routing."""

    def __init__(self, group: ProcessGroup, tokens: list[int], top_k_index: Tensor, num_experts: int):
        self.transport = Gather(group, tokens)
        world, (count, top_k) = dist.get_world_size(group), top_k_index.shape
        ranks = owners(top_k_index, num_experts, world)
        own = torch.arange(count * top_k, device=ranks.device).view(count, top_k)
        self.row_index = torch.where(ranks >= 0, ranks * (self.transport.room * top_k) + own, -1).int()

    def back(self, y: Tensor, rows: Tensor) -> Tensor:
        return exchange(self.transport.group, y.index_select(0, rows.flatten().clamp(min=0)))

    def out(self, grad: Tensor, rows: Tensor, count: int) -> Tensor:
        return exchange(self.transport.group, grad).index_select(0, inverse(rows, count))


def permute(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """x (N, H) to `count` rows by rows (N, K), with a gradient; some token in rows of no assignment."""
    tokens, dtype = inverse(rows, count).div(max(rows.shape[1], 1), rounding_mode="floor"), x.dtype
    return with_adjoint(x, lambda x: x.index_select(0, tokens), lambda grad: ordered_sum(grad, rows, dtype))


def combine_pairs(pairs: Pairs, y: Tensor, rows: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sums (T, H) of the rows y (R, H) that all ranks have, with gradients of y and top_k_weights."""
    count = len(y)
    returned = with_adjoint(y, lambda y: pairs.back(y, rows), lambda grad: pairs.out(grad, rows, count))
    return _WeightedSum.apply(returned, pairs.row_index, top_k_weights, dtype)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row_index, weights, dtype):
        ctx.save_for_backward(y, row_index, weights)
        return weighted_sum(y, row_index, weights, dtype)

    @staticmethod
    @differentiated_once
    def backward(ctx, grad):
        y, row_index, weights = ctx.saved_tensors
        d_y = y.new_zeros(len(y) + 1, y.shape[1])  # assignments to no expert share the last row
        d_weights = torch.zeros_like(weights)
        # The gradient of the weights takes that of the result quantized, as on one GPU.
        quantized, grad = dequantize(quantize_1x128(grad)), grad.float()
        for k in range(row_index.shape[1]):
            row, inside = row_index[:, k].long(), row_index[:, k] >= 0
            d_y.index_copy_(0, torch.where(inside, row, len(y)), (weights[:, k, None] * grad).to(y.dtype))
            if len(y):
                products = y.index_select(0, row.clamp(min=0)).float() * quantized
                d_weights[:, k] = torch.where(inside, products.sum(-1), 0)
        return d_y[:-1], None, d_weights, None
