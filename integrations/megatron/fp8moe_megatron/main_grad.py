"""What experts and linears share: gradients summed into Megatron's ``main_grad``, and FP8 copies made anew."""

from typing import Any

import torch
from torch import Tensor

from fp8moe.layers import MasterModule, invalidate_masters


class Trained(MasterModule):
    """Base class of modules whose parameters are masters of Megatron's ``params_dtype``."""

    trainable = True

    @property
    def is_first_microbatch(self) -> bool:
        """Whether the next call is a step's first. Megatron's schedules set this to True at the start of each step."""
        return self.__dict__.get("_is_first_microbatch", True)

    @is_first_microbatch.setter
    def is_first_microbatch(self, value: bool) -> None:
        # A rank whose part of the distributed optimizer is empty makes no step; its weights change in an all-gather.
        if value:
            invalidate_masters()
        self.__dict__["_is_first_microbatch"] = value


class _MainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.new_empty((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        weight = ctx.weight
        weight.grad_added_to_main_grad = True
        # Megatron's hook runs where autograd has a gradient; it ignores the values, unless zero_out_wgrad is set.
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)


def with_main_grad(weight: Tensor) -> Tensor:
    """Return what stands for a weight as the master of a training operator: it has the weight's shape, and no values.

    The kernel adds its gradient, float32, to ``weight.main_grad``. It does not copy in a step's first micro-batch, as
    nothing says surely that main_grad is zero: Megatron's hook adds other gradients without setting
    grad_added_to_main_grad, and a CUDA graph would copy in each micro-batch. Returns the weight itself where Megatron's
    DistributedDataParallel has not given it a main_grad, or where no gradients are recorded.
    """
    if not (weight.requires_grad and torch.is_grad_enabled() and hasattr(weight, "grad_added_to_main_grad")):
        return weight
    if hasattr(weight, "__fsdp_param__"):
        raise NotImplementedError("fp8moe_megatron: Megatron-FSDP is not supported; use DistributedDataParallel")
    standing = _MainGrad.apply(weight)
    standing.grad_sum = weight.main_grad
    return standing


def refuse(owner: str, config: Any, reasons: dict[str, object]) -> None:
    """Raise NotImplementedError if a field of the config is set to anything but the value given (or is missing)."""
    for name, expected in reasons.items():
        value = getattr(config, name, expected)
        if value != expected and (value or expected):
            raise NotImplementedError(f"{owner}: {name}={value!r} is not supported; set it to {expected!r}")
