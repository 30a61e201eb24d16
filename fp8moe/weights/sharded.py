"""Models whose tensors are sharded among processes: the part of each that this one holds, and steps done together."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe.layers.parameters import is_sharded, local

Box = tuple[range, ...]
"""A part of a tensor: a range for each dimension. It is empty unless ``all(box)``."""


def whole(shape: Iterable[int]) -> Box:
    return tuple(map(range, shape))


def held(tensor: Tensor) -> tuple[Tensor, Box]:
    """The memory that this process has of a tensor, and the box of the tensor that is in it."""
    if not is_sharded(tensor):
        return tensor, whole(tensor.shape)
    chunks = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks for
    box = tuple(range(first, first + size) for first, size in zip(chunks[0].offsets, chunks[0].sizes, strict=True))
    with torch.no_grad():
        return local(tensor), box


def overlap(box: Box, other: Box) -> Box:
    """The box that is in both."""
    starts = (max(a.start, b.start) for a, b in zip(box, other, strict=True))
    stops = (min(a.stop, b.stop) for a, b in zip(box, other, strict=True))
    return tuple(range(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of a box in the tensor that has the values of ``outer``, a box around it."""
    return tuple(slice(own.start - base.start, own.stop - base.start) for own, base in zip(box, outer, strict=True))


def class_of(model: nn.Module) -> type[nn.Module]:
    """The class that a model had before fully_shard made it one of FSDP2's."""
    if not torch.distributed.is_available():
        return type(model)
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


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
        """The value of each of them, in their order."""
        return [value] if self._agreement is None else self._agreement.gather(value)

    def check_same(self, expected: str, value: Any) -> None:
        """Raise ValueError on all of them unless all give the same."""
        if self._agreement is not None:
            from fp8moe.distributed.agreement import check_same

            check_same(expected, self.gather(value))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Raise an error that one of several processes meets within the block as the same ValueError on all."""
        if self._agreement is None:
            yield
            return
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        self._agreement.raise_together(error)
