"""transformers' experts on GroupedExperts: the implementation of experts that `register` adds."""

import functools
import gc
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.kernels.decoder_ops.rms_norm import Normed
from fp8moe.kernels.experts.operands import Norm
from fp8moe.layers import experts_source
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.master import Fingerprint
from fp8moe.layers.parameters import local
from fp8moe.quant.formats import BLOCK
from fp8moe.runtime import autograd

NAME = "fp8moe"
"""The name in transformers of fp8moe's experts, of its expert parallelism and of its quantization method."""

BOUND = ("forward", "_old_forward")
"""Attributes that hold the bound forward of a module that accelerate has hooked: once unhooked, and while hooked."""


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    residual: Tensor | None = None,
    groups: Tensor | None = None,
    rows: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor | tuple[Tensor, Normed | None]:
    """Run an experts module of transformers, whose forward calls this, with the arguments of `GroupedExperts.forward`.

    ``self`` may hold the experts of one rank only. Where `fp8moe.distributed.ExpertParallel` has spread them, arguments
    and result are those of all experts. Otherwise experts of other ranks have an index outside the range, as
    transformers gives them the index num_experts, and add nothing.
    """
    layer = cached_layer(self)
    # The layer is frozen: a backward must say that weights which require gradients get none.
    trained = [weight for weight in _weights(self) if weight.requires_grad]
    if not trained:
        inputs, order = (hidden_states, top_k_index, top_k_weights), {"groups": groups, "rows": rows}
        if norm is None:
            return layer(*inputs, residual=residual, **order)
        return layer.forward_with_norm(*inputs, norm, residual=residual, **order)
    name = (
        f"experts_implementation={NAME!r} of {type(self).__name__} (to train its weights, put "
        "GroupedExperts.from_experts(module, master_dtype=...) in its place)"
    )
    inputs = (hidden_states, top_k_index, top_k_weights)
    out = autograd.run(lambda *args: layer(*args[: len(inputs)]), name, *inputs, *trained)
    out = out if residual is None else residual + out
    return out if norm is None else (out, None)


def keep_forwards() -> None:
    """Bind `experts_forward` to every experts module that has chosen it: they run on fp8moe without transformers.

    Forwards of the class that accelerate has bound to a module are replaced likewise.
    """
    for module in [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]:
        if "is_transposed" not in vars(module) or chosen_implementation(module) != NAME:
            continue
        bound = {name: vars(module)[name] for name in BOUND if name in vars(module)} or {"forward": None}
        for name, forward in bound.items():
            if forward is None or (isinstance(forward, MethodType) and forward.__func__ is type(module).forward):
                setattr(module, name, functools.partial(_kept_forward, module))


def is_kept(module: nn.Module) -> bool:
    """Return whether the module's own forward is the one that `keep_forwards` gave it."""
    return getattr(vars(module).get("forward"), "func", None) is _kept_forward


def _kept_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run an experts module of transformers on fp8moe as long as its configuration says so."""
    return (
        experts_forward(module, *args, **kwargs)
        if chosen_implementation(module) == NAME
        else type(module).forward(module, *args, **kwargs)
    )


def chosen_implementation(module: nn.Module) -> str | None:
    """Return the experts_implementation of a model or an experts module."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def cached_layer(module: nn.Module) -> GroupedExperts:
    """Return the frozen layer that is cached beside an experts module, made anew when the weights have changed."""
    cached = module.__dict__.get("_fp8moe")
    # A compiled forward cannot tell whether weights have changed: it uses the copy that the last eager call has left.
    if cached is None or cached.layer is None or not (torch.compiler.is_compiling() or cached.is_of(module)):
        cached = module.__dict__["_fp8moe"] = None  # frees the old copy before there is a new one
        cached = module.__dict__["_fp8moe"] = _make_cached(module)
    return cached.layer


def refresh(module: nn.Module) -> None:
    """Bring the layer that is cached beside a module up to date, in its own memory, which graphs may read.

    Call it under torch.no_grad.
    """
    cached = module.__dict__.get("_fp8moe")
    if cached is None or cached.layer is None or cached.is_of(module):
        return
    for old, new in zip(cached.layer.parameters(), grouped_experts(module).parameters(), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    cached.weights = Fingerprint(_weights(module))


class _CachedLayer:
    """A GroupedExperts beside the module that it was made from. Copies and files of that module leave it out."""

    def __init__(self, layer: GroupedExperts | None = None, weights: Fingerprint | None = None):
        self.layer = layer
        self.weights = weights

    def is_of(self, module: nn.Module) -> bool:
        """Return whether the layer was made from the module's weights, as far as their addresses and versions show.

        Weights may be exchanged for an evaluation without a trace: a layer of another mode counts as outdated.
        """
        same_mode = self.layer is not None and self.layer.training == module.training
        return same_mode and self.weights is not None and self.weights.matches(_weights(module))

    def __reduce__(self):
        return _CachedLayer, ()


def _weights(module: nn.Module) -> list[Tensor]:
    return [value for value in module._parameters.values() if value is not None]


@torch.compiler.disable
def _make_cached(module: nn.Module) -> _CachedLayer:
    return _CachedLayer(grouped_experts(module), Fingerprint(_weights(module)))


def refusal(module: nn.Module) -> str | None:
    """Say why `grouped_experts` refuses the module, or None. Reads no weights: tries a twin without data."""
    try:
        grouped_experts(_without_data(module))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@torch.inference_mode(False)
@torch.no_grad()
def grouped_experts(module: nn.Module) -> GroupedExperts:
    """Make a frozen layer of the experts that are on this rank."""
    try:
        if getattr(module, "block_size", ()) is None:
            raise ValueError(f"module: one scale per tensor; expected blocks of {BLOCK}x{BLOCK}")
        layer = GroupedExperts.from_source(experts_source.read(_on_this_rank(module))).train(module.training)
        layer.parallel = getattr(module, "_fp8moe_parallel", None)
        return layer
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{type(module).__name__} cannot run with experts_implementation={NAME!r}: {error}"
        ) from error


def _without_data(module: nn.Module) -> nn.Module:
    """Copy the module to the meta device. The copy has plain dictionaries: an offloaded module's would load tensors."""
    tensors = {
        kind: {name: value if value is None else value.to("meta") for name, value in getattr(module, kind).items()}
        for kind in ("_parameters", "_buffers")
    }
    inner = {name: part if part is None else _without_data(part) for name, part in module._modules.items()}
    return _twin(module, **tensors, _modules=inner)


def _on_this_rank(module: nn.Module) -> nn.Module:
    """Copy the module with its parameters, of DTensors the local parts."""
    parameters = {name: value if value is None else local(value) for name, value in module._parameters.items()}
    return _twin(module, _parameters=parameters)


def _twin(module: nn.Module, **attributes: Any) -> nn.Module:
    """Make a second object with the module's attributes, except these. copy.copy fails for modules of FSDP2."""
    twin = object.__new__(type(module))
    twin.__dict__ = {**vars(module), **attributes}
    return twin
