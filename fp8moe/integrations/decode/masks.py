"""transformers' own masks for rows of their own lengths: those of attention that takes a mask."""

import functools
from collections.abc import Callable

from torch import Tensor


@functools.cache
def take_offsets_of_rows() -> None:
    """From now on transformers' masks for "sdpa" and "eager" take a q_offset (B,) too: one for each row of the batch.

    Models ask for the names "sdpa" and "eager", so those must stay. All that transformers itself passes, an int or a
    tensor of no dimension, goes to its own functions as it is.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name in ("sdpa", "eager"):
        AttentionMaskInterface.register(name, _with_offsets_of_rows(ALL_MASK_ATTENTION_FUNCTIONS[name]))


def _with_offsets_of_rows(mask: Callable) -> Callable:
    @functools.wraps(mask)
    def build(*args, **kwargs) -> Tensor | None:
        offset = kwargs.get("q_offset")
        if not isinstance(offset, Tensor) or offset.dim() == 0:
            return mask(*args, **kwargs)
        function = kwargs["mask_function"]

        def shifted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return function(batch, head, query + offset[batch], key)

        return mask(*args, **kwargs | {"q_offset": 0, "mask_function": shifted, "allow_is_causal_skip": False})

    return build
