"""transformers models on fp8moe's kernels: experts, FP8 linears, indexers, and a loader that needs no GPU."""

from fp8moe.integrations.models import optimize
from fp8moe.integrations.transformers.load import load_model
from fp8moe.integrations.transformers.registration import register
from fp8moe.integrations.transformers.reporting import ModuleReport, report

__all__ = ["ModuleReport", "load_model", "optimize", "register", "report"]
