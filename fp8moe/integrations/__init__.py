"""Bridges to the outside: transformers models, decoding loops, checkpoints. Each loads its libraries at first use."""

NAME = "fp8moe"
"""What transformers calls it: the implementation of experts, and the quantization method."""
