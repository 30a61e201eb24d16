"""What transformers calls fp8moe."""

NAME = "fp8moe"
"""The implementation of experts, and the quantization method."""
