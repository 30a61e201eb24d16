"""Operations without a backward: the forward takes inputs that require gradients, a backward says there is none."""

import torch
from torch import Tensor

from fp8moe.runtime.operators import define


def run(op, name: str, *args) -> Tensor:
    """``op(*args)``; where gradients are being recorded, with a result whose backward raises RuntimeError."""
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return _ForwardOnly.apply(op, name, *args)
    return op(*args)


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, name, *args):
        ctx.name = name
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        return op(*args)

    @staticmethod
    def backward(ctx, grad):
        # An operator raises, not this method, which torch.compile traces together with the forward.
        needed = ctx.needs_input_grad[2:]
        inputs = [arg for arg, need in zip(ctx.saved_tensors, needed, strict=True) if need]
        grads = iter(torch.ops.fp8moe.no_backward(grad, inputs, ctx.name))
        return None, None, *(next(grads) if need else None for need in needed)


def _no_backward(grad: Tensor, inputs: list[Tensor], name: str) -> list[Tensor]:
    raise RuntimeError(
        f"{name} has no backward: it computes the forward pass only. Call it under torch.no_grad(), or with inputs and "
        "parameters that do not require gradients."
    )


def _no_backward_fake(grad: Tensor, inputs: list[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(value) for value in inputs]


define("no_backward(Tensor grad, Tensor[] inputs, str name) -> Tensor[]", _no_backward, _no_backward_fake)
