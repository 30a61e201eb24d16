"""What modules with FP8 parameters share: parameters that stay FP8 and frozen, whatever is done to the module."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def keep_dtypes(fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of nn.Module._apply, but for the parameters ``kept`` without its change of dtype."""
    kept_ids = {id(value) for value in kept}

    def apply(value: Tensor) -> Tensor:
        if id(value) not in kept_ids:
            return fn(value)
        # What fn does to the dtype shows on an empty tensor, without a cast copy of the whole weight.
        probe = fn(value.new_empty(0))
        return fn(value) if probe.dtype == value.dtype else value.to(probe.device)

    return apply


def not_fp8(state_dict: dict[str, Tensor], names: Iterable[str], way_out: str) -> list[str]:
    """An error for each entry that is not float8_e4m3fn: copying would cast it to FP8 without scaling it."""
    found = ((name, state_dict[name].dtype) for name in names if name in state_dict)
    return [
        f"{name}: expected float8_e4m3fn, got {dtype}; {way_out}"
        for name, dtype in found
        if dtype != torch.float8_e4m3fn
    ]
