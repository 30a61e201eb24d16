"""Models that are shared out among processes: which part of each tensor this one holds, as boxes of the whole."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fp8moe.layers.parameters import is_sharded, local

Box = tuple[range, ...]
"""A part of a tensor: a range for each dimension. It is empty unless ``all(box)``."""


def whole(shape: Iterable[int]) -> Box:
    return tuple(map(range, shape))


@torch.no_grad()
def held(tensor: Tensor) -> tuple[Tensor, Box]:
    """The memory that this process has of a tensor, and the box of the tensor that is in it."""
    if not is_sharded(tensor):
        return tensor, whole(tensor.shape)
    chunks = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks for
    box = tuple(range(first, first + size) for first, size in zip(chunks[0].offsets, chunks[0].sizes, strict=True))
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
