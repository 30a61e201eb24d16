"""Method gather: every rank gets all tokens; partial sums go back to the ranks of the tokens."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8moe.distributed.collectives import all_gather, exchange, ordered_sum, padded, slots
from fp8moe.distributed.transport import Transport


class Gather(Transport):
    """Two collectives whose sizes the host knows: W times the tokens of the rank that has most, there and back."""

    def __init__(self, group: ProcessGroup, tokens: list[int]):
        self.group = group
        self.room = max(tokens)
        self.tokens = tokens[dist.get_rank(group)]

    def out(self, rows: Tensor) -> Tensor:
        return all_gather(self.group, padded(rows, self.room))

    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        places = slots(dist.get_world_size(self.group), self.room, self.tokens, rows.device)
        return ordered_sum(exchange(self.group, rows), places, dtype, residual)
