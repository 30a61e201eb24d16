"""What transformers' models hand to the function that attends, beside queries, keys and values."""

from dataclasses import dataclass

from torch import Tensor

WITHOUT_EFFECT = (
    *("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
)
"""Arguments that change nothing for who knows which keys a query sees."""


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """The keys that the queries of a call see: what GraphDecoder's attention takes as attention_mask.

    transformers passes on whatever its mask function returns, so this comes from there, once for each kind of layer.

    sequences (3, n + 1) int32: the first query, the first key in the cache and the number of keys of each sequence that
    the kernel sees; the last column ends the queries. In a decode step a sequence is a part of the keys of one row and
    key head, otherwise it is a row of the batch.

    new_tokens: of each row. key_heads, columns: of the layer's cache. window: the most keys that a query sees, None for
    all. parts: of the keys of a row and key head. whole: the rows have no tokens but the new ones, and no padding.
    """

    sequences: Tensor
    new_tokens: int
    key_heads: int
    columns: int
    window: int | None
    parts: int = 1
    whole: bool = False
