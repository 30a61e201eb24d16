"""What modules with FP8 parameters share: parameters that stay FP8 and frozen, whatever is done to the module."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


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


def check_no_tangent(*values: Tensor | None) -> None:
    """RuntimeError for a value with a tangent, or that may have one: operators would drop it without a word."""
    if forward_ad._current_level < 0:  # outside of forward-mode differentiation
        return
    if torch.compiler.is_compiling() or any(value is not None and _may_have_tangent(value) for value in values):
        raise RuntimeError("FP8 layers have no forward-mode derivative (torch.func.jvp); use backward, or vjp")


def _may_have_tangent(value: Tensor) -> bool:
    # Of nested jvp only the innermost can be asked; values of the others are wrapped.
    return torch._C._functorch.is_functorch_wrapped_tensor(value) or forward_ad.unpack_dual(value).tangent is not None


def not_fp8(state_dict: dict[str, Tensor], names: Iterable[str], way_out: str) -> list[str]:
    """An error for each entry that is not float8_e4m3fn: copying would cast it to FP8 without scaling it."""
    found = ((name, state_dict[name].dtype) for name in names if name in state_dict)
    return [
        f"{name}: expected float8_e4m3fn, got {dtype}; {way_out}"
        for name, dtype in found
        if dtype != torch.float8_e4m3fn
    ]
