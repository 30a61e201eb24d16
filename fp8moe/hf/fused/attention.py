"""Fused attention modules: q, k and v in one GEMM, then head norms, rotary embedding and cache write in one kernel.

The attention itself is the model's own choice (`model.config._attn_implementation`), except for decode steps of
GraphDecoder, which run fp8moe's kernel, and for prompts that `flash_attention_3` takes in place of "sdpa".
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fp8moe.hf.fused import flash_attention_3, known_forwards, linears, norms
from fp8moe.hf.fused.known_forwards import called, form_of, rotary_of, runs_as_written
from fp8moe.hf.versions import update_cache
from fp8moe.kernels.decoder_ops import decode_attention, fp8_cache, rotary
from fp8moe.kernels.decoder_ops.rms_norm import Normed
from fp8moe.quant.formats import FP8Tensor

WITHOUT_EFFECT = (
    *("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
)
"""Keyword arguments that can be ignored, as the attention mask already says which keys each query sees."""


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """What GraphDecoder passes as attention_mask: which keys of a static cache the queries of a call see.

    GraphDecoder's mask function returns it, once for each kind of layer, and transformers passes it on to attention.

    begin, columns: (B,) int64, the cache columns of each row's first token and of its first new token.
    new_tokens: number of new tokens per row. key_heads, length: the numbers of heads and columns of the layer's cache.
    window: the most keys that a query sees, None for all.
    sequences: None for one new token, otherwise (3, B + 1) int32. Column b describes row b of the batch: the index of
    the first query, the index of the first key in the flattened cache, and the number of keys. The last column holds
    the total number of queries, and the end of the flattened cache.
    before: the number of tokens before the new ones, if it is the same in all rows, no row has padding, and the window
    is not smaller than a row; otherwise None.
    end: the number of columns that the call reads.
    """

    begin: Tensor
    columns: Tensor
    new_tokens: int
    key_heads: int
    length: int
    window: int | None
    sequences: Tensor | None = None
    before: int | None = None
    end: int | None = None

    @cached_property
    def first(self) -> Tensor:
        """The columns of each row's first token, (B,) int32."""
        return self.begin.int()

    @cached_property
    def ends(self) -> Tensor:
        """The number of columns up to each row's last new token, (B,) int32."""
        return (self.columns + self.new_tokens).int()

    def seen(self, indices: Tensor) -> Tensor:
        """Return chosen columns (B, T, k) int32, with -1 for those that a query does not see."""
        begin, last = self._bounds
        return torch.where((indices >= begin) & (indices <= last), indices, -1).int()

    def __getitem__(self, index: tuple) -> "Visible":
        """Return which columns each query sees, as transformers' indexers read it from a mask.

        index: [:, 0, :, :], of a mask (B, 1, T, end).
        """
        if index != (slice(None), 0, slice(None), slice(None)):
            raise UnsupportedAttention(f"a mask that is read at {index}")
        return Visible(*self._bounds, self.length if self.end is None else self.end)

    @property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """The first and the last column that each query sees, (B, 1, 1) and (B, T, 1)."""
        new = torch.arange(self.new_tokens, device=self.begin.device)
        return self.begin[:, None, None], (self.columns[:, None] + new)[..., None]


class Visible:
    """A mask (B, T, columns) of the columns that each query sees, made only where it is read.

    first (B, 1, 1), last (B, T, 1): the first and the last column that each query sees.
    """

    dtype = torch.bool

    def __init__(self, first: Tensor, last: Tensor, columns: int):
        self.first, self.last, self.columns = first, last, columns

    def expand(self, *_: int) -> "Visible":
        return self

    def __getitem__(self, part: tuple[slice, slice]) -> Tensor:
        """Return the mask of some rows and queries."""
        rows, queries = part
        columns = torch.arange(self.columns, device=self.first.device)
        return (columns >= self.first[rows]) & (columns <= self.last[rows, queries])

    def __invert__(self) -> Tensor:
        return ~self[:, :]


class UnsupportedAttention(ValueError):
    """Raised for an attention that fp8moe's kernels do not support."""


