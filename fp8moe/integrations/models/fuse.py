"""Putting the fused forwards in place of a model's own, and back."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from fp8moe.integrations.models import forms, layers, moe, norms
from fp8moe.integrations.models.hooks import is_fused


class FusedModule(NamedTuple):
    """name: its path in the model. module_class: the name of its class. what: that runs in fp8moe's kernels now."""

    name: str
    module_class: str
    what: str


class Optimized(tuple[FusedModule, ...]):
    """What `optimize` changed, module by module."""

    _forwards: list[tuple[nn.Module, Callable]]

    def restore(self) -> None:
        """Give the modules their own forwards back. A second call changes nothing."""
        for module, forward in self._forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within it the modules run what `find_fused` found for them, if they do not run something else already."""
        for module, forward in self._forwards:
            module.__dict__.setdefault("forward", forward)
        try:
            yield
        finally:
            self.restore()


def optimize(model: nn.Module) -> Optimized:
    """Run the parts of a transformers model that surround its experts in fp8moe's kernels, where it has known code.

    Fused: RMSNorm with the residual before and the FP8 quantization behind it; the projections q, k and v as one GEMM;
    norms of heads, rotary embedding and the new keys' places in the cache; MLA's attention of one new token; router;
    gate and up of FP8 feed-forward modules as one GEMM with its activation. Modules are known by the code of their
    forward; what is not known, has hooks or has changed runs as before, as does everything while gradients are on or in
    training mode.

    For that the FP8 weights of projections that read the same input move next to each other; names, values and
    `state_dict()` stay. Where they are moved apart again (`.to()`, loading) they are separate GEMMs.

    Results are rounded as by the model's own operations, with sums in another order. Returns what was changed, in the
    order of the modules; it is empty if no module is known. Its `.restore()` undoes it.
    Raises TypeError for a model that is no module, ValueError for one that is fused already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if is_fused(module):
            raise ValueError(f"model: {name} is fused already; call .restore() of what optimize returned")
    found = find_fused(model)
    for module, forward in found._forwards:
        module.forward = forward
    return found


def find_fused(model: nn.Module) -> Optimized:
    """What `optimize` would change; weights move together, forwards stay."""
    changed: list[FusedModule] = []
    forwards: list[tuple[nn.Module, Callable]] = []
    for name, module in model.named_modules():
        known = None if "forward" in module.__dict__ else _fused_form(module)
        if known is not None:
            forward, what = known
            changed.append(FusedModule(name, type(module).__name__, what))
            forwards.append((module, functools.partial(forward, module)))
    result = Optimized(changed)
    result._forwards = forwards
    return result


def _fused_form(module: nn.Module) -> tuple[Callable, str] | None:
    """The fused forward of a module that is known, and what runs there."""
    if layers.recognised(module):
        return layers.forward, layers.prepare(module)
    if forms.form_of(module, forms.RMS_NORM):
        return norms.forward, "norm"
    if forms.form_of(module, forms.ROUTER):
        return moe.forward_router, "router"
    return None
