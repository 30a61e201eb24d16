"""Greedy generation with transformers models whose decode step is replayed from a CUDA graph."""

from fp8moe.integrations.decode.decoder import GraphDecoder

__all__ = ["GraphDecoder"]
