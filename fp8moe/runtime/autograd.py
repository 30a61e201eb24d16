"""Operators without a backward: the forward accepts inputs that require gradients, the backward raises an error."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8moe.runtime.operator import define


def run(op, name: str, *args) -> Any:
    """Return ``op(*args)``; if gradients are recorded, the backward of the result raises RuntimeError."""
    check_derivatives(name, *args)
    if recorded(*args):
        if _transformed():
            raise RuntimeError(f"{name} has no gradients under torch.func or vmap; its arguments must not require any")
        return _ForwardOnly.apply(op, name, *args)
    return op(*args)


def recorded(*values: object) -> bool:
    """Return whether autograd records operations on any of these values, also if vmap has wrapped the tensor."""
    if not torch.is_grad_enabled():
        return False
    for value in values:  # a loop takes half the time of any()
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return _transformed() and any(isinstance(value, Tensor) and _innermost(value).requires_grad for value in values)


def detached(value: Tensor) -> Tensor:
    """Return `value`, detached if autograd records it: an operation without a derivative can then take it as input."""
    return value.detach() if recorded(value) else value


def check_derivatives(name: str, *values: object) -> None:
    """Raise RuntimeError if a value has, or may have, a forward-mode tangent, or if torch.func differentiates it."""
    forward_mode = forward_ad._current_level >= 0
    if not (forward_mode or _transformed()):
        return
    tensors = [value for value in values if isinstance(value, Tensor)]
    if forward_mode and (torch.compiler.is_compiling() or any(map(_may_have_tangent, tensors))):
        raise RuntimeError(f"{name} has no forward-mode derivative (torch.func.jvp); use backward")
    if any(map(_tracked, tensors)):
        raise RuntimeError(f"{name} has no derivative under torch.func (grad, vjp, jacrev); use backward")


def check_out(name: str, arguments: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError if autograd or a torch.func transform would miss a write to ``out``, one of `tensors`."""
    check_derivatives(name, *tensors)
    if _transformed() and any(_wrapped(value) for value in tensors if value is not None):
        raise RuntimeError(f"{name}: out= does not work under torch.func or vmap; call it without out")
    if recorded(*tensors):
        argument = next(argument for argument, value in zip(arguments, tensors, strict=True) if recorded(value))
        raise RuntimeError(f"{name}: out= has no automatic differentiation, but {argument} requires a gradient")


def _transformed() -> bool:
    """Return whether a transform of torch.func, such as grad or vmap, is running."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _wrapped(value: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def _may_have_tangent(value: Tensor) -> bool:
    # unpack_dual sees only tangents of the innermost jvp call; tensors of the outer calls are wrapped.
    return _wrapped(value) or forward_ad.unpack_dual(value).tangent is not None


def _innermost(value: Tensor) -> Tensor:
    while _wrapped(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def _tracked(value: Tensor) -> bool:
    while _wrapped(value):
        if torch._C._functorch.is_gradtrackingtensor(value):
            return True
        value = torch._C._functorch.get_unwrapped(value)
    return False


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, name, *args):
        ctx.name = name
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        results = op(*args)
        return tuple(results) if isinstance(results, list) else results  # autograd.Function finds no tensors in a list

    @staticmethod
    def backward(ctx, grad, *_):
        # Raise within an operator, not here: torch.compile traces this method together with the forward.
        needed = ctx.needs_input_grad[2:]
        inputs = [arg for arg, need in zip(ctx.saved_tensors, needed, strict=True) if need]
        grads = iter(torch.ops.fp8moe.no_backward(grad, inputs, ctx.name))
        return None, None, *(next(grads) if need else None for need in needed)


def _no_backward(grad: Tensor, inputs: list[Tensor], name: str) -> list[Tensor]:
    raise RuntimeError(
        f"{name} has no backward: it computes the forward pass only. Call it under torch.no_grad(), or with inputs and "
        "parameters that do not require gradients."
    )


define(
    "no_backward(Tensor grad, Tensor[] inputs, str name) -> Tensor[]",
    _no_backward,
    lambda grad, inputs, name: [torch.empty_like(value) for value in inputs],
)
