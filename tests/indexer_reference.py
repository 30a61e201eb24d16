"""The lightning indexer in float64, and what the tests of FP8MQAIndexer and of transformers' indexers share."""

import torch

from fp8moe.quant.quantize import dequantize, quantize_1x128


def rotated(x, cos, sin, interleaved=False):
    """Rotary positions as complex products. x (..., D), cos and sin (..., R): R/2 angles, twice."""
    half = cos.shape[-1] // 2
    pairs = x[..., : 2 * half].double()
    pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).mT
    angle = torch.complex(cos[..., :half].double(), sin[..., :half].double())
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * angle
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1)


def rounded(x, scale_format="float32"):
    """x (..., D) as FP8 holds it."""
    return dequantize(quantize_1x128(x.float(), scale_format=scale_format), dtype=torch.float64)


@torch.no_grad()
def operands(layers, hidden_states, q_resid, cos, sin, *, interleaved=False, quantize=True, scale_format="float32"):
    """q (..., H, D), weights (..., H) and k (..., D), in float64, after the layers of the indexer in their dtype."""
    k = layers.k_norm(layers.wk(hidden_states).to(layers.k_norm.weight.dtype))
    k = rotated(k, cos, sin, interleaved)
    q = layers.wq_b(q_resid).unflatten(-1, (-1, k.shape[-1]))
    q = rotated(q, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    weights = layers.weights_proj(hidden_states.to(layers.weights_proj.weight.dtype)).double()
    if quantize:
        q, k = rounded(q, scale_format), rounded(k, scale_format)
    return q, weights / (q.shape[-2] * q.shape[-1]) ** 0.5, k


def scores(q, weights, k):
    """(S, T) of q (S, H, D), weights (S, H) and k (T, D)."""
    return torch.einsum("sht,sh->st", torch.einsum("shd,td->sht", q, k).relu(), weights)


def angles(positions, width, dtype=torch.float32):
    """cos and sin (..., width) of rotary positions, as transformers makes them."""
    phase = positions[..., None] / 10000 ** (torch.arange(0, width, 2) / width)
    phase = torch.cat((phase, phase), dim=-1)
    return phase.cos().to(dtype), phase.sin().to(dtype)
