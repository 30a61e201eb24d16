"""Attention over the latents of multi-head latent attention."""

from fp8moe.kernels.latent.attention import latent_attention
from fp8moe.kernels.latent.fp8_latents import quantize_latents

__all__ = ["latent_attention", "quantize_latents"]
