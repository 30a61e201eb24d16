"""Attention over a static cache: PyTorch's flash attention, which reads it where it lies, for steps and for prompts.

In a decode step each sequence and key head is a sequence of its own for the kernel, a slice of the cache's memory, and
the query heads that share the key head are its heads. So keys are read once, and nothing is repeated or masked. Where
these are few, each is split into parts that are sequences again, one for each SM, and `merge_splits` makes one result
of theirs (Flash-Decoding); the kernel's own split is slower there.

For several tokens each row of the batch is a sequence, whose keys the kernel finds in the cache by their strides. For
whole prompts without padding it is PyTorch's own choice of a causal attention, cuDNN's on a GPU, which is faster.

In the place of a mask stands what is visible: where each slice begins and how long it is. The rows may have lengths of
their own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe.integrations.models.interface import WITHOUT_EFFECT
from fp8moe.kernels.decoder_ops.merge_splits import merge_splits
from fp8moe.quant.formats import FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import config

NAME = "fp8moe_decode"

DTYPES = (torch.bfloat16, torch.float16)  # of the kernel
HEAD_DIM_ALIGNMENT, MAX_HEAD_DIM = 8, 256
PART_ALIGNMENT = 64  # keys
MIN_PARTS = 8  # with fewer, the kernel's own split is as fast or faster


class NotServed(ValueError):
    """What the kernel cannot do; says which."""


class Rows:
    """The rows of a cache of `length` columns: row b sees those from begin[b] on, up to the new token itself.

    begin, columns (B,) int64: of the first token, and of the first new one. ranks: over how many the key heads of the
    model are spread. What is `visible` is computed once a call of the model for each kind of layer; `next_call` forgets
    it.
    """

    def __init__(self, begin: Tensor, columns: Tensor, length: int, ranks: int = 1):
        self.begin, self.columns, self.length, self.ranks = begin, columns, length, ranks
        self._of_steps: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}  # kept, with what never changes of it
        self._found: dict[tuple, Tensor] = {}
        self._whole = False

    def next_call(self, *, whole: bool = False) -> None:
        """whole: of all rows it reads all tokens that they have, and none is padding."""
        self._found = {}
        self._whole = whole and not config.settings.batch_invariant  # of others the same kernel would have other bits

    def visible(self, new: int, heads: int, window: int | None) -> Tensor:
        """For `attend`: `new` tokens a row, of a layer with so many key heads."""
        kind = (new, heads, self.length, window)
        if kind not in self._found:
            self._found[kind] = self._of_one(kind) if new == 1 else self._of_several(kind)
            self._found[kind].kind = kind
            self._found[kind].whole = self._whole and (window is None or window >= new)
        return self._found[kind]

    def _of_one(self, kind: tuple) -> Tensor:
        """(3, B * heads * parts + 1) int32: of each part its number, the first row in the cache, and how many count.

        `parts` of the tensor is how many there are of each sequence and head.
        """
        _, heads, length, window = kind
        batch, device = len(self.begin), self.begin.device
        parts = parts_of(batch, heads, device)
        if kind not in self._of_steps:
            numbers = torch.arange(batch * heads * parts + 1, dtype=torch.int32, device=device)
            rows = torch.stack([numbers, numbers // parts * length, torch.zeros_like(numbers)])
            rows.parts = parts
            slices = rows[1, :-1].view(batch, heads, parts).clone()
            self._of_steps[kind] = rows, slices, torch.arange(parts, device=device)
        rows, slices, part = self._of_steps[kind]
        begin, count = self.begin, (self.columns - self.begin + 1).clamp_(min=0)  # padding sees nothing
        if window is not None:
            hidden = (count - window).clamp_(min=0)
            begin, count = begin + hidden, count - hidden
        first, counted = (row[:-1].view(slices.shape) for row in rows[1:])
        if parts > 1:
            size, whole = part_size(count, parts)[:, None], count[:, None]
            skipped = torch.minimum(part * size, whole)
            begin, count = begin[:, None] + skipped, torch.minimum(whole - skipped, size)
        torch.add(slices, begin.view(batch, 1, parts), out=first)
        counted.copy_(count.view(batch, 1, parts).expand_as(counted))
        return rows

    def _of_several(self, kind: tuple) -> Tensor:
        """(3, B + 1) int32: each row's first query, its first key in the cache, and how many keys count."""
        new, heads, length, _ = kind
        row = torch.arange(len(self.begin) + 1, device=self.begin.device)
        first = torch.stack([row * new, row * (heads * length), torch.zeros_like(row)])
        first[1, :-1] += self.begin
        first[2, :-1] = (self.columns + new - self.begin).clamp(min=0)
        return first.int()


def parts_of(batch: int, heads: int, device: torch.device) -> int:
    """Into how many parts the keys of each of so many sequences and heads are split: so that there is about one for
    each SM, or 1. Where results are to be batch invariant, as for one sequence, enough that the kernel splits none."""
    if config.settings.batch_invariant:
        return ceil_div(2 * _sms(device), heads)
    parts = _sms(device) // (batch * heads)
    return parts if parts >= MIN_PARTS else 1


