"""Runs decoder layers of transformers, if their code is a known one, in fp8moe's fused kernels."""

from fp8moe.hf.fused.fuse import FusedModule, Optimized, find_fused, optimize

__all__ = ["FusedModule", "Optimized", "find_fused", "optimize"]
