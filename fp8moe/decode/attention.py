"""Attention that reads a static cache in place, for decode steps and prompts.

A decode step runs `kernels.decoder_ops.decode_attention`. Calls with several tokens run PyTorch's flash attention: each
row of the batch is a sequence, whose keys the kernel finds in the cache by strides. Whole prompts without padding run
the causal attention that PyTorch chooses. On a GPU this is cuDNN's attention, which is faster than flash attention. It
does not return the sum that sinks need, so prompts of models with sinks always run flash attention. Of prompts without
padding or sinks, whole or after cached tokens, `hf.fused.flash_attention_3` takes those that it can.

If results are batch invariant (`fp8moe.batch_invariant`), all calls with several tokens run
`kernels.decoder_ops.prompt_attention`, whose bits are those of the decode step, on the reference backend too.

The new tokens of a cache in FP8 are quantized first. Calls with several tokens then read what is cached in the dtype of
the model, so that a token sees the same keys in a prompt, whole or in pieces, and in decode steps.

An `AttentionMetadata` replaces the mask. Other attention implementations get transformers' masks, in which
`hf.patches.take_offsets_of_rows` allows rows of different lengths.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe.decode import latents
from fp8moe.hf.fused import flash_attention_3
from fp8moe.hf.fused.attention import AttentionMetadata, UnsupportedAttention, check_metadata
from fp8moe.hf.replaced import attention_chosen
from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.kernels.decoder_ops.decode_attention import StaticCache, decode_attention, share_of_keys
from fp8moe.kernels.decoder_ops.prompt_attention import prompt_attention
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import config

NAME = "fp8moe_decode"


class AttentionMetadataBuilder:
    """Builds the AttentionMetadata of model calls that read a cache of ``length`` columns.

    ``begin``, ``columns`` (B,) int64: for each row, the columns of its first token and of its first new token. A query
    attends to the columns from ``begin`` to the query's own column. ranks: the number of ranks that the key heads are
    split over.
    """

    def __init__(self, begin: Tensor, columns: Tensor, length: int, ranks: int = 1):
        self.begin, self.columns, self.length, self.ranks = begin, columns, length, ranks
        self._built: dict[tuple[int, int, int | None], AttentionMetadata] = {}
        self._before: int | None = None
        self._end: int | None = None

    def next_call(self, *, before: int | None = None, end: int | None = None) -> None:
        """Discard the metadata of the last call.

        before: the number of tokens before those of the next call, if it is the same in all rows and none has padding.
        end: the number of columns that the next call reads; None: all.
        """
        self._built = {}
        self._end = end
        # The causal kernels for prompts without padding round differently from the kernel for other prompts.
        self._before = None if config.settings.batch_invariant else before

    def build(self, new_tokens: int, key_heads: int, window: int | None) -> AttentionMetadata:
        """Return the metadata for layers with these key heads and this window, built once per call."""
        kind = new_tokens, key_heads, window
        if kind not in self._built:
            more = {} if new_tokens == 1 else self._of_several(*kind)
            common = self.begin, self.columns, new_tokens, key_heads, self.length, window
            self._built[kind] = AttentionMetadata(*common, **more, end=self._end)
        return self._built[kind]

    def _of_several(self, new_tokens: int, key_heads: int, window: int | None) -> dict[str, Any]:
        row = torch.arange(len(self.begin) + 1, device=self.begin.device)
        sequences = torch.stack([row * new_tokens, row * (key_heads * self.length), torch.zeros_like(row)])
        sequences[1, :-1] += self.begin
        sequences[2, :-1] = (self.columns + new_tokens - self.begin).clamp(min=0)
        before = self._before
        seen = before is not None and (window is None or window >= before + new_tokens)
        return {"sequences": sequences.int(), "before": before if seen else None}


_builder: ContextVar[AttentionMetadataBuilder | None] = ContextVar("builder", default=None)


@contextmanager
def used_by(model: Any, name: str | None, builder: AttentionMetadataBuilder | None = None) -> Iterator[None]:
    """Within the context, run the model with this attention implementation (None: its own) and metadata builder.

    Other threads run the model, meanwhile, with its own attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, attention_metadata)
    config = model.config.get_text_config(decoder=True)
    before = _builder.set(builder)
    try:
        with ExitStack() as chosen:
            if name is not None:
                chosen.enter_context(attention_chosen(config, name))
                chosen.enter_context(latents.left_as_cached(model, lambda: _builder.get() is not None))
            yield
    finally:
        _builder.reset(before)


