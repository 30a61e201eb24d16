"""Putting the fused forwards in place of a model's own, and back."""

import functools
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

    _modules: list[nn.Module]

    def restore(self) -> None:
        """Give the modules their own forwards back. A second call changes nothing."""
        while self._modules:
            self._modules.pop().__dict__.pop("forward", None)


def optimize(model: nn.Module) -> Optimized:
    """Run the parts of a transformers model that surround its experts in fp8moe's kernels, where it has known code.

    Fused: RMSNorm with the residual before and the FP8 quantization behind it; the projections q, k and v as one GEMM;
    norms of heads, rotary embedding and the new keys' places in the cache; router; gate and up of FP8 feed-forward
    modules as one GEMM with its activation. Modules are known by the code of their forward; what is not known, has
    hooks or has changed runs as before, as does everything while gradients are on or in training mode.

    For that the FP8 weights of projections that read the same input move next to each other; names, values and
    `state_dict()` stay. Where they are moved apart again (`.to()`, loading) they are separate GEMMs.

    Results are rounded as by the model's own operations, with sums in another order. Returns what was changed, in the
    order of the modules; it is empty if no module is known. Its `.restore()` undoes it.
    Raises TypeError for a model that is no module, ValueError for one that is fused already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    found = [(name, module) for name, module in model.named_modules() if "forward" not in module.__dict__]
    for name, module in model.named_modules():
        if is_fused(module):
            raise ValueError(f"model: {name} is fused already; call .restore() of what optimize returned")
    changed, modules = [], []
    for name, module in found:
        if what := _fuse(module):
            changed.append(FusedModule(name, type(module).__name__, what))
            modules.append(module)
    result = Optimized(changed)
    result._modules = modules
    return result


def _fuse(module: nn.Module) -> str | None:
    """Give a module that is known its fused forward, and say what runs there."""
    if layers.recognised(module):
        forward, what = layers.forward, layers.prepare(module)
    elif forms.form_of(module, forms.RMS_NORM):
        forward, what = norms.forward, "norm"
    elif forms.form_of(module, forms.ROUTER):
        forward, what = moe.forward_router, "router"
    else:
        return None
    module.forward = functools.partial(forward, module)
    return what
