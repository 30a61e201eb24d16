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
    def forward(ctx, weight: Tensor, by_kernel: bool) -> Tensor:
        ctx.weight, ctx.by_kernel = weight, by_kernel
        return weight.new_empty((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        weight = ctx.weight
        if not ctx.by_kernel:
            weight.main_grad.add_(grad)
        weight.grad_added_to_main_grad = True
        # Megatron's hook runs where autograd has a gradient; it ignores the values, unless zero_out_wgrad is set.
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight), None


def with_main_grad(weight: Tensor) -> Tensor:
    """Return what stands for a weight as the master of a training operator: it has the weight's shape, and no values.

    The kernel adds its gradient to a float32 ``weight.main_grad``; autograd does where that has another dtype, and in a
    compiled graph, which does not see `grad_sum`. Neither copies in a step's first micro-batch, as
    nothing says surely that main_grad is zero: Megatron's hook adds other gradients without setting
    grad_added_to_main_grad, and a CUDA graph would copy in each micro-batch. Returns the weight itself where Megatron's
    DistributedDataParallel has not given it a main_grad, or where no gradients are recorded.
    """
    if not (weight.requires_grad and torch.is_grad_enabled() and hasattr(weight, "grad_added_to_main_grad")):
        return weight
    if hasattr(weight, "__fsdp_param__"):
        raise NotImplementedError("fp8moe_megatron: Megatron-FSDP is not supported; use DistributedDataParallel")
    by_kernel = weight.main_grad.dtype == torch.float32 and not torch.compiler.is_compiling()
    standing = _MainGrad.apply(weight, by_kernel)
    if by_kernel:
        standing.grad_sum = weight.main_grad
    return standing


def refuse(owner: str, config: Any, reasons: dict[str, object]) -> None:
    """Raise NotImplementedError if a field of the config is set to anything but the value given (or is missing)."""
    for name, expected in reasons.items():
        value = getattr(config, name, expected)
        if value != expected and (value or expected):
            raise NotImplementedError(f"{owner}: {name}={value!r} is not supported; set it to {expected!r}")
