"""Runs transformers' indexers of sparse attention on fp8moe's kernels, which score in FP8."""

import functools
import inspect
import pkgutil
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.hf.experts import BOUND
from fp8moe.hf.versions import CACHE_NAMES
from fp8moe.kernels.indexer.checks import NUM_HEADS
from fp8moe.kernels.indexer.mqa_cache import HEAD_DIMS
from fp8moe.kernels.indexer.mqa_logits import mqa_logits
from fp8moe.kernels.indexer.top_k import mqa_top_k
from fp8moe.layers.mqa_indexer import LOGITS_AT_A_TIME, TRANSFORMERS_CLASSES, interleaves, score_operands
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128

CLASSES = dict(zip(TRANSFORMERS_CLASSES, ("deepseek_v32", "glm_moe_dsa"), strict=True))
"""Maps the name of an indexer class in transformers to the name of its model."""

_PARAMETERS = ("self", "hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids")
"""Parameters of an indexer's forward in transformers; one more, the cache, follows them."""

_PACKED_QUERIES = 16
"""Sequences with at most this many queries in total share a kernel launch, which scores every query with all keys."""

_ROW_ALIGNMENT = 16
"""The rows of keys begin at multiples of this many bytes, so that `mqa_logits` reads them in place, without a copy."""


def is_known(path: str) -> bool:
    """Return whether the forward of the indexer class at this path has the parameters that `routed` expects."""
    parameters = tuple(inspect.signature(pkgutil.resolve_name(path).forward).parameters)
    return parameters in [(*_PARAMETERS, cache_name) for cache_name in CACHE_NAMES]


def is_routed(cls: type[nn.Module]) -> bool:
    return hasattr(cls.forward, "_fp8moe")


def refusal(indexer: nn.Module) -> str | None:
    """Return why an indexer keeps running on transformers after `register`, or None if it runs on fp8moe."""
    if indexer.n_heads in NUM_HEADS and indexer.head_dim in HEAD_DIMS:
        return None
    return (
        f"{indexer.n_heads} heads of {indexer.head_dim} values; fp8moe runs {_either(NUM_HEADS)} heads of "
        f"{_either(HEAD_DIMS)}"
    )


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def called(theirs):
    """Wrap `__call__` of an indexer class: before each call, replace a bound transformers forward with fp8moe's.

    accelerate binds forwards to modules (`BOUND`), which would bypass the patched forward of the class.
    """

    @functools.wraps(theirs)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = type(self).forward
        for name in BOUND if is_routed(type(self)) else ():
            bound = vars(self).get(name)
            if isinstance(bound, MethodType) and bound.__func__ is ours.__wrapped__:
                setattr(self, name, MethodType(ours, self))
        return theirs(self, *args, **kwargs)

    return __call__


def routed(theirs):
    """Wrap the forward of an indexer class: run on fp8moe's kernels if these support the indexer's sizes."""
    interleaved = interleaves(theirs)

    @functools.wraps(theirs)
    @torch.no_grad()
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None,
        past_key_values: Any = None,
        cache: Any = None,
    ) -> Tensor:
        past = past_key_values if cache is None else cache
        if refusal(self) is not None:
            return theirs(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past)
        operands = score_operands(self, hidden_states, q_resid, position_embeddings, interleaved=interleaved)
        q, weights, k = operands
        rows = _key_rows(k)
        if past is not None:
            rows = _cached(past, self.layer_idx, rows)
        return _selected(q, weights, rows, attention_mask, self.index_topk)

    forward._fp8moe = True
    return forward


def _selected(q: Tensor, weights: Tensor, rows: Tensor, attention_mask: Tensor, top_k: int) -> Tensor:
    """Select, for each query, the highest-scoring keys of its own sequence that the mask allows, best first.

    q: (B, S, H, D) float8_e4m3fn. weights: (B, S, H) float32. rows: keys as `_key_rows` makes them, (B, T, bytes).
    attention_mask: broadcast to (B, S, T); bool, or floating and added to the scores.
    Returns (B, S, min(top_k, T)) int32. As in transformers, a query that sees fewer keys selects masked ones too.
    """
    batch, length = q.shape[:2]
    keys = rows.shape[1]
    mask = attention_mask.expand(batch, length, keys)
    selected = torch.empty((batch, length, min(top_k, keys)), dtype=torch.int32, device=q.device)
    sequences = max(1, _PACKED_QUERIES // max(1, length))
    queries = max(1, LOGITS_AT_A_TIME // max(1, keys))
    for first in range(0, batch, sequences):
        b = slice(first, first + sequences)
        for first_query in range(0, length, queries):
            part = b, slice(first_query, first_query + queries)
            logits = _logits(q[part], weights[part], rows[b])
            seen = mask[part]
            logits = torch.where(seen, logits, -torch.inf) if seen.dtype is torch.bool else logits + seen
            selected[part] = mqa_top_k(logits.flatten(0, 1), top_k=selected.shape[-1]).view(selected[part].shape)
    return selected


def _logits(q: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Score each sequence's queries with its own keys, in one kernel launch; return (B, S, T) float32."""
    batch, length, _, head_dim = q.shape
    keys = rows.shape[1]
    starts = (torch.arange(batch, dtype=torch.int32, device=q.device) * keys)[:, None].expand(batch, length).flatten()
    logits = mqa_logits(
        *(q.flatten(0, 1), _keys(rows.flatten(0, 1), head_dim), weights.flatten(0, 1), starts, starts + keys),
        fill_masked=False,
    )
    return logits.view(batch, length, batch, keys).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


# Keys are stored in transformers' own cache, which appends, crops, selects and reorders rows. So each row of bytes
# holds both the values of a key and its scale.


def _key_rows(k: Tensor) -> Tensor:
    """Quantize keys (B, S, D) into rows of bytes (B, S, D + 16): E4M3 values, then the float32 scale four times."""
    data, scale = quantize_1x128(k.flatten(0, 1))
    scales = scale.expand(-1, _ROW_ALIGNMENT // scale.itemsize).contiguous()
    return torch.cat((data.view(torch.uint8), scales.view(torch.uint8)), dim=1).unflatten(0, k.shape[:2])


def _keys(rows: Tensor, head_dim: int) -> FP8Tensor:
    """View rows (T, D + 16) as data (T, D) and scale (T,)."""
    data, scales = rows.split((head_dim, _ROW_ALIGNMENT), dim=1)
    return FP8Tensor(data.view(torch.float8_e4m3fn), scales.view(torch.float32)[:, 0])


def _cached(cache: Any, layer: int, rows: Tensor) -> Tensor:
    """Append key rows to a layer of the cache; return all rows of this layer.

    Raises ValueError if the cache was begun before `register`, with keys of another dtype.
    """
    before = getattr(cache.layers[layer], "indexer_keys", None)
    if before is not None and before.dtype != rows.dtype:
        raise ValueError(
            f"cache: layer {layer} has indexer keys in {before.dtype}, cached before "
            "fp8moe.hf.register(). This cache cannot be used further: the indexer's keys of the "
            "new tokens are missing. Start again with a new cache or GraphDecoder (a reset one keeps its buffers)"
        )
    return cache.update_indexer(rows, layer)
