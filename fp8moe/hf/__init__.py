"""Runs experts, FP8 linears and indexers of transformers models on fp8moe's kernels; load_model needs no GPU."""

from fp8moe.hf.fused import optimize
from fp8moe.hf.load import load_model
from fp8moe.hf.patches import register, unregister
from fp8moe.hf.policy import on_policy
from fp8moe.hf.reporting import ModuleReport, report
from fp8moe.hf.routing import RecordedRouting, record_routing, replay_routing

__all__ = [
    "ModuleReport",
    "RecordedRouting",
    "load_model",
    "on_policy",
    "optimize",
    "record_routing",
    "register",
    "replay_routing",
    "report",
    "unregister",
]
