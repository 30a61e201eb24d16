"""The number of columns of a batch of prompts that fit into free memory at once."""

from typing import Any

import torch

MOST_WHOLE_TOKENS = 65536
"""Most tokens of a batch that are read in one piece, if memory allows it: attention is fastest then."""
MOST_TOKENS = 8192
"""Most tokens of a batch in one of several pieces: with more the kernels gain little."""
LEAST_COLUMNS = 64
FREE_MEMORY_FRACTION = 0.5
"""The part of the free memory that a piece may take."""
_RECEIVED, _SUM = 1.1, 4  # bytes of a quantized token's column with its scale, and of a partial sum's


def columns_at_a_time(model: Any, batch: int, end: int, device: torch.device, *, masked: bool, ranks: int = 1) -> int:
    """Return how many columns of a batch of prompts to read at once, of `end`; all of them on a CPU.

    masked: the attention takes a mask, and keys are repeated for all heads. ranks: the number that share the experts;
    each has room for the tokens of all and for the sums of all.
    """
    if device.type != "cuda":
        return end
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    heads, size = config.num_attention_heads, _head_size(config)
    room = FREE_MEMORY_FRACTION * free
    each = _values_of_a_token(config) * itemsize
    if ranks > 1:
        each += ranks * (_RECEIVED + _SUM) * config.hidden_size
    if getattr(config, "kv_lora_rank", None):  # all latents are expanded, then put together with the rotated part
        room -= batch * end * heads * (2 * size + 2 * config.v_head_dim) * itemsize
    if masked:
        room -= 2 * batch * end * heads * size * itemsize
        each += (1 + heads * (config._attn_implementation == "eager")) * 2 * end * itemsize
    tokens = int(room / each)
    if batch * end <= min(tokens, MOST_WHOLE_TOKENS):
        return end
    return max(min(tokens, MOST_TOKENS) // batch, LEAST_COLUMNS)


def _values_of_a_token(config: Any) -> int:
    """Estimate, from above, the values that a layer holds at once for a token."""
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
