"""Find the kernels that a model needs under GraphDecoder, on any machine, without its weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.decode import attention
from fp8moe.decode.output import OutputLayer
from fp8moe.decode.probe import check_cache_dtype, check_output_dtype, find_capabilities
from fp8moe.decode.step import Step
from fp8moe.hf.fused import find_fused
from fp8moe.hf.skeleton import skeletons
from fp8moe.kernels.decoder_ops import router
from fp8moe.kernels.gemm.warmup import RequiredKernels, lengths, required_by
from fp8moe.layers import experts_source
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.record import reserved

_CPU = torch.device("cpu")


class Options(NamedTuple):
    """Options of `load_model` (experts) and of GraphDecoder."""

    experts: str = "stored"
    cache_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


def required_kernels(
    configs: Iterable[Any], batch_sizes: Sequence[int], tokens: int, num_sms: int, options: Options
) -> RequiredKernels:
    """Find the kernel launches of models with these transformers configurations. Call it in a process of its own.

    batch_sizes: sizes of decode steps. tokens: the most tokens to prefill at once. num_sms: the GPU's number of SMs.

    The process is unfit for other use afterwards (`runtime.record`). Prompts of 1, 2, 4... tokens are prefilled: each
    kernel other than a GEMM is used for at least one of these lengths.

    Raises ValueError for a model that `skeletons` or GraphDecoder refuses.
    """
    models = [model for config in configs for model in skeletons(config, options.experts)]
    # Replace PyTorch's own kernels: some of them need a GPU, and the others would take hours on a CPU.
    attention._flash_attention = _no_flash_attention
    F.scaled_dot_product_attention = _no_attention
    F.linear = lambda x, weight, bias=None: torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    experts_source.Weight.quantize = _of_the_first_expert(experts_source.Weight.quantize)
    router._gemm = lambda x, weight: x.new_zeros((len(x), len(weight)), dtype=torch.float32)
    return required_by([partial(_run, model, {1, *batch_sizes}, lengths(tokens), options) for model in models], num_sms)


def _run(model: Any, batch_sizes: Iterable[int], lengths: Iterable[int], options: Options) -> None:
    """Run one decode step for each batch size, and one prompt for each length."""
    check_cache_dtype(model, options.cache_dtype)
    check_output_dtype(model, options.output_dtype)
    fused = find_fused(model) or None
    capabilities, _ = find_capabilities(model, _CPU, False, attention.NAME, fused, options.cache_dtype)
    if options.output_dtype is not None:
        capabilities = capabilities._replace(output=OutputLayer(model))
    for size in batch_sizes:
        step = Step(model, size, 2, _CPU, capabilities)
        step.start(size, 1, None, [], 0)
        step.advance()
    for count in lengths:
        step = Step(model, 1, count, _CPU, capabilities)
        step.start(1, count, None, [], 0)
        step.read_several(torch.zeros(1, count, dtype=torch.int64, device=_CPU), 0, 0, False)


def _no_flash_attention(query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(query), query.new_zeros(query.shape[1::-1], dtype=torch.float32)


def _no_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    return query.new_zeros((*query.shape[:-1], value.shape[-1]))


def _of_the_first_expert(quantize: Callable[..., FP8Tensor]) -> Callable[..., FP8Tensor]:
    """Wrap Weight.quantize so that it quantizes only the first expert and reserves memory for the others."""

    def quantized(weight: experts_source.Weight, scale_format: str) -> FP8Tensor:
        if isinstance(weight.fused, FP8Tensor):
            return weight.fused
        first = quantize(replace(weight, parts=weight.parts[:1]), scale_format)
        return FP8Tensor(*(reserved((len(weight.parts), *part.shape[1:]), part.dtype) for part in first))

    return quantized
