"""The operators of an FP8 linear layer: forward and training."""

from fp8moe.kernels.linear.forward import linear
from fp8moe.kernels.linear.training import linear_training

__all__ = ["linear", "linear_training"]
