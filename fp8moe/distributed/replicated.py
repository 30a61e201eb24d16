"""Method replicated: the same tokens are on every rank already; partial sums go to all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8moe.distributed.collectives import all_gather, exchange, ordered_sum, padded, slots
from fp8moe.distributed.packet import Tokens
from fp8moe.distributed.transport import Transport
from fp8moe.quant.formats import ceil_div

# Bytes of partial sums of one rank from which two collectives with fewer bytes beat one. At 200 GB/s, NCCL's on a node,
# 4 MB take the 20 us that it costs to start another.
_SLICED_FROM = 4 << 20


class Replicated(Transport):
    """Every rank adds up the partial sums of all, for all tokens or, where there are many, for a slice of them each."""

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
            return ordered_sum(all_gather(self.group, rows), slots(world, tokens, tokens, rows.device), dtype, residual)
        size = ceil_div(tokens, world)
        received = exchange(self.group, padded(rows, size * world))
        part = ordered_sum(received, slots(world, size, size, rows.device), dtype)
        out = all_gather(self.group, part)[:tokens]
        return out if residual is None else residual + out
