"""Extends transformers' attention masks to batches whose rows have different lengths."""

import functools
from collections.abc import Callable

from torch import Tensor


def with_offsets_of_rows(mask: Callable, of_rows: Callable[..., Tensor] | None = None) -> Callable:
    """Wrap a mask function of transformers so that it also accepts a q_offset (B,), one offset for each row of a batch.

    of_rows: function to make the mask in that case, by default `mask` itself. Calls with an int or a scalar tensor, as
    transformers makes them, go to `mask` unchanged.
    """

    @functools.wraps(mask)
    def build(*args, **kwargs) -> Tensor | None:
        offset = kwargs.get("q_offset")
        if not isinstance(offset, Tensor) or offset.dim() == 0:
            return mask(*args, **kwargs)
        function = kwargs["mask_function"]

        def shifted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return function(batch, head, query + offset[batch], key)

        return (of_rows or mask)(
            *args, **kwargs | {"q_offset": 0, "mask_function": shifted, "allow_is_causal_skip": False}
        )

    return build
