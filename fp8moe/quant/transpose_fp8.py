"""FP8 weights for the input gradient: ``transpose_fp8`` and the operator ``fp8moe::transpose_fp8`` behind it.

A block of 128x128 has one scale, whichever way it is read. So the transpose of a quantized weight is exact: the input
gradient uses the very values that the forward used (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

import torch
from torch import Tensor

from fp8moe.quant import transpose_fp8_plan
from fp8moe.quant.checks import check_scale, fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_dtype
from fp8moe.runtime.operator import define


def transpose_fp8(w: FP8Tensor) -> FP8Tensor:
    """The transpose of weights quantized in blocks of 128x128, bit for bit.

    w: FP8Tensor or (data, scale): data (..., N, K) float8_e4m3fn, scale (..., ceil(N/128), ceil(K/128)) float32, as
        `quantize_128x128` returns them; any N and K. Other layouts than contiguous ones are copied first.
    Returns data (..., K, N) and scale (..., ceil(K/128), ceil(N/128)), both contiguous and detached from the autograd
    graph.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, device or scale shape.
    """
    data, scale = fp8_operand("w", w)
    return FP8Tensor(*torch.ops.fp8moe.transpose_fp8(detached(data), detached(scale)))


def _check(data: Tensor, scale: Tensor) -> None:
    check_dtype("w.data", data, torch.float8_e4m3fn)
    if data.dim() < 2:
        raise ValueError(f"w.data: expected at least two dimensions, got shape {tuple(data.shape)}")
    *lead, n, k = data.shape
    check_scale("w.scale", scale, (*lead, ceil_div(n, BLOCK), ceil_div(k, BLOCK)), data.device)


def _transpose_fp8(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    results = _transpose_fp8_fake(data, scale)
    if use_cuda(data):
        transpose_fp8_plan.transpose_fp8(data.contiguous(), scale.contiguous(), *results)
    else:
        results[0].view(torch.uint8).copy_(data.view(torch.uint8).mT)
        results[1].copy_(scale.mT)
    return results


def _transpose_fp8_fake(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    _check(data, scale)
    return tuple(torch.empty(value.mT.shape, dtype=value.dtype, device=value.device) for value in (data, scale))


define("transpose_fp8(Tensor data, Tensor scale) -> (Tensor, Tensor)", _transpose_fp8, _transpose_fp8_fake)
