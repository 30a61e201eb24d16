"""Generation with transformers models whose decode step is replayed from a CUDA graph."""

from fp8moe.decode.decoder import GraphDecoder
from fp8moe.decode.scheduler import NaNLogits

__all__ = ["GraphDecoder", "NaNLogits"]
