"""The argument by which a model of transformers takes its cache: past_key_values, from transformers 5.24 on cache."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

NAMES = ("cache", "past_key_values")


def name_of(forward: Callable) -> str | None:
    """Its name in this forward; None if it takes no cache."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def update(
    past_key_values: Any, cache: Any, keys: Tensor, values: Tensor, layer: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """All keys and values of a layer after new ones were added to the cache, which is one of the first two arguments.

    options: further arguments of the forward, which a cache is handed where it comes by its new name.
    """
    if cache is not None:
        return cache.update(keys, values, layer, kwargs=options)
    return past_key_values.update(keys, values, layer)
