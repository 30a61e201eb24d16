"""Runs experts, FP8 linears and indexers of transformers models on fp8moe's kernels; load_model needs no GPU."""

from fp8moe.hf.fused import optimize
from fp8moe.hf.load import load_model
from fp8moe.hf.patches import register, unregister
from fp8moe.hf.reporting import ModuleReport, report

__all__ = ["ModuleReport", "load_model", "optimize", "register", "report", "unregister"]