def check_metadata(
    metadata: Any,
    dtype: torch.dtype,
    new: int,
    key: Tensor | FP8Tensor,
    value: Tensor | FP8Tensor,
    others: dict[str, Any],
) -> None:
    """Raise UnsupportedAttention for an attention that the kernels for static caches do not support.

    metadata: the attention_mask. dtype: the dtype of q. new: new tokens per row. key, value: (B, key heads,
    columns, D), the cache, or FP8Tensors of such data. others: further keyword arguments that the model passes to its
    attention.
    """
    (key, scales), (value, _) = map(fp8_cache.parts, (key, value))
    key_heads, size = key.shape[1], key.shape[-1]
    unsupported(others)
    if dtype not in decode_attention.DTYPES or value.shape != key.shape:
        raise UnsupportedAttention(f"{dtype}, keys {tuple(key.shape)} and values {tuple(value.shape)}")
    if not decode_attention.serves(size):
        raise UnsupportedAttention(f"heads of {size} values")
    if scales is not None and size % fp8_cache.MULTIPLE:
        raise UnsupportedAttention(f"heads of {size} values in FP8, which is no multiple of {fp8_cache.MULTIPLE}")
    length = key.stride(1) // size
    if any(x.stride() != (key_heads * length * size, length * size, size, 1) for x in (key, value)):
        raise UnsupportedAttention("keys that are no static cache's")
    known = isinstance(metadata, AttentionMetadata)
    if not known or (metadata.new_tokens, metadata.key_heads, metadata.length) != (new, key_heads, length):
        raise UnsupportedAttention(f"{key_heads} key heads of {length} columns, with what is visible of others")


def unsupported(others: dict[str, Any]) -> None:
    """Raise UnsupportedAttention for keyword arguments that ask an attention for more than a mask does."""
    given = sorted(name for name, other in others.items() if other is not None and name not in WITHOUT_EFFECT)
    if given:
        raise UnsupportedAttention(f"attention with {', '.join(given)}")


def attention_interface(module: nn.Module) -> Callable:
    """Return the attention function that the module calls."""
    return called(module, "ALL_ATTENTION_FUNCTIONS").get_interface(
        module.config._attn_implementation, called(module, "eager_attention_forward")
    )


def serves(module: nn.Module, dtype: torch.dtype, position_embeddings: tuple[Tensor, Tensor] | None) -> bool:
    """Return whether `attend` computes the same as the module's own forward for an input of this dtype."""
    form = form_of(module, known_forwards.ATTENTION)
    rotation = rotary_of(module)
    if form is None or rotation is None or not runs_as_written(module) or not position_embeddings:
        return False
    cos = position_embeddings[0]
    rotated = cos.shape[-1] * (2 if rotation.half else 1)
    if cos.dim() != 3 or cos.dtype is not dtype or not rotary.serves(module.head_dim, rotated):
        return False
    return not _has_norms(module, form) or all(norms.serves(part, dtype) for part in (module.q_norm, module.k_norm))


def prepare(module: nn.Module) -> str | None:
    """Make the weights of q, k and v adjacent in memory; return a description of what is fused.

    Returns None for unknown code.
    """
    form = form_of(module, known_forwards.ATTENTION)
    if form is None or rotary_of(module) is None:
        return None
    if _has_norms(module, form) and not (runs_as_written(module.q_norm) and runs_as_written(module.k_norm)):
        return None  # for example, transformers' tensor parallelism replaces the forwards of these norms
    together = runs_as_written(module) and linears.pack(inputs(module))
    return "q, k and v as one, heads and cache" if together else "heads and cache"


