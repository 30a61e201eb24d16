"""Brings the tensors of a model that is shared out among processes together on the first of them, piece by piece."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fp8moe.checkpoints.entries import Entry
from fp8moe.checkpoints.ranks import Ranks
from fp8moe.checkpoints.sharding import Box, held, inside, overlap
from fp8moe.layers.parameters import is_sharded


class Collector:
    """Who holds what of these tensors. All processes must make one, and then collect the same.

    Of several that hold the same, the first sends it. What is not sharded is the first process's own.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks):
        self._ranks = ranks
        self._held = {name: held(tensor) for name, tensor in tensors.items()}
        self._senders: dict[str, dict[Box, int]] = {name: {box: 0} for name, (_, box) in self._held.items()}
        sharded = [name for name, tensor in tensors.items() if is_sharded(tensor)]
        boxes = ranks.gather([self._held[name][1] for name in sharded])
        for name, own_boxes in zip(sharded, zip(*boxes, strict=True), strict=True):
            senders = self._senders[name] = {}
            for rank, box in enumerate(own_boxes):
                senders.setdefault(box, rank)

    def collect(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Tensor]]:
        """The slices of these entries, on the CPU: on the first process, the others get none.

        Memory holds one of them and a part of it that is received. A process that cannot read a part sends something,
        so that no other waits for it, and raises its error behind the last.
        """
        errors: list[Exception] = []
        for entry in entries:
            for box in entry.slices:
                value = self._slice(entry.source, box, errors)
                if value is not None:
                    yield entry, value
        for error in errors:
            raise error

    def _slice(self, source: str, box: Box, errors: list[Exception]) -> Tensor | None:
        rank, first, group = self._ranks.rank, self._ranks.first, self._ranks.group
        local, own_box = self._held[source]
        value = None
        for held_box, sender in self._senders[source].items():
            part = overlap(box, held_box)
            if not all(part) or rank not in (0, sender):
                continue
            piece = torch.empty(tuple(map(len, part)), dtype=local.dtype)
            if sender == rank:
                try:
                    piece = local[inside(part, own_box)].detach().cpu()
                except Exception as error:
                    errors.append(error)
            if not first:
                dist.send(_bytes(piece), 0, group)
                continue
            if sender != rank:
                dist.recv(_bytes(piece), sender, group)
            if part == box:
                return piece
            value = torch.empty(tuple(map(len, box)), dtype=local.dtype) if value is None else value
            value[inside(part, box)].copy_(piece)
        return value


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
