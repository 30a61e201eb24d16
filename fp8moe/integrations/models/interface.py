"""What transformers' models hand to the function that attends, beside tensors."""

WITHOUT_EFFECT = (
    *("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
)
"""Arguments that change nothing for who knows which keys a query sees."""
