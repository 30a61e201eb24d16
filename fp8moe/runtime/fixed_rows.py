"""Batch invariance of functions of other libraries, such as F.linear: always call them with the same number of rows.

For a different number of rows, a library may add up the same values in a different order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp8moe.runtime import config

ROWS = 128  # decoding reads the weights, which takes longer than this many rows; prompts read them once for each


def by_fixed_rows(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Return ``function(x, *others)``, computed for `ROWS` rows at a time in batch-invariant mode.

    x, others: (M, ...). Row i of the result (M, ...) must depend only on row i of each operand. The last chunk of rows
    is padded with zeros.
    """
    count = len(x)
    if not config.settings.batch_invariant or not count:
        return function(x, *others)
    if count <= ROWS:
        return function(*map(_filled, (x, *others)))[:count]
    out = None
    for first in range(0, count, ROWS):
        piece = function(*(_filled(operand[first : first + ROWS]) for operand in (x, *others)))
        out = piece.new_empty(count, *piece.shape[1:]) if out is None else out
        out[first : first + ROWS] = piece[: count - first]
    return out


def _filled(x: Tensor) -> Tensor:
    if len(x) == ROWS:
        return x
    filled = x.new_zeros((ROWS, *x.shape[1:]))
    filled[: len(x)] = x
    return filled


def linears_by_fixed_rows() -> AbstractContextManager[Any]:
    """Return a context manager in which F.linear, which unquantized modules call, runs through `by_fixed_rows`.

    Outside of batch-invariant mode, the context manager does nothing.
    """
    return _LinearsByFixedRows() if config.settings.batch_invariant else nullcontext()


class _LinearsByFixedRows(TorchFunctionMode):
    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        return _linear(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = by_fixed_rows(lambda x: F.linear(x, weight, bias), input.reshape(-1, input.shape[-1]))
    return rows.view(*input.shape[:-1], len(weight))
