"""Latent attention that reads a static cache of latents in place, for decode steps and prompts.

transformers caches the latents of a layer (DeepSeek-V2, arXiv:2405.04434, section 2.1) as its keys, and their rotary
parts as its values, and expands all of them to keys and values of each head before it attends. `left_as_cached` has it
pass them on unexpanded. `attend` absorbs the expansion into queries and results, and reads each latent once for all
heads, by `fp8moe.latent_attention`: all that a query sees or, in models with an indexer (DeepSeek-V3.2,
arXiv:2512.02556, section 2), those that it has chosen. The latents of whole prompts are expanded, which takes fewer
operations, unless an indexer has chosen among them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe.hf.fused import flash_attention_3
from fp8moe.hf.fused.attention import AttentionMetadata, UnsupportedAttention
from fp8moe.hf.fused.latent_attention import absorbed, absorption, expands_latents
from fp8moe.hf.replaced import hold, release
from fp8moe.kernels.latent.fp8_latents import dequantize_latents
from fp8moe.quant.formats import FP8Tensor

_modules: WeakKeyDictionary[Any, tuple[nn.Module, ...]] = WeakKeyDictionary()
"""Maps each model to its modules with latent attention."""


@contextmanager
def left_as_cached(model: Any, here: Callable[[], bool]) -> Iterator[None]:
    """Within the context, have the model's attention modules pass latents on as they are cached.

    here: whether the calling thread runs a decoder's call; in others the modules expand their latents.
    """
    if model not in _modules:
        _modules[model] = tuple(filter(expands_latents, model.modules()))

    def expand_kv(module: Any, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        return (latent, rotary) if here() else type(module).expand_kv(module, latent, rotary)

    with ExitStack() as held:
        for module in _modules[model]:
            hold(module, "expand_kv", MethodType(expand_kv, module))
            held.callback(partial(release, module, "expand_kv"))
        yield


def are_latents(module: Any, key: Any, value: Any) -> bool:
    """Return whether the keys and values that a module passes to its attention are latents and their rotary parts."""
    if not expands_latents(module) or isinstance(key, FP8Tensor):
        return False
    return key.dtype is torch.uint8 or (key.shape[1], key.shape[-1]) == (1, module.kv_lora_rank)


def attend(
    module: Any,
    query: Tensor,
    latent: Tensor,
    rotary: Tensor,
    metadata: AttentionMetadata,
    scaling: float | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Compute attention over the latents of a static cache; return (B, T, heads, D).

    query: (B, heads, T, N + P). latent: (B, 1, columns, R), rotary (B, 1, columns, P), the first columns of the cache.
    In FP8 latent is (B, 1, columns, bytes) uint8, as by `quantize_latents`, and rotary is empty.
    indices: (B, T, k), the columns that an indexer has chosen for each query; those that the query does not see are
    skipped.

    Raises UnsupportedAttention for projections that cannot be absorbed, features that the model asks for beside these,
    and in batch-invariant mode.
    """
    batch, heads, new, size = query.shape
    if not isinstance(metadata, AttentionMetadata) or metadata.new_tokens != new:
        raise UnsupportedAttention("latent attention with a mask of another kind")
    weights = absorption(module, query.dtype, metadata, others)
    scale = size**-0.5 if scaling is None else scaling
    rank, rest = module.kv_lora_rank, module.qk_rope_head_dim
    if indices is not None and latent.shape[2] <= indices.shape[-1]:
        indices = None  # every column is chosen
    if new > 1 and metadata.before == 0 and indices is None:
        latent, rotary = latent[:, :, :new], rotary[:, :, :new]
        if latent.dtype is torch.uint8:
            latent, rotary = dequantize_latents(latent, value_size=rank, dtype=query.dtype).split([rank, rest], dim=-1)
        keys, values = type(module).expand_kv(module, latent, rotary)
        if flash_attention_3.serves(query, keys, values):
            return flash_attention_3.attend(query, keys, values, scale)
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale).transpose(1, 2)
    latents = _joined(latent, metadata.length, latent.shape[-1] + rotary.shape[-1])
    how = {"begin": metadata.first} if indices is None else {"indices": metadata.seen(indices)}
    return absorbed(module, query, weights, latents, metadata.ends, scale, **how)


def _joined(latent: Tensor, length: int, width: int) -> Tensor:
    """Return all columns (B, length, width) of a cache whose layers keep latents and rotary parts side by side.

    latent: the first part of the first columns. Raises UnsupportedAttention for another cache.
    """
    if latent.stride() != (length * width, length * width, width, 1):
        raise UnsupportedAttention("latents that are no static cache's")
    return latent.as_strided((len(latent), length, width), (length * width, width, 1))
