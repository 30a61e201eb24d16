"""Attention of one new token a sequence over a static cache: PyTorch's flash attention, which reads it where it lies.

Each sequence and key head is a sequence of its own for the kernel, a slice of the cache's memory, and the query heads
that share the key head are its heads. So keys are read once, nothing is repeated or masked, and the kernel splits long
sequences over the SMs. In the place of a mask stands what is visible: where each slice begins and how long it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NAME = "fp8moe_decode"

HEAD_DIM_ALIGNMENT, MAX_HEAD_DIM = 8, 256  # of the kernel


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
    if q_length != 1 or use_vmap:
        raise NotServed("a mask that is not causal")
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """query (B, heads, 1, D), key and value (B, key heads, length, D) of the cache, `visible` rows -> (B, 1, heads, D).

    Raises NotServed for soft caps, sinks, float32, and sizes that the kernel does not have.
    """
    batch, heads, _, size = query.shape
    key_heads, length = key.shape[1:3]
    if softcap is not None or s_aux is not None or dropout:
        raise NotServed("soft caps, sinks or dropout")
    if query.dtype not in (torch.bfloat16, torch.float16) or value.shape != key.shape:
        raise NotServed(f"{query.dtype}, keys {tuple(key.shape)} and values {tuple(value.shape)}")
    if size % HEAD_DIM_ALIGNMENT or size > MAX_HEAD_DIM or attention_mask.shape != (2, batch * key_heads + 1):
        raise NotServed(f"{key_heads} key heads of {size} values")
    first, count = attention_mask
    output = torch.ops.aten._flash_attention_forward(
        query.reshape(batch * key_heads, heads // key_heads, size),
        key.view(batch * key_heads * length, 1, size),
        value.view(batch * key_heads * length, 1, size),
        torch.arange(batch * key_heads + 1, dtype=torch.int32, device=query.device),
        first,
        1,
        length,
        0.0,
        False,
        False,
        scale=scaling,
        seqused_k=count[:-1],
    )[0]
    return output.view(batch, 1, heads, size), None
