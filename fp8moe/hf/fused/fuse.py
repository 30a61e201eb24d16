"""Fused forwards for a model's decoder layers, norms and routers: put in the place of their own, and taken back."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8moe.hf.fused import attention, feed_forward, known_forwards, latent_attention, linears, norms
from fp8moe.hf.fused.known_forwards import form_of, is_fused, runs_as_written
from fp8moe.hf.fused.norms import Handover
from fp8moe.kernels.decoder_ops.rms_norm import Normed


class FusedModule(NamedTuple):
    """A module that `optimize` changed.

    name: its path in the model. module_class: the name of its class. what: the parts that run in fp8moe's kernels.
    """

    name: str
    module_class: str
    what: str


class Optimized(tuple[FusedModule, ...]):
    """The modules that `optimize` changed."""

    _forwards: list[tuple[nn.Module, Callable]]

    def restore(self) -> None:
        """Give the modules their own forwards back. A second call changes nothing."""
        for module, forward in self._forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Run the fused forwards in this context, except in modules that have a forward of their own already."""
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
    """Find the modules that `optimize` would change. Moves weights together; forwards stay."""
    changed: list[FusedModule] = []
    forwards: list[tuple[nn.Module, Callable]] = []
    neighbours = _neighbours(model)
    for name, module in model.named_modules():
        known = None if "forward" in module.__dict__ else _fused_form(module, neighbours.get(module, _ALONE))
        if known is not None:
            forward, what = known
            changed.append(FusedModule(name, type(module).__name__, what))
            forwards.append((module, forward))
    result = Optimized(changed)
    result._forwards = forwards
    return result


class Neighbours(NamedTuple):
    """The handovers between a module and the layer before it, and between it and the layer or norm behind it."""

    before: Handover | None = None
    after: Handover | None = None


_ALONE = Neighbours()


def _fused_form(module: nn.Module, neighbours: Neighbours) -> tuple[Callable, str] | None:
    """Return the fused forward of a module, and what it fuses; None if the module's code is not known."""
    if is_decoder_layer(module):
        return functools.partial(_forward_layer, module, neighbours), _prepare_layer(module)
    if form_of(module, known_forwards.RMS_NORM):
        return functools.partial(_forward_norm, module, neighbours.before), "norm"
    if form_of(module, known_forwards.ROUTER):
        return functools.partial(feed_forward.forward_router, module), "router"
    return None


_ATTENTIONS: dict[ModuleType, dict[str, Any]] = {  # a module is of one kind at most
    attention: known_forwards.ATTENTION,
    latent_attention: known_forwards.LATENT_ATTENTION,
}


def _neighbours(model: nn.Module) -> dict[nn.Module, Neighbours]:
    """Connect the decoder layers of each list, which run in its order, and the norm behind the last of them."""
    found: dict[nn.Module, Neighbours] = {}

    def connect(layer: nn.Module, following: nn.Module, norm: Any, quantized: bool) -> None:
        handover = Handover(norm, quantized)
        found[layer] = found.get(layer, _ALONE)._replace(after=handover)
        found[following] = Neighbours(before=handover)

    for parent in model.modules():
        for layers in parent.children():
            if not isinstance(layers, nn.ModuleList) or not len(layers) or not is_decoder_layer(layers[-1]):
                continue
            for layer, following in pairwise(layers):
                if is_decoder_layer(layer) and is_decoder_layer(following):
                    connect(layer, following, following.input_layernorm, _reads_quantized(following.self_attn))
            last = getattr(parent, "norm", None)
            if isinstance(last, nn.Module) and form_of(last, known_forwards.RMS_NORM):
                connect(layers[-1], last, last, False)
    return found


def _reads_quantized(module: Any) -> bool:
    """Return whether an attention reads its input in FP8, and not its values."""
    return any(form_of(module, forms) and linears.are_fp8(kind.inputs(module)) for kind, forms in _ATTENTIONS.items())


def is_decoder_layer(layer: Any) -> bool:
    """Return whether the module is attention and feed-forward, each with an RMSNorm before and a residual around it."""
    if form_of(layer, known_forwards.DECODER_LAYER) is None:
        return False
    if not (hasattr(layer, "self_attn") and hasattr(layer, "mlp")):
        return False
    both = layer.input_layernorm, layer.post_attention_layernorm
    return all(form_of(norm, known_forwards.RMS_NORM) for norm in both)


def _prepare_layer(layer: Any) -> str:
    """Move weights together that read the same input. Returns what of the layer is fused then."""
    whats = ["norms and residuals", *(kind.prepare(layer.self_attn) for kind in _ATTENTIONS)]
    whats += feed_forward.prepare(layer.mlp, layer.input_layernorm.weight.dtype)
    return ", ".join(filter(None, whats))


def _forward_layer(layer: Any, neighbours: Neighbours, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Run a decoder layer; by its own forward in training mode, with gradients on, and where a norm is not served."""
    dtype = hidden_states.dtype
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    if torch.is_grad_enabled() or layer.training or not (norms.serves(first, dtype) and norms.serves(second, dtype)):
        return type(layer).forward(layer, hidden_states, **kwargs)
    normed = functools.partial(_normed, first, hidden_states, neighbours.before)
    attended = _attend(layer.self_attn, normed, hidden_states, kwargs)
    after = neighbours.after if runs_as_written(layer) else None
    following = None if after is None else after.wanted(dtype)
    result, following_normed = feed_forward.forward(layer.mlp, second, attended, hidden_states, following)
    if after is not None and following_normed is not None:
        after.put(result, following_normed)
    return result


def _attend(
    module: nn.Module, normed: Callable[[bool], Normed], hidden_states: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """Run the attention. normed: makes the norm of its input's rows, quantized (True) or values (False)."""
    for kind in _ATTENTIONS:
        if kind.serves(module, hidden_states.dtype, kwargs.get("position_embeddings")):
            rows = normed(linears.are_fp8(kind.inputs(module)))
            return kind.attend(module, rows, hidden_states.shape[:-1], **kwargs)
    values: Any = normed(False).values
    return module(hidden_states=values.view(hidden_states.shape), **{"attention_mask": None, **kwargs})[0]


def _normed(norm: nn.Module, x: Tensor, before: Handover | None, quantized: bool) -> Normed:
    """Take the norm of the rows of x from the layer before, or compute it if that layer has none."""
    handed = None if before is None else before.take(x, norm, quantized=quantized)
    return norms.norm(norm, x, values=not quantized, quantized=quantized) if handed is None else handed


def _forward_norm(norm: nn.Module, before: Handover | None, hidden_states: Tensor) -> Tensor:
    """Run a norm that is in no layer; its own forward runs with gradients on, and where `norms.norm` lacks it."""
    if torch.is_grad_enabled() or not norms.serves(norm, hidden_states.dtype):
        return type(norm).forward(norm, hidden_states)
    values: Any = _normed(norm, hidden_states, before, False).values
    return values.view(hidden_states.shape)
