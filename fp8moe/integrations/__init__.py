"""Bridges to the outside: transformers models, decoding loops, checkpoints. Each loads its libraries at first use."""
