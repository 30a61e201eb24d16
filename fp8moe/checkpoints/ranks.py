"""The processes that a model is shared out among: they do the same steps, and if one fails, all do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8moe.layers.parameters import is_sharded


class Ranks:
    """All processes of the default group if one of these tensors is sharded, otherwise this process alone.

    group: for tensors on the CPU; None for this process alone.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._agreement, self.group, self.rank = None, None, 0
        if any(map(is_sharded, tensors)):
            from fp8moe.distributed.agreement import Agreement

            self._agreement = Agreement.of(dist.group.WORLD)
            self.group, self.rank = self._agreement.group, dist.get_rank()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What each of them gives, in their order."""
        return [value] if self._agreement is None else self._agreement.gather(value)

    def check_same(self, expected: str, value: Any) -> None:
        """ValueError on all of them unless all give the same."""
        if self._agreement is not None:
            from fp8moe.distributed.agreement import check_same

            check_same(expected, self.gather(value))

    @contextmanager
    def step(self) -> Iterator[None]:
        """What each does for itself. An error of one of several is the same ValueError on all of them."""
        if self._agreement is None:
            yield
            return
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        self._agreement.raise_together(error)
