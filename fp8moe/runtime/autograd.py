"""Help for operators that autograd records: those without a backward, and masters that are kept for a backward."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class _Kept(NamedTuple):
    """A master that is kept: itself or, if it is computed, a tensor of its shape and dtype and a weak reference."""

    name: str
    tensor: Tensor | None
    version: int = 0
    computed: weakref.ref | None = None


class KeptMasters:
    """The master weights of a call, from its forward to its backward.

    They are not saved tensors: PyTorch's error for a saved tensor that has changed would not name the parameter. The
    backward reads no value of them. Of a master that is computed, such as one with a parametrization, only the shape
    and the dtype are kept, so that the result of the call does not keep it in memory.

    owner: the public name of the layer. masters: by the names of their parameters; None for weights without a master.
    """

    def __init__(self, owner: str, masters: Mapping[str, Tensor | None]):
        self._owner = owner
        self._kept = [self._keep(name, master) for name, master in masters.items()]

    def unchanged(self) -> list[Tensor | None]:
        """Return the masters, or what has their shape. Raises RuntimeError for one that has changed in place."""
        for name, tensor, version, computed in self._kept:
            master = tensor if computed is None else computed()
            if master is not None and master._version != version:
                raise RuntimeError(
                    f"{self._owner}: {name}, shape {tuple(master.shape)}, has been changed in place between forward "
                    "and backward: call the backward before the optimizer's step, or the forward again"
                )
        return [kept.tensor for kept in self._kept]

    def _keep(self, name: str, master: Tensor | None) -> _Kept:
        if master is None:
            return _Kept(name, None)
        plain = type(master) is Tensor and not _transformed() and not hasattr(master, "grad_sum")
        # A view of a parameter is kept, too: it takes no memory, and shows changes of the parameter.
        viewed = master._is_view() and master._base.is_leaf
        if master.is_leaf or viewed or not plain:
            return _Kept(name, master, master._version)
        likeness = torch.empty((), dtype=master.dtype, device=master.device).expand(master.shape)
        return _Kept(name, likeness.requires_grad_(), master._version, weakref.ref(master))


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
