"""What modules with FP8 parameters share: keeping them FP8 and frozen, and refusing what would not respect that."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

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


def check_no_tangent(*values: Tensor | None) -> None:
    """RuntimeError for a value that has a tangent, or may have one: the operators would silently drop it."""
    if forward_ad._current_level < 0:  # outside of forward-mode differentiation
        return
    if torch.compiler.is_compiling() or any(value is not None and _may_have_tangent(value) for value in values):
        raise RuntimeError("FP8 layers have no forward-mode derivative (torch.func.jvp); use backward, or vjp")


def _may_have_tangent(value: Tensor) -> bool:
    # Only the innermost of nested jvp can be asked for tangents; values of the outer ones are wrapped.
    return torch._C._functorch.is_functorch_wrapped_tensor(value) or forward_ad.unpack_dual(value).tangent is not None


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
