"""Method all_to_all: each token goes once to every rank that has experts of it. The host reads sizes: no CUDA graph."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8moe.distributed.collectives import exchange, ordered_sum
from fp8moe.distributed.transport import Transport
from fp8moe.kernels.experts.routing import sort_by_expert


class AllToAll(Transport):
    """Two collectives of as many rows as there are pairs of a token and a rank, after one of their numbers.

    pair_places: (T, K) int32, where each assignment's row is in what `pairs_back` of `Pairs` returns.
    """

    def __init__(self, group: ProcessGroup, top_k_index: Tensor, num_experts: int):
        self.group = group
        world = dist.get_world_size(group)
        self.room = len(top_k_index)
        ranks = owners(top_k_index, num_experts, world)
        pairs, self.pair_places = sort_by_expert(ranks, world)
        needed = torch.zeros(len(ranks), world + 1, dtype=torch.bool, device=ranks.device)
        needed.scatter_(1, torch.where(ranks >= 0, ranks, world), True)
        each = torch.arange(world, device=ranks.device)
        tokens, self.places = sort_by_expert(torch.where(needed[:, :world], each, -1), world)
        numbers = torch.stack([tokens.diff(), pairs.diff()], dim=1)
        numbers = torch.cat([numbers, exchange(group, numbers)], dim=1)
        self.sent, self.pairs_sent, self.received, self.pairs_received = numbers.t().tolist()
        self.rows = sum(self.pairs_received)

    def out(self, rows: Tensor) -> Tensor:
        tokens = inverse(self.places, sum(self.sent)).div(self.places.shape[1], rounding_mode="floor")
        return exchange(self.group, rows.index_select(0, tokens), self.sent, self.received)

    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        received = exchange(self.group, rows, self.received, self.sent)
        return ordered_sum(received, self.places, dtype, residual)


def owners(top_k_index: Tensor, num_experts: int, world: int) -> Tensor:
    """The rank that has the expert of each assignment, (T, K) int64; -1 for none."""
    index = top_k_index.long()
    inside = (index >= 0) & (index < num_experts)
    return torch.where(inside, index.div(num_experts // world, rounding_mode="floor"), -1)


def inverse(places: Tensor, count: int) -> Tensor:
    """For each of `count` rows the place among places, flattened, that holds it: (count,) int64; 0 where none does."""
    flat = torch.where(places >= 0, places, count).flatten().long()
    order = torch.arange(flat.numel(), device=flat.device)
    return order.new_zeros(count + 1).scatter_(0, flat, order)[:count]
