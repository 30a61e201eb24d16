"""Kernels that prompts will need, compiled before the first one comes."""

from fp8moe.integrations.decode.chunks import MOST_WHOLE_TOKENS
from fp8moe.kernels.gemm.variants import families
from fp8moe.runtime import config
from fp8moe.runtime.background import compile_later
from fp8moe.runtime.jit import load_all
from fp8moe.runtime.launch import num_sms


def compile_for_prompts(device_index: int, tokens: int) -> None:
    """Load every GEMM that may be chosen for prompts of a model whose step has run, of so many tokens together.

    With FP8MOE_JIT=background in the background.
    """
    tokens = min(tokens, MOST_WHOLE_TOKENS)
    sms = num_sms(device_index)
    rows = {family: fewest if family.groups else 1 for family, fewest in families.items()}  # of one token
    kernels = set().union(*(family.variants(each * tokens, sms) for family, each in rows.items()))
    if config.settings.jit == "background":
        for kernel in kernels:
            compile_later(kernel)
    else:
        load_all(kernels)
