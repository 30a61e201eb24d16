"""The operators of PyTorch's namespace ``fp8moe``, and how each is defined."""

from collections.abc import Callable

import torch

_library = torch.library.Library("fp8moe", "FRAGMENT")


def define(
    schema: str,
    implementation: Callable,
    fake: Callable,
    *,
    forward_only: bool = False,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> torch._ops.OpOverload:
    """Define ``fp8moe::name`` from its schema, ``name(...) -> ...``, and return it.

    implementation: for every device. fake: the same for tensors without data.
    forward_only: it is called by `kernels.autograd.run`, or by what has a backward, so that autograd passes it by.
    backward, setup_context: as for ``torch.library.register_autograd``.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    if forward_only:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fp8moe::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"fp8moe::{name}", backward, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.fp8moe, name).default
