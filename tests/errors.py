"""Errors of results against what is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, in float64."""
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def error_in_its_dtype(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The same against `expected` in the dtype of `actual`: rounding to bfloat16 alone costs 1.7e-3."""
    return relative_error(actual, expected.to(actual.dtype))


def equal_but_for_steps(got, expected):
    """Whether of bfloat16 values >= 99.99%, or all but one, are equal, and the others one step away.

    Where a value is smaller than its row's root mean square, so that what was summed cancels, a step of that.
    """
    values = expected.float()
    size = torch.maximum(values.abs(), values.square().mean(-1, keepdim=True).sqrt())
    step = 2.0 ** (size.log2().floor() - 7)
    few = (got != expected).sum() <= max(1, got.numel() // 10_000)
    return bool(few and ((got.float() - values).abs() <= step).all())


def refused(error: type[Exception], message: str, call: Callable, *arguments: Any, **options: Any) -> None:
    """The call raises this error, with a message that has this pattern."""
    with pytest.raises(error, match=message):
        call(*arguments, **options)
