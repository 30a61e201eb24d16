"""transformers' decoder layers, known by their code, in fp8moe's kernels."""

from fp8moe.hf.fused.fuse import FusedModule, Optimized, find_fused, optimize

__all__ = ["FusedModule", "Optimized", "find_fused", "optimize"]