def attention_metadata(
    batch_size: int,
    q_length: int,
    *,
    mask_function: Callable,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any,
    **others,
) -> AttentionMetadata:
    """Return the metadata from the builder set by `used_by`. transformers calls this function to make a mask.

    local_size: the size of a sliding window, or None. Raises UnsupportedAttention for masks of other kinds.
    """
    from transformers.masking_utils import causal_mask_function

    if use_vmap or (local_size is None and mask_function is not causal_mask_function):
        raise UnsupportedAttention("a mask that is neither causal nor of a sliding window")
    builder = _builder.get()
    if builder is None or batch_size != len(builder.begin):
        raise UnsupportedAttention("attention outside of a decode step")
    heads = config.get_text_config(decoder=True).num_key_value_heads // builder.ranks
    return builder.build(q_length, heads, local_size)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor | FP8Tensor,
    value: Tensor | FP8Tensor,
    attention_mask: AttentionMetadata,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the cache; transformers calls this function as the attention implementation `NAME`.

    query: (B, heads, T, D). key, value: (B, key heads, columns, D), all columns of the cache or its first columns; in
    FP8 with scales (B, key heads, columns, 1).
    s_aux: (heads,), the sink of each head.
    Returns (B, T, heads, D), and None for the attention weights. The query of a padded token gives 0.

    Raises UnsupportedAttention for dropout, float32, head sizes that the kernel does not support, and any other feature
    that the model asks for: soft caps, position biases, selected tokens; in batch-invariant mode, sinks.
    """
    metadata = attention_mask
    others["dropout"] = dropout or None
    if latents.are_latents(module, key, value):
        return latents.attend(module, query, key, value, metadata, scaling, s_aux=s_aux, **others), None
    batch, heads, new, size = query.shape
    check_metadata(metadata, query.dtype, new, key, value, others)
    if new == 1:
        whole = (_all_columns(x, metadata.length) for x in (key, value))
        cache = StaticCache(*whole, metadata.begin, metadata.columns)
        out = decode_attention(query[:, :, 0], cache, window=metadata.window, sinks=s_aux, scale=scaling)
        return out.view(batch, 1, heads, size), None
    key, value = (fp8_cache.dequantized(x, query.dtype) if isinstance(x, FP8Tensor) else x for x in (key, value))
    if metadata.before is not None and s_aux is None:
        keys, values = (x[:, :, : metadata.before + new] for x in (key, value))
        if flash_attention_3.serves(query, keys, values):
            return flash_attention_3.attend(query, keys, values, scaling), None
        if metadata.before == 0:
            output = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
            return output.transpose(1, 2), None
    return _several_tokens(query, key, value, metadata, scaling, s_aux), None


def _all_columns(x: Tensor | FP8Tensor, length: int) -> Tensor | FP8Tensor:
    """Return keys or values of all ``length`` columns of a cache, given those of its first columns."""
    if isinstance(x, FP8Tensor):
        return FP8Tensor(*(_all_columns(part, length) for part in x))
    return x.as_strided((*x.shape[:2], length, x.shape[3]), x.stride())


def _several_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, new, size = query.shape
    length = metadata.length
    key_heads, end = key.shape[1:3]
    invariant = config.settings.batch_invariant
    if invariant and sinks is not None:
        raise UnsupportedAttention("attention with sinks, which in a prompt has other bits than in a decode step")
    # In the strided view, row b * key_heads * length + j at head h is key j of sequence b and head h.
    strided = (batch * key_heads * length - (key_heads - 1) * length, key_heads, size), (size, length * size, 1)
    output, logsumexp = (prompt_attention if invariant else _flash_attention)(
        query.transpose(1, 2).reshape(batch * new, heads, size),
        key.as_strided(*strided),
        value.as_strided(*strided),
        metadata.sequences,
        most_queries=new,
        most_keys=end,
        window=metadata.window,
        scale=scale,
    )
    if sinks is not None:
        output.mul_(share_of_keys(logsumexp, sinks[:, None]).T[..., None])
    return output.view(batch, new, heads, size)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Tensor,
    *,
    most_queries: int,
    most_keys: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's flash attention on packed sequences; on a CPU, where there is none, `prompt_attention`.

    Returns the output, shaped like ``query``, and logsumexp(scores), (heads, queries) float32.

    query (queries, heads, D); key, value (keys, key heads, D); sequences: as in AttentionMetadata. The last query of a
    sequence attends to all keys of the sequence. Each query before the last attends to one key less than the query
    after it. With a ``window``, a query attends to at most the last ``window`` of these keys.
    """
    if not query.is_cuda:
        sizes = {"most_queries": most_queries, "most_keys": most_keys}
        return prompt_attention(query, key, value, sequences, **sizes, window=window, scale=scale)
    first_query, first_key, count = sequences
    windows = {"window_size_left": window - 1, "window_size_right": 0} if window is not None else {}
    output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q=first_query,
        cum_seq_k=first_key,
        max_q=most_queries,
        max_k=most_keys,
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        seqused_k=count[:-1],
        **windows,
    )
    return output, logsumexp
