"""What the ranks of a group tell each other before they send data, over a CPU: one wrong call is an error on all."""

from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fp8moe.runtime.checks import FLOATING

# That the call can have a backward, and what wants gradients of it.
GRADIENTS = ("training", "hidden_states", "top_k_weights", "parameters")


class Call(NamedTuple):
    """A rank's call of a layer, in numbers. All but `tokens` must be the same on all ranks.

    wrong: 1 where the arguments fail a check.
    layer: which of the layers that the group shares is called.
    dtype: of hidden_states, its index in `runtime.checks.FLOATING`.
    gradients: a bit for each of `GRADIENTS`.
    """

    tokens: int = 0
    wrong: int = 0
    layer: int = 0
    dtype: int = 0
    top_k: int = 0
    gradients: int = 0


def _gradients(bits: int) -> str:
    return " and ".join(name for bit, name in enumerate(GRADIENTS) if bits >> bit & 1) or "none"


_SAME = {  # what is expected, and how a number is shown
    "layer": ("expected all ranks to call the same layer", "the {}. of those made parallel".format),
    "dtype": ("hidden_states: expected the same dtype on all ranks", FLOATING.__getitem__),
    "top_k": ("top_k_index: expected the same number of experts a token on all ranks", str),
    "gradients": ("expected the same mode and the same gradients on all ranks", _gradients),
}


class Agreement:
    """The exchange of calls among the ranks of a group. `of` makes it once for each group.

    group: the group itself where it serves the CPU over gloo, otherwise a new one with the same ranks that does.
    """

    def __init__(self, group: ProcessGroup):
        self._group = ref(_cpu_group(group))  # lives as long as its group does, and does not keep it alive
        self.world = dist.get_world_size(group)
        self._mine, self._all = torch.zeros(2, self.world, len(Call._fields), dtype=torch.int64)
        self._layers = 0

    @classmethod
    def of(cls, group: ProcessGroup) -> "Agreement":
        """The agreement of this group. The first time all its ranks must ask."""
        if group not in _agreements:
            _agreements[group] = cls(group)
        return _agreements[group]

    @property
    def group(self) -> ProcessGroup:
        return self._group()

    def new_layer(self) -> int:
        """A number for a layer: the same on all ranks, which make their layers in the same order."""
        self._layers += 1
        return self._layers

    def calls(self, call: Call, error: Exception | None = None) -> list[int]:
        """The tokens of every rank; raises the same ValueError on all of them where a call is wrong or differs.

        error: what is wrong with this rank's arguments.
        """
        # Equal rows to all ranks: over gloo an all-to-all takes a third less time than an all-gather.
        self._mine.copy_(torch.tensor(call._replace(wrong=int(error is not None))))
        dist.all_to_all_single(self._all, self._mine, group=self.group)
        rows = self._all.tolist()
        tokens = [row.pop(0) for row in rows]
        if rows != [[0, *call[2:]]] * self.world:
            self.raise_together(error)
            for name, (expected, shown) in _SAME.items():
                column = Call._fields.index(name) - 1
                check_same(expected, [shown(row[column]) for row in rows])
        return tokens

    def raise_together(self, error: Exception | None) -> None:
        """On every rank the same ValueError, if one of them has an error."""
        sentences = self.gather(None if error is None else str(error) or repr(error))
        wrong = [sentence for sentence in sentences if sentence is not None]
        if not wrong:
            return
        if len(wrong) == len(sentences) and len(set(wrong)) == 1:
            raise ValueError(wrong[0]) from error
        raise ValueError("; ".join(f"{ranks}: {text}" for text, ranks in _by_value(sentences) if text)) from error

    def gather(self, value: object) -> list:
        """What each rank gives, in their order."""
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values


_agreements: WeakKeyDictionary[ProcessGroup, Agreement] = WeakKeyDictionary()


def check_same(expected: str, values: list) -> None:
    """ValueError unless the values of all ranks are equal."""
    different = _by_value(values)
    if len(different) > 1:
        raise ValueError(f"{expected}, got {'; '.join(f'{value} on {ranks}' for value, ranks in different)}")


def _by_value(values: Iterable) -> list[tuple[object, str]]:
    """Each value that occurs, with the ranks that have it."""
    holders: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return [(value, f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}") for value, ranks in holders.items()]


def _cpu_group(group: ProcessGroup) -> ProcessGroup:
    if "cpu:gloo" in dist.get_backend_config(group).split(","):
        return group
    # Only the group's own ranks take part, so that every slice of a mesh can make one.
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
