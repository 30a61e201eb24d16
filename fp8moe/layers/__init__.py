"""Modules with frozen FP8 weights, in the layout of DeepSeek-style checkpoints, or with trained master weights."""

from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear, linear_of_master, replace_linears
from fp8moe.layers.master import MasterModule, check_master_dtype, invalidate_masters
from fp8moe.layers.mqa_indexer import FP8MQAIndexer
from fp8moe.layers.separate_masters import experts_rows_training, experts_tokens_training
from fp8moe.layers.warmup import warm

__all__ = [
    "FP8Linear",
    "FP8MQAIndexer",
    "GroupedExperts",
    "MasterModule",
    "check_master_dtype",
    "experts_rows_training",
    "experts_tokens_training",
    "invalidate_masters",
    "linear_of_master",
    "replace_linears",
    "warm",
]
