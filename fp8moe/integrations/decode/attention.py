"""Attention over a static cache: PyTorch's flash attention, which reads it where it lies, for steps and for prompts.

In a decode step each row and key head is a sequence of its own for the kernel, a slice of the cache's memory, and the
query heads that share the key head are its heads. So keys are read once, and nothing is repeated or masked. Where these
sequences are few, each is split into parts that are sequences again, one for each SM, and `merge_splits` makes one
result of theirs (Flash-Decoding); the kernel's own split is slower there.

For several tokens each row of the batch is a sequence, whose keys the kernel finds in the cache by their strides. For
whole prompts without padding it is PyTorch's own choice of a causal attention, cuDNN's on a GPU, which is faster.

An `AttentionMetadata` stands in the place of a mask. Attention that takes a mask has transformers' own, for which
`take_offsets_of_rows` lets the rows have lengths of their own.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe.integrations import transformers_versions
from fp8moe.integrations.models.attention import WITHOUT_EFFECT, AttentionMetadata
from fp8moe.kernels.decoder_ops.merge_splits import merge_splits
from fp8moe.quant.formats import FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import config

NAME = "fp8moe_decode"

DTYPES = (torch.bfloat16, torch.float16)  # of the kernel
HEAD_DIM_ALIGNMENT, MAX_HEAD_DIM = 8, 256
PART_ALIGNMENT = 64  # keys
MIN_PARTS = 8  # with fewer, the kernel's own split is as fast or faster


class UnsupportedAttention(ValueError):
    """Attention that the kernel cannot compute; the message says what of it."""


class _Kind(NamedTuple):
    new_tokens: int
    key_heads: int
    columns: int
    window: int | None


class _StepBuffers(NamedTuple):
    """What a decode step writes anew, in place, and what never changes: each part's cache slice and its number."""

    metadata: AttentionMetadata
    slices: Tensor
    part: Tensor


