"""How transformers calls what fp8moe registers with it."""

NAME = "fp8moe"
"""The implementation of experts, and the quantization method."""
