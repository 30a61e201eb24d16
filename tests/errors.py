"""Errors of results against what is exact."""

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, in float64."""
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def error_in_its_dtype(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The same against `expected` in the dtype of `actual`: rounding to bfloat16 alone costs 1.7e-3."""
    return relative_error(actual, expected.to(actual.dtype))
