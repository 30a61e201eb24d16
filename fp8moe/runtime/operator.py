"""The operators of PyTorch's namespace ``fp8moe``: `operator` declares one with all that belongs to it."""

from collections.abc import Callable
from typing import Any

import torch

from fp8moe.runtime.backend import use_cuda

_library = torch.library.Library("fp8moe", "FRAGMENT")


def operator(
    schema: str,
    *,
    check: Callable[..., object],
    cuda: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    quick: Callable[..., Callable[..., Any] | None] | None = None,
    forward_only: bool = False,
) -> torch._ops.OpOverload:
    """Define ``fp8moe::name``, an operation with two backends, and return it.

    schema: ``name(...) -> ...``. Its first argument is a tensor, whose device decides the backend. All that follow get
        the operator's arguments, those at their defaults left out.
    check: raises for arguments that are wrong. It does not read addresses, as fake tensors have none.
    cuda: launches the kernels. reference: computes the result in plain PyTorch. Both return what the schema says.
    fake: returns uninitialized results, of fake tensors too.
    quick: returns what to call in place of all these if arguments of this layout have run before, otherwise None.
    forward_only: it is called by `runtime.autograd.run`, or by what has a backward, so that autograd passes it by.
    """

    def run(first: torch.Tensor, *others: Any) -> Any:
        if quick is not None:
            ready = quick(first, *others)
            if ready is not None:
                return ready(first, *others)
        check(first, *others)
        return (cuda if use_cuda(first) else reference)(first, *others)

    def run_fake(*operands: Any) -> Any:
        check(*operands)
        return fake(*operands)

    return define(schema, run, run_fake, forward_only=forward_only)


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    forward_only: bool = False,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define ``fp8moe::name`` from one implementation for every device, such as one made of other operators.

    fake: the implementation for tensors without data.
    backward, setup_context: as for ``torch.library.register_autograd``. schema, forward_only: as for `operator`.
    """
    name, _, _ = schema.partition("(")
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    if forward_only:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fp8moe::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"fp8moe::{name}", backward, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.fp8moe, name).default