class AttentionMetadataBuilder:
    """Builds the AttentionMetadata of calls that read a cache of `length` columns.

    begin, columns (B,) int64: of each row the column of its first token, and of the first new one; a query sees those
    from begin on, up to the new token itself. ranks: over how many the key heads of the model are spread.
    """

    def __init__(self, begin: Tensor, columns: Tensor, length: int, ranks: int = 1):
        self.begin, self.columns, self.length, self.ranks = begin, columns, length, ranks
        self._step_buffers: dict[_Kind, _StepBuffers] = {}
        self._built: dict[_Kind, AttentionMetadata] = {}
        self._whole = False

    def next_call(self, *, whole: bool = False) -> None:
        """Forget what was built for the last call. whole: the rows have no tokens but the new ones, and no padding."""
        self._built = {}
        self._whole = whole and not config.settings.batch_invariant  # of others the same kernel would have other bits

    def build(self, new_tokens: int, key_heads: int, window: int | None) -> AttentionMetadata:
        """Return the metadata of layers of this kind, computed once a call."""
        kind = _Kind(new_tokens, key_heads, self.length, window)
        if kind not in self._built:
            self._built[kind] = self._of_one(kind) if new_tokens == 1 else self._of_several(kind)
        return self._built[kind]

    def _of_one(self, kind: _Kind) -> AttentionMetadata:
        if kind not in self._step_buffers:
            self._step_buffers[kind] = self._new_buffers(kind)
        metadata, slices, part = self._step_buffers[kind]
        batch, _, parts = slices.shape
        begin, count = self.begin, (self.columns - self.begin + 1).clamp_(min=0)  # padding sees nothing
        if kind.window is not None:
            hidden = (count - kind.window).clamp_(min=0)
            begin, count = begin + hidden, count - hidden
        first, counted = (row[:-1].view(slices.shape) for row in metadata.sequences[1:])
        if parts > 1:
            size, whole = part_size(count, parts)[:, None], count[:, None]
            skipped = torch.minimum(part * size, whole)
            begin, count = begin[:, None] + skipped, torch.minimum(whole - skipped, size)
        torch.add(slices, begin.view(batch, 1, parts), out=first)
        counted.copy_(count.view(batch, 1, parts).expand_as(counted))
        return metadata

    def _new_buffers(self, kind: _Kind) -> _StepBuffers:
        batch, device = len(self.begin), self.begin.device
        parts = parts_of(batch, kind.key_heads, device)
        number = torch.arange(batch * kind.key_heads * parts + 1, dtype=torch.int32, device=device)
        sequences = torch.stack([number, number // parts * kind.columns, torch.zeros_like(number)])
        slices = sequences[1, :-1].view(batch, kind.key_heads, parts).clone()
        metadata = AttentionMetadata(sequences, **kind._asdict(), parts=parts)
        return _StepBuffers(metadata, slices, torch.arange(parts, device=device))

    def _of_several(self, kind: _Kind) -> AttentionMetadata:
        row = torch.arange(len(self.begin) + 1, device=self.begin.device)
        first_key = row * (kind.key_heads * kind.columns)
        sequences = torch.stack([row * kind.new_tokens, first_key, torch.zeros_like(row)])
        sequences[1, :-1] += self.begin
        sequences[2, :-1] = (self.columns + kind.new_tokens - self.begin).clamp(min=0)
        whole = self._whole and (kind.window is None or kind.window >= kind.new_tokens)
        return AttentionMetadata(sequences.int(), **kind._asdict(), whole=whole)


def parts_of(batch: int, heads: int, device: torch.device) -> int:
    """Return how many parts the keys of a row and key head are split into: about one for each SM in all.

    Where results are to be batch invariant: the same for all batches, and enough that the kernel splits none.
    """
    if config.settings.batch_invariant:
        return ceil_div(2 * _sms(device), heads)
    parts = _sms(device) // (batch * heads)
    return parts if parts >= MIN_PARTS else 1


def part_size(count: Any, parts: int) -> Any:
    """Return the keys of a part of `count` keys, a multiple of what the kernel takes at a time; an int or a tensor."""
    return -(-count // (parts * PART_ALIGNMENT)) * PART_ALIGNMENT


def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_builder: ContextVar[AttentionMetadataBuilder | None] = ContextVar("builder", default=None)


@contextmanager
def used_by(model: Any, name: str | None, builder: AttentionMetadataBuilder | None = None) -> Iterator[None]:
    """Set the model's attention implementation, None for its own, and what builds the metadata instead of masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, attention_metadata)
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    config._attn_implementation = name or own
    before = _builder.set(builder)
    try:
        yield
    finally:
        _builder.reset(before)
        config._attn_implementation = own


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
    """Return the metadata that the builder of `used_by` gives, in the place of transformers' mask.

    local_size: of a sliding window. Raises UnsupportedAttention for other masks.
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
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionMetadata,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    quantized: bool | None = None,
    **others: Any,
) -> tuple[Tensor | FP8Tensor, None]:
    """query (B, heads, T, D), key and value (B, key heads, columns, D) of the cache, or the first of its columns
    -> (B, T, heads, D). The query of a padded token gives 0.

    quantized: given by a caller that knows this function, for one token: its query (B, parts * heads, 1, D) has a copy
    for each part, which `kernels.decoder_ops.rotary` makes, and the result is (B, heads * D), or an FP8Tensor of it.

    Raises UnsupportedAttention for dropout, float32, sizes that the kernel does not have, and whatever else the model
    passes on: soft caps, sinks, position biases, selected tokens.
    """
    metadata = attention_mask
    _check(query, key, value, metadata, dropout, others)
    batch, heads, new, size = query.shape
    if quantized is not None:
        copies = query.reshape(batch, key.shape[1], metadata.parts, -1, size)
        return _one_token(copies, key, value, metadata, scaling, quantized), None
    if new == 1:
        copies = query.view(batch, key.shape[1], 1, -1, size).expand(-1, -1, metadata.parts, -1, -1)
        return _one_token(copies, key, value, metadata, scaling, False).view(batch, 1, heads, size), None
    if metadata.whole:
        keys, values = key[:, :, :new], value[:, :, :new]
        output = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    return _several_tokens(query, key, value, metadata, scaling), None


def _check(
    query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, dropout: float, others: dict[str, Any]
) -> None:
    _, _, new, size = query.shape
    key_heads = key.shape[1]
    given = sorted(name for name, other in others.items() if other is not None and name not in WITHOUT_EFFECT)
    if given or dropout:
        raise UnsupportedAttention(f"attention with {', '.join(given) or 'dropout'}")
    if query.dtype not in DTYPES or value.shape != key.shape:
        raise UnsupportedAttention(f"{query.dtype}, keys {tuple(key.shape)} and values {tuple(value.shape)}")
    if size % HEAD_DIM_ALIGNMENT or size > MAX_HEAD_DIM:
        raise UnsupportedAttention(f"heads of {size} values")
    length = key.stride(1) // size
    if any(x.stride() != (key_heads * length * size, length * size, size, 1) for x in (key, value)):
        raise UnsupportedAttention("keys that are no static cache's")
    known = isinstance(metadata, AttentionMetadata)
    if not known or (metadata.new_tokens, metadata.key_heads, metadata.columns) != (new, key_heads, length):
        raise UnsupportedAttention(f"{key_heads} key heads of {length} columns, with what is visible of others")


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, scale: float | None, quantized: bool
) -> Tensor | FP8Tensor:
    """query (B, key heads, parts, G, D), of equal parts -> (B, key heads * G * D), or of it an FP8Tensor."""
    batch, key_heads, parts, shared, size = query.shape
    length = metadata.columns
    slices = (batch * key_heads * length, 1, size), (size, size, 1)
    output, lse = _flash_attention(
        query.reshape(batch * key_heads * parts, shared, size),
        key.as_strided(*slices),
        value.as_strided(*slices),
        metadata.sequences,
        1,
        part_size(length, parts),
        None,
        scale,
    )
    if parts == 1:
        output = output.view(batch, key_heads * shared * size)
        return quantize_1x128(output) if quantized else output
    lse = lse.view(shared, batch, key_heads, parts).permute(1, 2, 3, 0)
    counts = metadata.sequences[2, :-1].view(batch, key_heads, parts)
    return merge_splits(output.view(query.shape), lse, counts, quantized=quantized)


def _several_tokens(
    query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, scale: float | None
) -> Tensor:
    batch, heads, new, size = query.shape
    length = metadata.columns
    key_heads, end = key.shape[1:3]
    # Row b * key_heads * length + j of it has at each head h the key j of (b, h).
    strided = (batch * key_heads * length - (key_heads - 1) * length, key_heads, size), (size, length * size, 1)
    output, _ = _flash_attention(
        query.transpose(1, 2).reshape(batch * new, heads, size),
        key.as_strided(*strided),
        value.as_strided(*strided),
        metadata.sequences,
        new,
        end,
        metadata.window,
        scale,
    )
    return output.view(batch, new, heads, size)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Tensor,
    most_queries: int,
    most_keys: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """query (queries, heads, D); key, value (keys, key heads, D); sequences: of an AttentionMetadata.

    A sequence's last query sees the last of its keys, and each query before it one less; no more than `window` of them.
    Returns the attention, like query, and the logarithms of the softmax sums (heads, queries) float32.
    """
    first_query, first_key, count = sequences
    windows = {"window_size_left": window - 1, "window_size_right": 0} if window is not None else {}
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q=first_query,
        cum_seq_k=first_key,
        max_q=most_queries,
        max_k=most_keys,
        dropout_p=0.0,
        is_causal=most_queries > 1,
        return_debug_mask=False,
        scale=scale,
        seqused_k=count[:-1],
        **windows,
    )
    return output, lse


@functools.cache
def take_offsets_of_rows() -> None:
    """Let transformers' masks for "sdpa" and "eager" take a q_offset (B,) too: one for each row of the batch.

    Models ask for the names "sdpa" and "eager", so those must stay. All that transformers itself passes, an int or a
    tensor of no dimension, goes to its own functions as it is.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    for name, of_rows in (("sdpa", sdpa_mask), ("eager", transformers_versions.eager_mask)):
        AttentionMaskInterface.register(name, _with_offsets_of_rows(ALL_MASK_ATTENTION_FUNCTIONS[name], of_rows))


def _with_offsets_of_rows(mask: Callable, of_rows: Callable) -> Callable:
    @functools.wraps(mask)
    def build(*args, **kwargs) -> Tensor | None:
        offset = kwargs.get("q_offset")
        if not isinstance(offset, Tensor) or offset.dim() == 0:
            return mask(*args, **kwargs)
        function = kwargs["mask_function"]

        def shifted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return function(batch, head, query + offset[batch], key)

        return of_rows(*args, **kwargs | {"q_offset": 0, "mask_function": shifted, "allow_is_causal_skip": False})

    return build
