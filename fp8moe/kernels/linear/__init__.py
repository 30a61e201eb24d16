"""Operators of an FP8 linear layer: `linear`, and `linear_training` with a backward."""

from fp8moe.kernels.linear.forward import linear
from fp8moe.kernels.linear.training import linear_training

__all__ = ["linear", "linear_training"]
