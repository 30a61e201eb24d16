"""Tiny models on several ranks by transformers' tensor and expert parallelism, and what a rank finds of them."""

import contextlib
import hashlib
import math
from pathlib import Path
from typing import Any

import torch

from tests.tiny_moe_models import MODELS

NAMES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
FORMS = ("bf16", "fp8")


def write_checkpoints(root: Path, ranks: int = 2) -> None:
    """Writes each model in bfloat16 and in FP8, of whose sizes a rank gets a block; broken-fp8: half of one in experts.

    odd: with one expert too few.
    """
    from fp8moe.weights import quantize_checkpoint

    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "hidden_size"), 128 * ranks)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32 * ranks}

    def write(name: str, directory: str, **options: Any) -> None:
        tiny = MODELS[name]
        tiny._replace(options=tiny.options | sizes | options).build(torch.bfloat16).save_pretrained(root / directory)

    for name in NAMES:
        write(name, f"{name}-bf16", **({} if "Deepseek" in name else heads))
        quantize_checkpoint(root / f"{name}-bf16", root / f"{name}-fp8")
    write("Qwen3MoeForCausalLM", "broken-bf16", **heads, moe_intermediate_size=64 * ranks)
    quantize_checkpoint(root / "broken-bf16", root / "broken-fp8")
    write("MixtralForCausalLM", "odd-bf16", **heads, num_local_experts=7)


def load(directory: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe", dtype=dtype, **options)
    for parameter in model.parameters():
        if parameter.dtype is torch.bfloat16:  # transformers 5.17 keeps the dtype that an FP8 checkpoint has
            parameter.data = parameter.data.to(dtype)
    return model.eval()


WAYS = ("tp", "tp and ep", "ep")
"""Tensor parallelism, with whole experts, and experts alone."""


def has_sizes() -> bool:
    """Whether transformers' DistributedConfig has an ep_size: from 5.21 on."""
    from transformers.distributed import DistributedConfig

    return "ep_size" in DistributedConfig.__dataclass_fields__


def config_of(way: str, directory: Path, ranks: int = 2) -> Any:
    """The DistributedConfig for a model on so many ranks."""
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    from fp8moe.hf import versions

    if way == "tp":
        return DistributedConfig(tp_size=ranks)
    if way == "tp and ep":
        return versions.over_ranks(AutoConfig.from_pretrained(directory), ranks)
    if has_sizes():
        return DistributedConfig(tp_size=ranks, ep_size=ranks, tp_plan={})
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


@contextlib.contextmanager
def bytes_read():
    """Name of a tensor -> [bytes that were read of it, bytes that it has], of what transformers loads meanwhile."""
    from transformers import modeling_utils

    from fp8moe.weights.source import DTYPES

    found, theirs = {}, modeling_utils.safe_open

    class Slice:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner
            found[name] = [0, math.prod(inner.get_shape()) * DTYPES[inner.get_dtype()].itemsize]

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __getitem__(self, index):
            value = self.inner[index]
            found[self.name][0] += value.nbytes
            return value

    class File:
        def __init__(self, *arguments, **options):
            self.inner = theirs(*arguments, **options)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *exception):
            return self.inner.__exit__(*exception)

        def get_slice(self, name):
            return Slice(name, self.inner.get_slice(name))

    modeling_utils.safe_open = File
    try:
        yield found
    finally:
        modeling_utils.safe_open = theirs


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.float().numpy().tobytes()).hexdigest()
