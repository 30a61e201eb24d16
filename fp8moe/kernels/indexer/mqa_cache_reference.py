"""The paged cache of indexer keys in plain PyTorch, on any device: defines what the CUDA kernel writes.

None waits for a GPU. Arguments are checked by the callers.
"""

import torch
from torch import Tensor

from fp8moe.quant import reference


def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache (num_blocks, 64, 1, D + 4): the bytes of its keys (num_blocks, 64, D), float32 scales
    (num_blocks, 64)."""
    num_blocks, tokens, _, width = kv_cache.shape
    blocks = kv_cache.view(num_blocks, tokens * width)
    data, scale = blocks.split((tokens * (width - 4), tokens * 4), dim=1)
    return data.unflatten(1, (tokens, width - 4)), scale.view(torch.float32)


def append_kv(kv_cache: Tensor, k: Tensor, slots: Tensor, ue8m0: bool) -> None:
    """Quantize k (T, D) and write it to slots (T,) of the cache."""
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    if k.shape[0] == 0 or num_slots == 0:
        return
    data, scale = reference.quantize_1x128(k, ue8m0)
    valid = valid_slots(slots, num_slots)
    # A token without a slot repeats what the first token with one writes; where none has, slot 0 keeps what it holds.
    token = torch.where(valid, torch.arange(len(slots), device=slots.device), valid.int().argmax())
    place = tuple(_places(torch.where(valid, slots, 0)[token], kv_cache.shape[1]))
    some = valid.any()
    for target, values in zip(split(kv_cache), (data.view(torch.uint8), scale[:, 0]), strict=True):
        target[place] = torch.where(some, values[token], target[place])


def read_kv(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Data (T, D) and scale (T,) of slots (T,), zeros for those that the cache does not have."""
    data, scale = split(kv_cache)
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    if num_slots == 0:
        data, scale = data.new_zeros(len(slots), data.shape[2]), scale.new_zeros(len(slots))
    else:
        valid = valid_slots(slots, num_slots)
        place = tuple(_places(torch.where(valid, slots, 0), kv_cache.shape[1]))
        data, scale = torch.where(valid[:, None], data[place], 0), torch.where(valid, scale[place], 0)
    return data.view(torch.float8_e4m3fn), scale


def valid_slots(slots: Tensor, num_slots: int) -> Tensor:
    return (slots >= 0) & (slots < num_slots)


def _places(slots: Tensor, block_tokens: int) -> tuple[Tensor, Tensor]:
    """Block and place in it of valid slots."""
    slots = slots.long()
    return slots // block_tokens, slots % block_tokens
