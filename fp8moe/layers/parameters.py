"""What modules with FP8 parameters share: keeping them FP8 and frozen, and refusing what would not respect that.

Parameters may be DTensors: their shards are told by `to_local`, which needs no part of torch.distributed.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fp8moe.runtime.checks import FLOATING


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def local(value: Tensor) -> Tensor:
    """The part of a DTensor that is on this rank, to which gradients of the DTensor come back; other tensors as is."""
    return value.to_local() if is_sharded(value) else value


def is_sharded(value: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(value, "to_local")


def check_not_sharded(name: str, value: Tensor) -> None:
    """ValueError for a DTensor: what a rank holds of it need not be whole blocks."""
    if is_sharded(value):
        raise ValueError(f"{name}: expected a whole weight to quantize, got a DTensor with {value.placements}")


def keep_dtypes(fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of nn.Module._apply, except that it does not change the dtype of the parameters ``kept``."""
    kept_ids = {id(value) for value in kept}

    def apply(value: Tensor) -> Tensor:
        if id(value) not in kept_ids:
            return fn(value)
        # An empty tensor shows what fn does to the dtype, without casting the whole weight.
        probe = fn(local(value).new_empty(0))
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
