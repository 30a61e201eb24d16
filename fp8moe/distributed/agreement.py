"""Checks across ranks, over gloo on the CPU, before tokens are sent: a wrong call on one rank is an error on all."""

from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fp8moe.runtime.checks import FLOATING

# Names of the bits of `CallSummary.gradients`. "training": the call may have a backward. Every other bit: the operand
# of that name needs a gradient.
GRADIENTS = ("training", "hidden_states", "top_k_weights", "parameters")


class CallSummary(NamedTuple):
    """A summary of one rank's call of a layer, as integers to send to all ranks.

    All fields but `tokens` must be equal on all ranks. wrong: 1 if the arguments fail a check. layer: number of the
    layer, see `Agreement.new_layer`. dtype: index of the dtype of hidden_states in `runtime.checks.FLOATING`.
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


# Maps each field that must be equal on all ranks to the beginning of the error message for it, and to a function that
# formats the field's value.
_SAME = {
    "layer": ("expected all ranks to call the same layer", "the {}. of those made parallel".format),
    "dtype": ("hidden_states: expected the same dtype on all ranks", FLOATING.__getitem__),
    "top_k": ("top_k_index: expected the same number of experts a token on all ranks", str),
    "gradients": ("expected the same mode and the same gradients on all ranks", _gradients),
}


class Agreement:
    """Exchanges summaries of calls between the ranks of a process group. Get it from `Agreement.of(group)`.

    Its attribute `group` is the given group if it has a gloo backend for the CPU, otherwise a new gloo group of the
    same ranks.
    """

    def __init__(self, group: ProcessGroup):
        self._group = ref(_cpu_group(group))  # a weak reference: an agreement does not keep its group alive
        self.world = dist.get_world_size(group)
        self._layers = 0

    @classmethod
    def of(cls, group: ProcessGroup) -> "Agreement":
        """Return the one Agreement of a group. All ranks must make the first call for a group together."""
        if group not in _agreements:
            _agreements[group] = cls(group)
        return _agreements[group]

    @property
    def group(self) -> ProcessGroup:
        return self._group()

    def new_layer(self) -> int:
        """Return the number of a new layer, equal on all ranks if they make their layers in the same order."""
        self._layers += 1
        return self._layers

    def calls(self, call: CallSummary, error: Exception | None = None) -> list[int]:
        """Exchange the ranks' summaries of a call; return the number of tokens of every rank.

        error: the error that the check of this rank's arguments raised, or None.
        Raises the same ValueError on all ranks if any rank passes an error or the ranks' calls differ.
        """
        return Exchange(self, call, error).counts()

    def raise_together(self, error: Exception | None) -> None:
        """Raise the same ValueError on every rank if any rank passes an error."""
        sentences = self.gather(None if error is None else str(error) or repr(error))
        wrong = [sentence for sentence in sentences if sentence is not None]
        if not wrong:
            return
        if len(wrong) == len(sentences) and len(set(wrong)) == 1:
            raise ValueError(wrong[0]) from error
        raise ValueError("; ".join(f"{ranks}: {text}" for text, ranks in _by_value(sentences) if text)) from error

    def gather(self, value: object) -> list:
        """Exchange one picklable value per rank over gloo; return the values of all ranks, in the order of ranks."""
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values


class Exchange:
    """An exchange of the ranks' summaries of a call, under way until `counts` or `check_uniform` is called.

    call, error: as for `Agreement.calls`.
    """

    def __init__(self, agreement: Agreement, call: CallSummary, error: Exception | None = None):
        self._agreement, self._call, self._error = agreement, call, error
        row = call._replace(wrong=int(error is not None))
        mine = torch.tensor([row] * agreement.world, dtype=torch.int64, device="cpu")
        self._all = torch.empty_like(mine)
        # Over gloo, an all-to-all that sends the same row to every rank takes a third less time than an all-gather.
        self._work = dist.all_to_all_single(self._all, mine, group=agreement.group, async_op=True)

    def counts(self) -> list[int]:
        """Wait for all ranks; return and raise as `Agreement.calls`."""
        self._work.wait()
        rows = self._all.tolist()
        tokens = [row.pop(0) for row in rows]
        if rows != [[0, *self._call[2:]]] * len(rows):
            self._agreement.raise_together(self._error)
            for name, (expected, shown) in _SAME.items():
                column = CallSummary._fields.index(name) - 1
                check_same(expected, [shown(row[column]) for row in rows])
        return tokens

    def check_uniform(self) -> None:
        """Wait for all ranks, as `counts`. Raises ValueError also if their numbers of tokens differ."""
        check_same("hidden_states: expected the same number of tokens on all ranks", self.counts())


_agreements: WeakKeyDictionary[ProcessGroup, Agreement] = WeakKeyDictionary()


def check_same(expected: str, values: list) -> None:
    """Raise ValueError unless all values are equal. values: one value of each rank, in the order of ranks.

    expected: beginning of the error message, which then lists the values by rank.
    """
    different = _by_value(values)
    if len(different) > 1:
        raise ValueError(f"{expected}, got {'; '.join(f'{value} on {ranks}' for value, ranks in different)}")


def _by_value(values: Iterable) -> list[tuple[object, str]]:
    """Return (value, "rank 0" or "ranks 0, 2") for each distinct value, given the values in the order of ranks."""
    holders: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return [(value, f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}") for value, ranks in holders.items()]


def _cpu_group(group: ProcessGroup) -> ProcessGroup:
    if "cpu:gloo" in dist.get_backend_config(group).split(","):
        return group
    # use_local_synchronization: only the group's own ranks take part, so each slice of a mesh can make its own group.
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
