"""Kernels that prompts will need, compiled before the first one comes."""

from fp8moe.integrations.decode.chunks import MOST_WHOLE_TOKENS
from fp8moe.kernels.gemm.warmup import families
from fp8moe.runtime.jit import load_all
from fp8moe.runtime.launch import num_sms


def compile_for_prompts(device_index: int, tokens: int) -> None:
    """Load every GEMM that prompts of so many tokens together may choose, of all models whose step has run."""
    tokens = min(tokens, MOST_WHOLE_TOKENS)
    sms = num_sms(device_index)
    known = [*families.items()]  # at once: other threads may add to them meanwhile
    kernels = set().union(*(family.variants(rows * tokens, sms) for family, rows in known))
    load_all(kernels)
