"""The KV cache of a decode step: tensors at fixed addresses, written in place, without counters on the host."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.kernels.latent.fp8_latents import quantize_latents
from fp8moe.quant.formats import FP8Tensor


class CachePosition:
    """The cache columns of a call's new tokens, shared by all attention layers.

    columns (B,) int64: the column of each row's first new token; whoever calls the model advances ``columns`` after
    the call. ragged: whether rows may have different columns.
    """

    def __init__(self, size: int, device: torch.device, ragged: bool):
        self.columns = torch.zeros(size, dtype=torch.int64, device=device)
        self.ragged = ragged
        self.next_call()

    def next_call(self, count: int = 1, start: int | None = None, end: int | None = None) -> None:
        """Prepare for a call that writes ``count`` tokens per row.

        start: the column of the first token, the same in all rows; None if only the device knows. end: the call reads
        the columns before ``end``; None for all columns.
        """
        self.start, self.end, self.count = start, end, count
        self.call = object()
        if start is None:  # (B, 1, count, 1): the column of each new token, computed once for all layers
            index = self.columns[:, None]
            if count > 1:
                index = index + torch.arange(count, device=index.device)
            self.index = index[:, None, :, None]

    def length(self, written: bool) -> int | Tensor:
        """Return the number of cached tokens, in the form that transformers' masks expect.

        written: whether to count the tokens of this call. Returns an int, a tensor without dimensions or, if rows may
        have different numbers of tokens, a tensor of shape (B,).
        """
        before = self.start
        if before is None:
            before = self.columns if self.ragged else self.columns[0]
        return before + self.count if written else before

    def write(self, target: Tensor, dim: int, values: Tensor) -> Tensor:
        """Write new values into ``target``; return the columns of ``target`` that the new tokens may attend to.

        values: (B, Hk, count, D) or (B, count, D). dim: the dimension of the columns, 2 or 1.
        """
        if self.start is None:
            index = self.index if dim == 2 else self.index[:, 0]
            target.scatter_(dim, index.expand(values.shape), values)
        else:
            target.narrow(dim, self.start, values.shape[dim]).copy_(values)
        return target if self.end is None else target.narrow(dim, 0, self.end)


def static_cache(config: Any, max_length: int, position: CachePosition, dtype: torch.dtype | None = None) -> Any:
    """Return a StaticCache whose attention layers all hold ``max_length`` tokens and write where ``position`` says.

    dtype: float8_e4m3fn for keys and values in FP8, in layers without a sliding window; None for those of the model.

    transformers' own layers write all rows at the same column, and its sliding-window layers count tokens on the host,
    which a CUDA graph cannot follow. They are replaced by full-length layers; attention sees only the window of them.
    Layers of linear attention, which hold states of a fixed size, stay.

    Raises ValueError for layers of other kinds.
    """
    from transformers import StaticCache

    try:
        cache = StaticCache(config=config, max_cache_len=max_length)
    except KeyError as error:
        raise ValueError(f"model: transformers has no static cache for its layers of type {error}") from error
    chunked = "chunked_attention" in (getattr(config.get_text_config(decoder=True), "layer_types", None) or [])
    how = max_length, position, chunked, dtype is not None
    cache.layers[:] = [_layer(index, layer, *how) for index, layer in enumerate(cache.layers)]
    return cache


def _layer(index: int, layer: Any, max_length: int, position: CachePosition, chunked: bool, fp8: bool) -> Any:
    """Return the replacement for a layer of transformers' cache, or the layer itself if it can stay."""
    name = type(layer).__name__
    if name in ("LinearAttentionLayer", "DummyLayer"):
        return layer
    if name not in _own_layers() or (chunked and layer.is_sliding):
        raise ValueError(
            f"model: layer {index} keeps a {name}; GraphDecoder serves full, sliding-window, indexed and linear "
            "attention"
        )
    name = f"{name} in FP8" if fp8 and f"{name} in FP8" in _own_layers() else name
    own = _own_layers()[name](max_cache_len=max_length, number_of_states=getattr(layer, "number_of_states", 0))
    own.position = position
    return own


