"""Decoder layers whose norms, additions, projections and router run in our kernels."""

from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.integrations.models import attention, forms, latent_attention, mlp, moe, norms

_ATTENTIONS = (attention, latent_attention)  # a module is of one kind at most


def recognised(layer: nn.Module) -> bool:
    """Whether the layer is attention and feed-forward, each behind an RMSNorm and with a residual around it."""
    if forms.form_of(layer, forms.DECODER_LAYER) is None or not (hasattr(layer, "self_attn") and hasattr(layer, "mlp")):
        return False
    return all(forms.form_of(norm, forms.RMS_NORM) for norm in (layer.input_layernorm, layer.post_attention_layernorm))


def prepare(layer: nn.Module) -> str:
    """Move weights together that read the same input; returns what of the layer is fused then."""
    whats = ["norms and residuals", *(kind.prepare(layer.self_attn) for kind in _ATTENTIONS)]
    if moe.serves(layer.mlp, layer.input_layernorm.weight.dtype):
        whats += ["router", "shared experts" if moe.prepare(layer.mlp) else None]
    else:
        whats.append("feed-forward" if mlp.prepare(layer.mlp) else None)
    return ", ".join(filter(None, whats))


def forward(layer: nn.Module, hidden_states: Tensor, **arguments: Any) -> Tensor:
    """The layer's forward; its own in training mode, where gradients are on, and where a norm is not ours to run."""
    dtype = hidden_states.dtype
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    if torch.is_grad_enabled() or layer.training or not (norms.serves(first, dtype) and norms.serves(second, dtype)):
        return type(layer).forward(layer, hidden_states, **arguments)
    attended = _attend(layer.self_attn, first, hidden_states, arguments)
    return _feed_forward(layer.mlp, second, attended, hidden_states)


def _attend(module: nn.Module, before: nn.Module, hidden_states: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The attention's result, of the input before its norm."""
    for kind in _ATTENTIONS:
        if kind.serves(module, hidden_states.dtype, arguments.get("position_embeddings")):
            quantized = kind.wants_quantized(module)
            normed = norms.norm(before, hidden_states, values=not quantized, quantized=quantized)
            return kind.attend(module, normed, hidden_states.shape[:-1], **arguments)
    values = norms.norm(before, hidden_states, values=True, quantized=False).values
    return module(hidden_states=values.view(hidden_states.shape), **{"attention_mask": None, **arguments})[0]


def _feed_forward(module: nn.Module, before: nn.Module, attended: Tensor, residual: Tensor) -> Tensor:
    """The layer's result, of the attention's before residual and norm."""
    if moe.serves(module, residual.dtype):
        normed = norms.norm(before, attended, residual, values=True, quantized=moe.wants_quantized(module))
        return moe.mix(module, normed).view(residual.shape)
    if mlp.serves(module):
        normed = norms.norm(before, attended, residual, values=False, quantized=True)
        out = mlp.feed_forward(module, normed.quantized, residual.dtype)
    else:
        normed = norms.norm(before, attended, residual, values=True, quantized=False)
        out = module(normed.values.view(residual.shape)).view(normed.sum.shape)
    return (normed.sum + out).view(residual.shape)
