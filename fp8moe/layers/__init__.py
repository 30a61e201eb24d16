"""Modules whose weights are FP8 tensors in the layout of DeepSeek-style checkpoints, or masters that are trained."""

from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear, replace_linears
from fp8moe.layers.mqa_indexer import FP8MQAIndexer
from fp8moe.layers.warmup import warm

__all__ = ["FP8Linear", "FP8MQAIndexer", "GroupedExperts", "replace_linears", "warm"]
