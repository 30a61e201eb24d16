"""The older path of `fp8moe.kernels.indexer.mqa_cache`, which stays valid."""

from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache, read_kv

__all__ = ["append_kv", "new_kv_cache", "read_kv"]