def attend(
    module: nn.Module,
    normed: Normed,
    lead: torch.Size,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the module's result (B, T, H), including o_proj.

    normed: the module's input as rows (B * T, H), quantized or not. lead: (B, T). Other arguments: those of the
    module's own forward.
    """
    form = form_of(module, known_forwards.ATTENTION)
    size = module.head_dim
    cos, sin = map(_whole, position_embeddings) if rotary_of(module).half else position_embeddings
    parts = linears.project(normed.quantized or normed.values, inputs(module), cos.dtype)
    q, k, v = (part.view(*lead, -1, size) for part in parts)
    past = past_key_values if cache is None else cache
    layer = decoder_layer(past, module.layer_idx, k, v)
    if layer is None:
        batch, tokens, heads, _ = k.shape
        keys, values = torch.empty((2, batch, heads, tokens, size), dtype=k.dtype, device=k.device)
        columns = None
    else:
        keys, values, columns = *layer.cached(), layer.position.columns
    norm = {}
    if _has_norms(module, form):
        norm = {
            "q_weight": module.q_norm.weight,
            "k_weight": module.k_norm.weight,
            "eps": module.q_norm.variance_epsilon,
        }
    if lead[1] == 1 and layer is not None and isinstance(attention_mask, AttentionMetadata):
        check_metadata(attention_mask, q.dtype, 1, keys, values, kwargs)
        new = rotary.NewTokens(k[:, 0], v[:, 0], cos[:, 0], sin[:, 0], **norm)
        output = decode_attention.decode_attention(
            q[:, 0],
            decode_attention.StaticCache(keys, values, attention_mask.begin, attention_mask.columns),
            new=new,
            window=attention_mask.window,
            sinks=module.sinks if form.sinks else None,
            scale=module.scaling,
            quantized=linears.weights(module.o_proj) is not None,
            early=True,  # safe: the preceding kernel, a projection, writes only q, k and v
        )
        if isinstance(output, FP8Tensor):
            return linears.project(output, [module.o_proj], cos.dtype)[0].view(*lead, -1)
        return module.o_proj(output.view(*lead, -1))
    new = rotary.NewTokens(k, v, cos, sin, **norm)
    query = rotary.rotary(q, new, keys, values, columns=columns).transpose(1, 2)
    if layer is not None:
        end = layer.position.end
        keys, values = (fp8_cache.first_columns(x, end) for x in (keys, values))
    elif past is not None:
        keys, values = update_cache(past_key_values, cache, keys, values, module.layer_idx, kwargs)
    match form.window:
        case "module":
            kwargs["sliding_window"] = module.sliding_window
        case "config":
            kwargs["sliding_window"] = getattr(module.config, "sliding_window", None)
    causal = not form.sinks and _is_causal(module, query, keys, attention_mask, kwargs)
    if causal and flash_attention_3.serves(query, keys, values):
        output = flash_attention_3.attend(query, keys, values, module.scaling)
    else:
        kwargs |= {"dropout": 0.0, "scaling": module.scaling} | ({"s_aux": module.sinks} if form.sinks else {})
        output, _ = attention_interface(module)(module, query, keys, values, attention_mask, **kwargs)
    return module.o_proj(output.reshape(*lead, -1))


def _is_causal(module: nn.Module, query: Tensor, key: Any, mask: Any, others: dict[str, Any]) -> bool:
    """Return whether the attention is that of "sdpa" without a mask, from each new token to itself and those before it.

    others: further keyword arguments of the module's forward.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is not None or query.shape[2] != key.shape[2] or attention_interface(module) is not sdpa_attention_forward:
        return False
    if any(value is not None and name not in WITHOUT_EFFECT for name, value in others.items()):
        return False
    asked = others.get("is_causal")
    return getattr(module, "is_causal", True) if asked is None else asked


_doubled: MutableMapping[Tensor, tuple[int, Tensor]] = WeakIdKeyDictionary()


def _whole(table: Tensor) -> Tensor:
    """Repeat the columns of a table (1 or B, T, R / 2) of cos or sin; made once for all layers, which share a table."""
    if torch.compiler.is_compiling() or table.is_inference():  # such a table could change unnoticed
        return torch.cat([table, table], dim=-1)
    version, whole = _doubled.get(table, (None, table))
    if version != table._version:
        whole = torch.cat([table, table], dim=-1)
        _doubled[table] = table._version, whole
    return whole


def inputs(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the linears that project the module's input."""
    return module.q_proj, module.k_proj, module.v_proj


def _has_norms(module: nn.Module, form: known_forwards.Attention) -> bool:
    return form.norm == "always" or (form.norm == "if use_qk_norm" and bool(module.use_qk_norm))


def decoder_layer(past: Any, index: int, k: Tensor, v: Tensor) -> Any:
    """Return layer `index` of a cache if it is GraphDecoder's, otherwise None.

    If the layer has no memory yet, allocate it for k and v (B, T, key heads, D).
    """
    layer = next(iter(getattr(past, "layers", ())[index : index + 1]), None)  # some caches create their layers lazily
    if not hasattr(layer, "position"):
        return None
    if not layer.is_initialized:
        layer.lazy_initialization(k.transpose(1, 2), v.transpose(1, 2))
    return layer
