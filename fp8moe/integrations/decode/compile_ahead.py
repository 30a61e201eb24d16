"""Kernels that prompts will need, compiled before the first one comes."""

from typing import Any

from fp8moe.integrations.decode.chunks import MOST_WHOLE_TOKENS
from fp8moe.kernels.gemm.variants import families
from fp8moe.runtime.jit import load_all
from fp8moe.runtime.launch import num_sms


def compile_for_prompts(model: Any, device_index: int, tokens: int) -> None:
    """Load every GEMM that may be chosen for prompts of a model whose step has run, of so many tokens together."""
    config = model.config.get_text_config(decoder=True)
    tokens = min(tokens, MOST_WHOLE_TOKENS)
    rows = tokens * (getattr(config, "num_experts_per_tok", None) or 1)
    sms = num_sms(device_index)
    kernels = (family.variants(rows if family.groups else tokens, sms) for family in families)
    load_all(set().union(*kernels))
