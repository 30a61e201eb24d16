"""How many tokens of a prompt a model reads at a time, so that memory for a long one is bounded."""

from typing import Any

import torch

MOST_TOKENS = 8192
"""Of a batch together: beyond it the kernels gain little."""
LEAST_COLUMNS = 64
SHARE = 0.5
"""Of the free memory."""


def columns_at_a_time(config: Any, batch: int, end: int, device: torch.device, dtype: torch.dtype, mask: bool) -> int:
    """Columns of a batch of prompts that end at column `end`; all of them where the device is a CPU.

    mask: the attention takes a mask, and its keys are repeated for all heads.
    """
    if device.type != "cuda":
        return end
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    heads, size = config.num_attention_heads, _head_size(config)
    room = SHARE * free
    each = _values_of_a_token(config) * dtype.itemsize
    if mask:
        room -= 2 * batch * end * heads * size * dtype.itemsize
        each += (1 + heads * (config._attn_implementation == "eager")) * 2 * end * dtype.itemsize
    tokens = min(MOST_TOKENS, int(room / each))
    return max(tokens // batch, LEAST_COLUMNS)


def _values_of_a_token(config: Any) -> int:
    """An upper estimate of the values that a layer holds at once for a token."""
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    inner = max(getattr(config, name, None) or 0 for name in ("intermediate_size", "moe_intermediate_size"))
    attention = 6 * config.num_attention_heads * _head_size(config)
    return 8 * config.hidden_size + attention + chosen * (2 * config.hidden_size + 4 * inner)


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
