"""The lightning indexer of sparse attention: its index scores, and the paged cache of its keys."""

from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache, read_kv
from fp8moe.kernels.indexer.mqa_logits import paged_mqa_logits

__all__ = ["append_kv", "new_kv_cache", "paged_mqa_logits", "read_kv"]