def copy_rows(target: Any, size: int, rows: Tensor, source: Any, chosen: Tensor, length: int) -> None:
    """Copy rows of one cache into another cache: the first ``length`` columns and all states of each row.

    ``chosen`` (n,): the rows of ``source`` to copy. ``rows`` (n,): the rows of ``target`` to write. size: the number of
    rows of the target. Raises ValueError if a layer of the source keeps tensors of unknown kinds.
    """
    for index, (mine, theirs) in enumerate(zip(target.layers, source.layers, strict=True)):
        tensors = _row_tensors(index, theirs)
        _allocate(mine, {name: tensor[:1].expand(size, *tensor.shape[1:]) for name, tensor in tensors.items()})
        targets = _row_tensors(index, mine)
        for name, values in tensors.items():
            to, columns = targets[name], _COLUMNS.get(name)
            if columns is not None:
                to, values = to.narrow(columns, 0, length), values.narrow(columns, 0, length)
            if to.itemsize == 1:  # PyTorch copies no rows of FP8 by their indices
                to, values = to.view(torch.uint8), values.view(torch.uint8)
            to.index_copy_(0, rows, values.index_select(0, chosen))
        if hasattr(theirs, "has_previous_state"):
            mine.has_previous_state.update(theirs.has_previous_state)


def reset(cache: Any, masked: bool) -> None:
    """Set the cache's states of linear attention to zero; if ``masked``, keys and values too.

    masked: whether attention has a mask.
    """
    for layer in cache.layers:
        if masked or hasattr(layer, "has_previous_state"):
            layer.reset()


def clear_rows(cache: Any, rows: Tensor) -> None:
    """Zero these rows of the cache: attention with a mask multiplies masked values by 0, and 0 * NaN would be NaN."""
    for index, layer in enumerate(cache.layers):
        for tensor in _row_tensors(index, layer).values():
            tensor.index_fill_(0, rows, 0)


def in_fp8(cache: Any) -> bool:
    """Return whether any layer of the cache keeps keys and values in FP8."""
    return any(isinstance(layer, _own_layers()["StaticLayer in FP8"]) for layer in cache.layers)


def has_states(cache: Any) -> bool:
    """Return whether any layer of the cache keeps states of linear attention."""
    return any(hasattr(layer, kind) for layer in cache.layers for kind in STATES)


def bytes_of_a_row(cache: Any, max_length: int) -> int:
    """Return the bytes of a row in a cache like this one with ``max_length`` columns; shared tensors count once."""
    sizes: dict[int, int] = {}
    for name, value in (item for layer in cache.layers for item in vars(layer).items()):
        for tensor in (each for each in tree_leaves(value) if isinstance(each, Tensor) and each.dim() > 1):
            columns = tensor.shape[_COLUMNS[name]] if name in _COLUMNS else max_length
            sizes[tensor.data_ptr()] = tensor.nbytes // len(tensor) * max_length // columns
    return sum(sizes.values())


_COLUMNS = {"keys": 2, "values": 2, "key_scales": 2, "value_scales": 2, "indexer_keys": 1}
"""Maps names of a cache layer's tensors, those with a column for each token, to the dimension of the columns."""
STATES = ("conv_states", "recurrent_states")
"""The attributes of a cache layer that are dicts of linear-attention states, with one row per sequence."""


def _row_tensors(index: int, layer: Any) -> dict[Any, Tensor]:
    """Return a layer's tensors that have a row for each sequence: keys and values by name, states by (name, key)."""
    tensors = {}
    for name, value in vars(layer).items():
        if name in STATES:
            tensors |= {(name, key): state for key, state in value.items() if state is not None}
        elif isinstance(value, Tensor) and value.dim():
            tensors[name] = value
    unknown = [name for name in tensors if name not in _COLUMNS and name[0] not in STATES]
    if unknown:
        raise ValueError(f"model: layer {index} keeps {', '.join(unknown)}, which cannot be copied")
    return tensors


def _allocate(layer: Any, examples: dict[Any, Tensor]) -> None:
    """Allocate the tensors that a layer does not have yet, with the shapes of ``examples``."""
    if "keys" in examples and not layer.is_initialized:
        layer.lazy_initialization(examples["keys"], examples["values"])
    if "indexer_keys" in examples and not layer.is_indexer_initialized:
        layer.lazy_initialization_indexer(examples["indexer_keys"])
    for kind, key in (name for name in examples if isinstance(name, tuple)):
        if getattr(layer, kind)[key] is None:
            layer.lazy_initialization(**{kind: examples[kind, key], "state_idx": key})


def _are_latents(keys: Tensor, values: Tensor) -> bool:
    """Return whether keys and values (B, key heads, T, D) to cache are latents and their rotary parts."""
    return keys.shape[1] == 1 and 0 < values.shape[-1] != keys.shape[-1]


def _coded(latents: Tensor, rotary: Tensor) -> Tensor:
    return quantize_latents(torch.cat([latents, rotary], dim=-1), value_size=latents.shape[-1])


