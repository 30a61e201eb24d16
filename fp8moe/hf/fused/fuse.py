"""optimize: replaces the forwards of a model's decoder layers, norms and routers with fused ones; can restore them."""

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
from fp8moe.kernels.decoder_ops.rotary_tables import rotary_tables
from fp8moe.runtime import config
from fp8moe.runtime.checks import FLOATING


class FusedModule(NamedTuple):
    """A module that `optimize` changed.

    name: its path in the model. module_class: its class name. what: which parts run in fp8moe's kernels, as text.
    """

    name: str
    module_class: str
    what: str


class Optimized(tuple[FusedModule, ...]):
    """The modules that `optimize` changed."""

    _forwards: list[tuple[nn.Module, Callable]]

    def restore(self) -> None:
        """Restore the modules' own forwards. A second call changes nothing."""
        for module, forward in self._forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Install the fused forwards within this context, except in modules whose forward is replaced already."""
        for module, forward in self._forwards:
            module.__dict__.setdefault("forward", forward)
        try:
            yield
        finally:
            self.restore()


def optimize(model: nn.Module) -> Optimized:
    """Run the non-expert parts of a transformers model in fp8moe's fused kernels, where their code is known.

    These are fused: RMSNorm with the preceding residual add and the following FP8 quantization; the projections q, k
    and v as one GEMM; head norms, rotary embedding and the write to the KV cache; MLA attention of one new token;
    attention of models with an indexer, whose queries then read only the latents that it chooses (DeepSeek-V3.2,
    arXiv:2512.02556, section 2); the router; gate and up of FP8 feed-forward modules as one GEMM with the activation.
    Modules are recognised by the code of their forward. A module runs as before if its code is not recognised, if it
    has hooks, or if its forward has been replaced. All modules run as before while gradients are enabled or in training
    mode.

    Weights of projections that read the same input are made adjacent in memory, which changes no name, value or
    `state_dict()`. If they become separated again (`.to()`, loading), they run as separate GEMMs.

    Results are rounded as by the model's own operations, with sums in another order. An exception: norms that multiply
    by their weight before they round (GPT-OSS) also round before it. Returns the changed modules in the order of the
    model; call `.restore()` of the returned object to undo the changes.
    Raises TypeError for a model that is not a module, ValueError for one that is fused already.
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
    """Return the modules that `optimize` would change. Makes weights adjacent in memory, but replaces no forward."""
    changed: list[FusedModule] = []
    forwards: list[tuple[nn.Module, Callable]] = []
    neighbours = _neighbours(model)
    layered = any(map(is_decoder_layer, model.modules()))
    for name, module in model.named_modules():
        known = None if "forward" in module.__dict__ else _fused_form(module, neighbours.get(module, _ALONE))
        if known is None and layered and "forward" not in module.__dict__:
            known = _fused_tables(module)
        if known is not None:
            forward, what = known
            changed.append(FusedModule(name, type(module).__name__, what))
            forwards.append((module, forward))
    result = Optimized(changed)
    result._forwards = forwards
    return result


class Neighbours(NamedTuple):
    """The handovers of a layer or norm: from the layer before it, and to the layer or norm after it."""

    before: Handover | None = None
    after: Handover | None = None


_ALONE = Neighbours()


def _fused_form(module: nn.Module, neighbours: Neighbours) -> tuple[Callable, str] | None:
    """Return a module's fused forward and a description of what it fuses, or None if the module's code is unknown."""
    if is_decoder_layer(module):
        return functools.partial(_forward_layer, module, neighbours), _prepare_layer(module)
    if latent_attention.is_sparse(module):
        return functools.partial(_forward_sparse, module), "latent attention to what is chosen"
    if form_of(module, known_forwards.RMS_NORM):
        return functools.partial(_forward_norm, module, neighbours.before), "norm"
    if form_of(module, known_forwards.ROUTER):
        return functools.partial(feed_forward.forward_router, module), "router"
    return None


def _fused_tables(module: nn.Module) -> tuple[Callable, str] | None:
    """Return the fused forward of a rotary embedding's cosines and sines, or None if the module's code is unknown.

    A model's layers share them, so they are fused in models with known decoder layers only.
    """
    if form_of(module, known_forwards.ROTARY_TABLES) is None:
        return None
    return functools.partial(_forward_tables, module), "cosines and sines"


