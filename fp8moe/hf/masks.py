"""transformers' masks for the rows of a batch that have lengths of their own."""

import functools
from collections.abc import Callable

from torch import Tensor


def with_offsets_of_rows(mask: Callable, of_rows: Callable[..., Tensor] | None = None) -> Callable:
    """Wrap a mask function of transformers: it takes a q_offset (B,) too, one for each row of the batch.

    of_rows: makes the mask then, in the place of the function itself. All that transformers itself passes, an int or a
    tensor of no dimension, goes to its own function as it is.
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