@functools.cache
def _own_layers() -> dict[str, type]:
    """Return fp8moe's classes of cache layers, by the names of transformers' classes that they replace."""
    from transformers import cache_utils

    class PositionedLayer:
        """Keys (B, key heads, max_length, D) and values at fixed addresses, written where ``position`` says."""

        position: CachePosition  # the cache's owner advances it, once for all layers
        written_in = None

        def cached(self) -> tuple[Any, Any]:
            """Return the keys and the values of all columns, in the form that fp8moe's kernels take."""
            return self.keys, self.values

        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.written_in = self.position.call
            keys, values = self.cached()
            return self.write(keys, key_states), self.write(values, value_states)

        def write(self, target: Any, states: Tensor) -> Any:
            return self.position.write(target, 2, states)

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.max_cache_len if self.position.end is None else self.position.end, 0

        def get_seq_length(self) -> int | Tensor:
            return self.position.length(self.written_in is self.position.call)

    class FullLayer(PositionedLayer, cache_utils.StaticLayer):
        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Allocate keys and values. Latents and their rotary parts, of one head, are kept side by side."""
            super().lazy_initialization(key_states, value_states)
            sizes = key_states.shape[-1], value_states.shape[-1]
            if _are_latents(key_states, value_states):
                self.keys, self.values = self.keys.new_zeros((*self.keys.shape[:-1], sum(sizes))).split(sizes, -1)

        def latents(self) -> Tensor:
            """Return all columns (B, max_length, R + P) of a layer that keeps latents; in FP8 their bytes."""
            (batch, _, length, _), width = self.keys.shape, self.keys.shape[-1] + self.values.shape[-1]
            return self.keys.as_strided((batch, length, width), (length * width, width, 1))

        def first_columns(self) -> tuple[Tensor, Tensor]:
            """Return keys and values of the columns that the call reads."""
            end = self.position.end
            return self.keys[:, :, :end], self.values[:, :, :end]

    class FP8Layer(FullLayer):
        """A layer whose keys and values are E4M3 codes; key_scales, value_scales: (B, key heads, max_length, 1).

        Latents and their rotary parts are keys (B, 1, max_length, bytes), of `quantize_latents`, without values.
        """

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            if _are_latents(key_states, value_states):
                key_states = _coded(key_states[:, :, :1], value_states[:, :, :1])
            if key_states.dtype is torch.uint8:
                super().lazy_initialization(key_states, key_states[..., :0])
                return
            super().lazy_initialization(*(x.to(torch.float8_e4m3fn) for x in (key_states, value_states)))
            self.key_scales, self.value_scales = (
                torch.zeros((*data.shape[:-1], 1), dtype=torch.float32, device=data.device)
                for data in (self.keys, self.values)
            )

        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Any, Any]:
            if not _are_latents(key_states, value_states):
                return super().update(key_states, value_states)
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.written_in = self.position.call
            return self.position.write(self.keys, 2, _coded(key_states, value_states)), self.values

        def cached(self) -> tuple[FP8Tensor, FP8Tensor]:
            return FP8Tensor(self.keys, self.key_scales), FP8Tensor(self.values, self.value_scales)

        def write(self, target: FP8Tensor, states: Tensor) -> FP8Tensor:
            new = fp8_cache.quantized(states)
            # As integers, because PyTorch scatters no FP8.
            data = self.position.write(target.data.view(torch.uint8), 2, new.data.view(torch.uint8))
            return FP8Tensor(data.view(target.data.dtype), self.position.write(target.scale, 2, new.scale))

    class IndexedLayer(FullLayer, cache_utils.StaticIndexedLayer):
        """A layer that also keeps the keys of an indexer, (B, max_length, D)."""

        def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
            if not self.is_indexer_initialized:
                self.lazy_initialization_indexer(indexer_key_states)
            return self.position.write(self.indexer_keys, 1, indexer_key_states)

    class FP8IndexedLayer(FP8Layer, IndexedLayer):
        pass

    class HybridLayer(PositionedLayer, cache_utils.LinearAttentionAndStaticFullAttentionLayer):
        """A layer that also keeps states of linear attention."""

    return {
        "StaticLayer": FullLayer,
        "StaticLayer in FP8": FP8Layer,
        "StaticSlidingWindowLayer": FullLayer,
        "StaticIndexedLayer": IndexedLayer,
        "StaticIndexedLayer in FP8": FP8IndexedLayer,
        "LinearAttentionAndStaticFullAttentionLayer": HybridLayer,
        "LinearAttentionAndStaticSlidingWindowAttentionLayer": HybridLayer,
    }
