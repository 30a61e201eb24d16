"""The memory that is free, and the number of columns of a batch of prompts that fit into it at once."""

import re
from pathlib import Path
from typing import Any

import torch

MOST_WHOLE_TOKENS = 65536
"""A batch of prompts with at most this many tokens is prefilled in one piece, if memory allows.

Attention is fastest without chunks.
"""
MOST_TOKENS = 8192
"""If a batch is not prefilled in one piece, a chunk has at most this many tokens, but at least LEAST_COLUMNS columns.

The kernels gain little from larger chunks.
"""
LEAST_COLUMNS = 64
FREE_MEMORY_FRACTION = 0.5
"""The fraction of the free memory that one prefill chunk may take."""
_RECEIVED, _SUM = 1.1, 4  # bytes per hidden value in a received FP8 token (with scales) and in a partial sum


def columns_at_a_time(
    model: Any, batch: int, end: int, device: torch.device, *, masked: bool, ranks: int = 1, copied: int = 0
) -> int:
    """Return how many of the ``end`` columns of a batch of prompts to prefill at once; on a CPU all of them.

    masked: whether attention takes a mask; keys are then repeated for all heads. ranks: how many ranks share the
    experts; each rank needs room for the tokens and the partial sums of all ranks. copied: how many columns of a
    layer's cache attention reads in a copy of the model's dtype.
    """
    if device.type != "cuda":
        return end
    free = free_memory(device)
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    heads, size = config.num_attention_heads, _head_size(config)
    room = FREE_MEMORY_FRACTION * free
    each = _values_of_a_token(config) * itemsize
    if ranks > 1:
        each += ranks * (_RECEIVED + _SUM) * config.hidden_size
    if getattr(config, "kv_lora_rank", None):  # MLA expands all latents, then joins them with the rotary part
        room -= batch * end * heads * (2 * size + 2 * config.v_head_dim) * itemsize
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    room -= 2 * batch * copied * key_heads * size * itemsize
    if masked:
        room -= 2 * batch * end * heads * size * itemsize
        each += (1 + heads * (config._attn_implementation == "eager")) * 2 * end * itemsize
    tokens = int(room / each)
    if batch * end <= min(tokens, MOST_WHOLE_TOKENS):
        return end
    return max(min(tokens, MOST_TOKENS) // batch, LEAST_COLUMNS)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    (kilobytes,) = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return int(kilobytes) * 1024


def _values_of_a_token(config: Any) -> int:
    """Return an upper estimate of the number of values that a layer holds at once for each token."""
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    dense = getattr(config, "intermediate_size", None) or 0
    experts = getattr(config, "moe_intermediate_size", None) or dense
    attention = 6 * config.num_attention_heads * _head_size(config)
    inner = max(4 * dense, chosen * (2 * config.hidden_size + 4 * experts))
    return 8 * config.hidden_size + attention + inner


def _head_size(config: Any) -> int:
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
