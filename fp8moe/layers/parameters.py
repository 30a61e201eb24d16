"""What modules with FP8 parameters share: keeping them FP8 and frozen, and refusing what would not respect that."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fp8moe.runtime.checks import FLOATING


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def keep_dtypes(fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of nn.Module._apply, except that it does not change the dtype of the parameters ``kept``."""
    kept_ids = {id(value) for value in kept}

    def apply(value: Tensor) -> Tensor:
        if id(value) not in kept_ids:
            return fn(value)
        # An empty tensor shows what fn does to the dtype, without casting the whole weight.
        probe = fn(value.new_empty(0))
        return fn(value) if probe.dtype == value.dtype else value.to(probe.device)

    return apply


def dtype_errors(state_dict: dict[str, Tensor], names: Iterable[str], masters: bool, way_out: str) -> list[str]:
    """An error for each entry that cannot be loaded, as copying would convert it to or from FP8 without its scale.

    names: of the module's weights, which are `masters` or in FP8.
    """
    allowed = FLOATING if masters else (torch.float8_e4m3fn,)
    expected = "bfloat16, float16 or float32 for a master weight" if masters else "float8_e4m3fn"
    found = {name: state_dict[name].dtype for name in names if name in state_dict}
    return [
        f"{name}: expected {expected}, got {dtype}; {way_out}" for name, dtype in found.items() if dtype not in allowed
    ]
