"""Whether a module runs nothing but the forward that its code says, and as it says."""

import functools

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_pre_hooks", "_backward_pre_hooks", "_backward_hooks")


def runs_as_written(module: nn.Module) -> bool:
    """Whether it has no hooks, and the forward of its class or one that `optimize` gave it.

    transformers leaves hooks behind that record outputs; they count while a call asks for these.
    """
    own = module.__dict__
    if ("forward" in own and not is_fused(module)) or any(own[kind] for kind in _HOOKS):
        return False
    return all(map(_is_idle, own["_forward_hooks"].values()))


def is_cast(weight: Tensor) -> bool:
    """Whether torch.autocast has the module of this weight run in another dtype."""
    kind = weight.device.type
    return not weight.is_meta and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != weight.dtype


def is_fused(module: nn.Module) -> bool:
    """Whether its forward is one of ours, put there by `optimize`."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func.__module__.startswith(__package__)


def _is_idle(hook) -> bool:
    from transformers.utils import output_capturing

    recorder = hook.__module__ == output_capturing.__name__ and hook.__name__ == "output_capturing_hook"
    return recorder and output_capturing._active_collector.get() is None
