"""transformers' FP8 linears on fp8moe's kernels."""

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8moe.integrations.finegrained import is_routed, refusal
from fp8moe.integrations.fingerprint import Fingerprint
from fp8moe.kernels.linear.forward import linear


def route_linears() -> None:
    """Run transformers' FP8 linears on fp8moe, where the format is ours. A second call changes nothing."""
    from transformers.integrations import finegrained_fp8

    # FP8Linear.forward looks this function up in its module at each call. transformers 5.17 calls it with keywords,
    # 5.23 by position and, where the input needs gradients, inside an autograd function that has a backward.
    if not is_routed():
        finegrained_fp8.fp8_linear = routed(finegrained_fp8.fp8_linear)


def routed(theirs):
    """transformers' fp8_linear, with fp8moe's in its place where the format is ours."""

    @functools.wraps(theirs)
    def fp8_linear(
        input, weight, weight_scale_inv, block_size=None, bias=None, activation_scale=None, *arguments, **options
    ):
        if refusal(weight, block_size, activation_scale) is not None:
            return theirs(input, weight, weight_scale_inv, block_size, bias, activation_scale, *arguments, **options)
        scale = _float_scale(weight_scale_inv)
        if torch.is_grad_enabled():  # transformers' parameters may ask for gradients; the weights here are constants
            weight, scale, bias = (value if value is None else value.detach() for value in (weight, scale, bias))
        return linear(input, weight, scale, bias)

    fp8_linear._fp8moe = True
    return fp8_linear


_float_scales = WeakTensorKeyDictionary()  # e8m0 scale -> (its Fingerprint, its values in float32)


def _float_scale(scale: Tensor) -> Tensor:
    """The scale in float32; of e8m0 scales a copy is kept for as long as they live."""
    if scale.dtype is torch.float32:
        return scale
    if torch.compiler.is_compiling():
        return scale.float()
    kept = _float_scales.get(scale)
    if kept is None or not kept[0].matches([scale]):
        kept = _float_scales[scale] = (Fingerprint([scale]), scale.detach().float())
    return kept[1]
