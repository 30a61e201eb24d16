"""fp8moe's experts and FP8 linear as a universal kernel of Hugging Face's `kernels`."""

from . import layers

__all__ = ["layers"]