def part_size(count: Any, parts: int) -> Any:
    """Keys of a part of `count` keys, a multiple of those that the kernel takes at a time; of an int or a tensor."""
    return -(-count // (parts * PART_ALIGNMENT)) * PART_ALIGNMENT


def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_rows: ContextVar[Rows | None] = ContextVar("rows", default=None)


@contextmanager
def used_by(model: Any, name: str | None, rows: Rows | None = None) -> Iterator[None]:
    """Within it the model's attention implementation is `name`, or for None its own, and `visible` shows these rows."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible)
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    config._attn_implementation = name or own
    before = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(before)
        config._attn_implementation = own


def visible(
    batch_size: int,
    q_length: int,
    *,
    mask_function: Callable,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any,
    **others,
) -> Tensor:
    """In the place of transformers' mask: `Rows.visible` of the rows that `used_by` names.

    local_size: of a sliding window. Raises NotServed for other masks.
    """
    from transformers.masking_utils import causal_mask_function

    if use_vmap or (local_size is None and mask_function is not causal_mask_function):
        raise NotServed("a mask that is neither causal nor of a sliding window")
    rows = _rows.get()
    if rows is None or batch_size != len(rows.begin):
        raise NotServed("attention outside of a decode step")
    heads = config.get_text_config(decoder=True).num_key_value_heads // rows.ranks
    return rows.visible(q_length, heads, local_size)


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
    """query (B, heads, T, D), key and value (B, key heads, columns, D) of the cache, or the first of its columns; what
    is visible -> (B, T, heads, D). The query of a padded token gives 0.

    Raises NotServed for dropout, float32, sizes that the kernel does not have, and whatever else the model passes on:
    soft caps, sinks, position biases, selected tokens.
    """
    _check(query, key, value, attention_mask, dropout, others)
    batch, heads, new, size = query.shape
    if new == 1:
        shared = query.view(batch, key.shape[1], 1, -1, size).expand(-1, -1, attention_mask.parts, -1, -1)
        return _one_token(shared, key, value, attention_mask, scaling, False).view(batch, 1, heads, size), None
    if attention_mask.whole:
        keys, values = key[:, :, :new], value[:, :, :new]
        output = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    return _several_tokens(query, key, value, attention_mask, scaling), None


def attend_one_token(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    quantized: bool,
    **others: Any,
) -> Tensor | FP8Tensor:
    """`attend` for one token, with as many copies of the queries as there are parts -> (B, heads * D) or an FP8Tensor.

    query: (B, copies * heads, 1, D), the copies as `kernels.decoder_ops.rotary` makes them.
    """
    _check(query, key, value, attention_mask, dropout, others)
    batch, _, _, size = query.shape
    shared = query.reshape(batch, key.shape[1], attention_mask.parts, -1, size)
    return _one_token(shared, key, value, attention_mask, scaling, quantized)


attend.one_token = attend_one_token  # for who calls attend as an interface


def _check(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, dropout: float, others: dict[str, Any]) -> None:
    _, _, new, size = query.shape
    key_heads = key.shape[1]
    given = sorted(name for name, other in others.items() if other is not None and name not in WITHOUT_EFFECT)
    if given or dropout:
        raise NotServed(f"attention with {', '.join(given) or 'dropout'}")
    if query.dtype not in DTYPES or value.shape != key.shape:
        raise NotServed(f"{query.dtype}, keys {tuple(key.shape)} and values {tuple(value.shape)}")
    if size % HEAD_DIM_ALIGNMENT or size > MAX_HEAD_DIM:
        raise NotServed(f"heads of {size} values")
    length = key.stride(1) // size
    if any(x.stride() != (key_heads * length * size, length * size, size, 1) for x in (key, value)):
        raise NotServed("keys that are no static cache's")
    if list(getattr(rows, "kind", ()))[:3] != [new, key_heads, length]:
        raise NotServed(f"{key_heads} key heads of {length} columns, with what is visible of others")


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float | None, quantized: bool
) -> Tensor | FP8Tensor:
    """query (B, key heads, parts, G, D), of equal parts -> (B, key heads * G * D), or of it an FP8Tensor."""
    batch, key_heads, parts, shared, size = query.shape
    length = key.stride(1) // size
    slices = (batch * key_heads * length, 1, size), (size, size, 1)
    output, lse = _flash_attention(
        query.reshape(batch * key_heads * parts, shared, size),
        key.as_strided(*slices),
        value.as_strided(*slices),
        rows,
        1,
        part_size(length, parts),
        None,
        scale,
    )
    if parts == 1:
        output = output.view(batch, key_heads * shared * size)
        return quantize_1x128(output) if quantized else output
    lse = lse.view(shared, batch, key_heads, parts).permute(1, 2, 3, 0)
    counts = rows[2, :-1].view(batch, key_heads, parts)
    return merge_splits(output.view(query.shape), lse, counts, quantized=quantized)


def _several_tokens(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float | None) -> Tensor:
    batch, heads, new, size = query.shape
    _, _, length, window = rows.kind
    key_heads, end = key.shape[1:3]
    # Row b * key_heads * length + j of it has at each head h the key j of (b, h).
    strided = (batch * key_heads * length - (key_heads - 1) * length, key_heads, size), (size, length * size, 1)
    output, _ = _flash_attention(
        query.transpose(1, 2).reshape(batch * new, heads, size),
        key.as_strided(*strided),
        value.as_strided(*strided),
        rows,
        new,
        end,
        window,
        scale,
    )
    return output.view(batch, new, heads, size)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    most_queries: int,
    most_keys: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """query (queries, heads, D); key, value (keys, key heads, D); rows (3, sequences + 1): of each sequence the first
    query, which is also the end of those before it, the first key, and how many keys count.

    The last query sees the last of these keys, and each query before it one less; no more than `window` of them.
    Returns the attention, like query, and the logarithms of the softmax sums (heads, queries) float32.
    """
    first_query, first_key, count = rows
    several = most_queries > 1
    windows = {"window_size_left": window - 1, "window_size_right": 0} if window is not None else {}
    return torch.ops.aten._flash_attention_forward(
        *(query, key, value, first_query, first_key, most_queries, most_keys, 0.0, several, False),
        scale=scale,
        seqused_k=count[:-1],
        **windows,
    )[:2]
