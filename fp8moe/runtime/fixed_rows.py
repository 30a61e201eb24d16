"""Batch invariance of what libraries compute, which take another algorithm, with sums in another order, for another
number of rows: they always get the same number of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp8moe.runtime import config

ROWS = 64


def by_fixed_rows(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """``function(x, *others)`` where results are to be batch invariant, of `ROWS` rows at a time; otherwise as it is.

    x, others: (M, ...), of which row i of the result (M, ...) depends on row i. The last piece is filled up with zeros.
    """
    count = len(x)
    if not config.settings.batch_invariant or not count:
        return function(x, *others)
    pieces = [
        function(*(_filled(operand[first : first + ROWS]) for operand in (x, *others)))
        for first in range(0, count, ROWS)
    ]
    return torch.cat(pieces)[:count]


def _filled(x: Tensor) -> Tensor:
    if len(x) == ROWS:
        return x
    filled = x.new_zeros((ROWS, *x.shape[1:]))
    filled[: len(x)] = x
    return filled


@contextmanager
def linears_by_fixed_rows() -> Iterator[None]:
    """Within it F.linear, of modules that are not in FP8, is batch invariant if results are to be."""
    if not config.settings.batch_invariant:
        yield
        return
    with _LinearsByFixedRows():
        yield


class _LinearsByFixedRows(TorchFunctionMode):
    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        return _linear(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = by_fixed_rows(lambda x: F.linear(x, weight, bias), input.reshape(-1, input.shape[-1]))
    return rows.view(*input.shape[:-1], len(weight))