def _forward_tables(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of a rotary embedding for positions (B, T).

    The module's own forward runs if gradients are enabled, if its frequencies depend on the positions, or if results
    are batch invariant: then other forwards, which run PyTorch's operations, must have these bits.
    """
    moving = "dynamic" in module.rope_type or module.rope_type == "longrope"
    of_kernel = position_ids.dtype is torch.int64 and module.inv_freq.dtype is torch.float32 and x.dtype in FLOATING
    here = position_ids.device == module.inv_freq.device == x.device
    if torch.is_grad_enabled() or moving or config.settings.batch_invariant or not (of_kernel and here):
        return type(module).forward(module, x, position_ids)
    return rotary_tables(position_ids, module.inv_freq, module.attention_scaling, dtype=x.dtype)


# Maps each file with a fused attention to the known forwards that it replaces. A forward is in at most one of these.
_ATTENTIONS: dict[ModuleType, dict[str, Any]] = {
    attention: known_forwards.ATTENTION,
    latent_attention: known_forwards.LATENT_ATTENTION,
}


def _neighbours(model: nn.Module) -> dict[nn.Module, Neighbours]:
    """Make handovers between consecutive decoder layers of each nn.ModuleList.

    If a final norm follows the list, also make a handover from the last layer to this norm.
    """
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
    """Return whether all input projections of an attention are in FP8, so that it needs only the quantized input."""
    return any(form_of(module, forms) and linears.are_fp8(kind.inputs(module)) for kind, forms in _ATTENTIONS.items())


def is_decoder_layer(layer: Any) -> bool:
    """Return whether this is a known decoder layer: attention and feed-forward, both with an RMSNorm and a residual."""
    if form_of(layer, known_forwards.DECODER_LAYER) is None:
        return False
    if not (hasattr(layer, "self_attn") and hasattr(layer, "mlp")):
        return False
    both = layer.input_layernorm, layer.post_attention_layernorm
    return all(form_of(norm, known_forwards.RMS_NORM) for norm in both)


def _prepare_layer(layer: Any) -> str:
    """Make weights that read the same input adjacent in memory; return a description of what is fused."""
    whats = ["norms and residuals", *(kind.prepare(layer.self_attn) for kind in _ATTENTIONS)]
    whats += feed_forward.prepare(layer.mlp, layer.input_layernorm.weight.dtype)
    return ", ".join(filter(None, whats))


def _forward_layer(layer: Any, neighbours: Neighbours, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Run a decoder layer fused.

    The layer's own forward runs if gradients are enabled, if the layer is in training mode, or if the kernel does not
    support one of its norms.
    """
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
    """Run the attention of a layer, fused if its code is known.

    normed: a function that returns the normed input. normed(True) returns it quantized, normed(False) as values.
    """
    for kind in _ATTENTIONS:
        if kind.serves(module, hidden_states.dtype, kwargs.get("position_embeddings")):
            rows = normed(linears.are_fp8(kind.inputs(module)))
            return kind.attend(module, rows, hidden_states.shape[:-1], **kwargs)
    values: Any = normed(False).values
    return module(hidden_states=values.view(hidden_states.shape), **{"attention_mask": None, **kwargs})[0]


def _forward_sparse(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run attention to the latents that an indexer has chosen.

    The module's own forward runs if gradients are enabled, in training mode, and for what `attend_sparse` does not
    take.
    """
    if not (torch.is_grad_enabled() or module.training or args):
        found = latent_attention.attend_sparse(module, **kwargs)
        if found is not None:
            return found
    return type(module).forward(module, *args, **kwargs)


def _normed(norm: nn.Module, x: Tensor, before: Handover | None, quantized: bool) -> Normed:
    """Return the normalized rows of x: take them from the handover `before`, or compute them if it has none."""
    handed = None if before is None else before.take(x, norm, quantized=quantized)
    return norms.norm(norm, x, values=not quantized, quantized=quantized) if handed is None else handed


def _forward_norm(norm: nn.Module, before: Handover | None, hidden_states: Tensor) -> Tensor:
    """Run a norm outside of a decoder layer.

    The norm's own forward runs if gradients are enabled or the kernel does not support the norm.
    """
    if torch.is_grad_enabled() or not norms.serves(norm, hidden_states.dtype):
        return type(norm).forward(norm, hidden_states)
    values: Any = _normed(norm, hidden_states, before, False).values
    return values.view(hidden_states.shape)
