"""The cache of a decode step: tensors at fixed addresses, written in place, with no count on the host."""

import functools
from typing import Any

from torch import Tensor


def static_cache(config: Any, max_length: int) -> Any:
    """A StaticCache whose attention layers all hold `max_length` tokens.

    transformers' sliding-window layers count tokens on the host, which a graph cannot follow. Full-length layers take
    their place, and the mask limits attention to the window. Layers of linear attention hold states of a fixed size.

    Raises ValueError for layers of other kinds.
    """
    try:
        cache = _cache_class()(config=config, max_cache_len=max_length)
    except KeyError as error:
        raise ValueError(f"model: transformers has no static cache for its layers of type {error}") from error
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    for index, layer in enumerate(cache.layers):
        if "chunked_attention" not in kinds:
            cache.layers[index] = _full_length(layer, max_length)
        _check_layer(index, cache.layers[index])
    return cache


@functools.cache
def _cache_class() -> type:
    from transformers import StaticCache

    class FixedAddressCache(StaticCache):
        """A StaticCache whose lengths stay as they were read: transformers' change when the layer is updated."""

        def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
            length = super().get_seq_length(layer_idx)
            return length.clone() if isinstance(length, Tensor) else length

    return FixedAddressCache


def _full_length(layer: Any, max_length: int) -> Any:
    """The layer, or one of full length in the place of a sliding window."""
    from transformers import cache_utils

    if type(layer) is cache_utils.StaticSlidingWindowLayer:
        return cache_utils.StaticLayer(max_cache_len=max_length)
    if type(layer) is cache_utils.LinearAttentionAndStaticSlidingWindowAttentionLayer:
        return cache_utils.LinearAttentionAndStaticFullAttentionLayer(
            max_cache_len=max_length, number_of_states=layer.number_of_states
        )
    return layer


def _check_layer(index: int, layer: Any) -> None:
    from transformers import cache_utils

    served = (
        cache_utils.StaticLayer,
        cache_utils.StaticIndexedLayer,
        cache_utils.LinearAttentionLayer,
        cache_utils.LinearAttentionAndStaticFullAttentionLayer,
        getattr(cache_utils, "DummyLayer", None),  # transformers 5.17 has none
    )
    if type(layer) not in served:
        raise ValueError(
            f"model: layer {index} keeps a {type(layer).__name__}; GraphDecoder serves full, sliding-window, indexed "
            "and linear attention"
        )
