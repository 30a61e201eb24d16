"""Modules with frozen FP8 weights, in the layout of DeepSeek-style checkpoints, or with trained master weights."""

from fp8moe.layers.experts import GroupedExperts, experts_rows_training
from fp8moe.layers.linear import FP8Linear, replace_linears
from fp8moe.layers.master import MasterModule
from fp8moe.layers.mqa_indexer import FP8MQAIndexer
from fp8moe.layers.warmup import warm

__all__ = [
    "FP8Linear",
    "FP8MQAIndexer",
    "GroupedExperts",
    "MasterModule",
    "experts_rows_training",
    "replace_linears",
    "warm",
]
