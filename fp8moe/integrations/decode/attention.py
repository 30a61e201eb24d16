"""Attention of one new token a sequence over a static cache: PyTorch's flash attention, which reads it where it lies.

Each sequence and key head is a sequence of its own for the kernel, a slice of the cache's memory, and the query heads
that share the key head are its heads. So keys are read once, nothing is repeated or masked, and the kernel splits long
sequences over the SMs. In the place of a mask stands what is visible: where each slice begins and how long it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NAME = "fp8moe_decode"

DTYPES = (torch.bfloat16, torch.float16)  # of the kernel
HEAD_DIM_ALIGNMENT, MAX_HEAD_DIM = 8, 256

_WITHOUT_EFFECT = (
    *("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
)
"""Arguments that models pass on to the attention, and that say nothing which the visible rows do not say."""


class NotServed(ValueError):
    """What the kernel cannot do; says which."""


@contextmanager
def used_by(model: Any, name: str | None) -> Iterator[None]:
    """Within it the attention implementation of the model is `name`, or for None the model's own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible)
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    config._attn_implementation = name or own
    try:
        yield
    finally:
        config._attn_implementation = own


def visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    q_offset: int | Tensor,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any,
    device: torch.device,
    **others,
) -> Tensor:
    """(2, B * key heads + 1) int32: the first row of each (sequence, head) in the cache, and how many rows count.

    q_offset: tokens in the cache. attention_mask (B, kv_length): False for padding, all of it on the left. local_size:
    of a sliding window. Raises NotServed for other masks.
    """
    from transformers.masking_utils import causal_mask_function

    if q_length != 1 or use_vmap or (local_size is None and mask_function is not causal_mask_function):
        raise NotServed("a mask that is neither causal nor of a sliding window")
    begin = torch.zeros(batch_size, dtype=torch.int64, device=device)
    if attention_mask is not None:
        begin += kv_length - attention_mask.sum(1)
    end = torch.zeros_like(begin) + q_offset + 1
    if local_size is not None:
        begin = torch.maximum(begin, end - local_size)
    heads = config.get_text_config(decoder=True).num_key_value_heads
    first = torch.arange(batch_size * heads, device=device) * kv_length
    rows = torch.stack([first + begin.repeat_interleave(heads), (end - begin).repeat_interleave(heads)])
    return nn.functional.pad(rows, (0, 1)).int()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (B, heads, 1, D), key and value (B, key heads, length, D) of the cache, `visible` rows -> (B, 1, heads, D).

    Raises NotServed for dropout, float32, sizes that the kernel does not have, and whatever else the model passes on:
    soft caps, sinks, position biases, selected tokens.
    """
    batch, heads, _, size = query.shape
    key_heads, length = key.shape[1:3]
    given = sorted(name for name, other in others.items() if other is not None and name not in _WITHOUT_EFFECT)
    if given or dropout:
        raise NotServed(f"attention with {', '.join(given) or 'dropout'}")
    if query.dtype not in DTYPES or value.shape != key.shape:
        raise NotServed(f"{query.dtype}, keys {tuple(key.shape)} and values {tuple(value.shape)}")
    if size % HEAD_DIM_ALIGNMENT or size > MAX_HEAD_DIM or attention_mask.shape != (2, batch * key_heads + 1):
        raise NotServed(f"{key_heads} key heads of {size} values")
    if not (key.is_contiguous() and value.is_contiguous()):
        raise NotServed("keys that are no static cache's")
    first, count = attention_mask
    output = _flash_attention(
        query.reshape(batch * key_heads, heads // key_heads, size),
        key.view(batch * key_heads * length, 1, size),
        value.view(batch * key_heads * length, 1, size),
        first,
        count[:-1],
        length,
        scaling,
    )
    return output.view(batch, 1, heads, size), None


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, count: Tensor, longest: int, scale: float | None
) -> Tensor:
    """query (sequences, heads, D); key, value (rows, 1, D); of each sequence the first row and their count."""
    one_each = torch.arange(len(first), dtype=torch.int32, device=query.device)
    return torch.ops.aten._flash_attention_forward(
        query, key, value, one_each, first, 1, longest, 0.0, False, False, scale=scale, seqused_k=count
    )[0]
