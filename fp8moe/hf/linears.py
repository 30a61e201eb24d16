"""Runs FP8 linears of transformers (finegrained_fp8) on fp8moe's kernels, if these support the linear's format."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fp8moe.kernels.linear.forward import apply as linear
from fp8moe.layers.master import Fingerprint
from fp8moe.quant.formats import BLOCK


def refusal(weight: Tensor, block_size: Sequence[int] | None, activation_scale: Tensor | None) -> str | None:
    """Return why an FP8 linear of transformers keeps running on transformers' kernels, or None if it runs on fp8moe."""
    if weight.dtype is not torch.float8_e4m3fn:
        return f"weights in {weight.dtype}; fp8moe runs torch.float8_e4m3fn"
    if activation_scale is not None:
        return "static activation scales; fp8moe runs dynamic ones"
    if block_size is None or tuple(block_size) != (BLOCK, BLOCK):
        return f"weight blocks {block_size}; fp8moe runs blocks of {BLOCK}x{BLOCK}"
    return None


def is_routed() -> bool:
    """Return whether transformers' fp8_linear is replaced by fp8moe's wrapper of it."""
    from transformers.integrations import finegrained_fp8

    return hasattr(finegrained_fp8.fp8_linear, "_fp8moe")


def routed(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap transformers' fp8_linear: run on fp8moe unless `refusal` gives a reason.

    transformers' FP8 linears look up fp8_linear at each call, and so call the wrapper.
    """

    @functools.wraps(theirs)
    def fp8_linear(
        input: Tensor,
        weight: Tensor,
        weight_scale_inv: Tensor,
        block_size: Sequence[int] | None = None,
        bias: Tensor | None = None,
        activation_scale: Tensor | None = None,
        allow_deepgemm: bool = True,
    ) -> Tensor:
        if refusal(weight, block_size, activation_scale) is not None:
            return theirs(input, weight, weight_scale_inv, block_size, bias, activation_scale, allow_deepgemm)
        scale = float_scale(weight_scale_inv)
        if torch.is_grad_enabled():  # transformers' FP8 parameters may require gradients; treat them as constants
            weight, scale, bias = (value if value is None else value.detach() for value in (weight, scale, bias))
        return linear(input, weight, scale, bias)

    fp8_linear._fp8moe = True
    return fp8_linear


_float_scales = WeakTensorKeyDictionary()  # maps e8m0 scales to their Fingerprint and float32 values


def float_scale(scale: Tensor) -> Tensor:
    """Return the scale in float32. The copy of an e8m0 scale is cached for as long as that scale lives."""
    if scale.dtype is torch.float32:
        return scale
    if torch.compiler.is_compiling():
        return scale.float()
    cached = _float_scales.get(scale)
    if cached is None or not cached[0].matches([scale]):
        values = scale.detach().float()
        if cached is not None and cached[1].shape == values.shape and cached[1].device == values.device:
            values = cached[1].copy_(values)  # update in place, as CUDA graphs may read this memory
        cached = _float_scales[scale] = (Fingerprint([scale]), values)
    return cached[1]


def refresh(module: nn.Module) -> None:
    """Update the cached float32 copies of this module's scales."""
    for value in module._parameters.values() if _float_scales else ():
        if value is not None and value in _float_scales:
            float_scale(value)
