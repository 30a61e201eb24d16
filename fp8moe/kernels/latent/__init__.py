"""Attention over the latents of multi-head latent attention."""

from fp8moe.kernels.latent.attention import latent_attention

__all__ = ["latent_attention"]
