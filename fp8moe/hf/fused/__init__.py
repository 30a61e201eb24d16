"""Runs decoder layers of transformers in fp8moe's fused kernels, if the code of the layers is known."""

from fp8moe.hf.fused.fuse import FusedModule, Optimized, find_fused, optimize

__all__ = ["FusedModule", "Optimized", "find_fused", "optimize"]
