"""The GEMM in plain PyTorch, on any device: it defines what the CUDA kernels compute."""

import functools

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, FP8Tensor

_CHUNK = 1 << 22  # elements of a chunk of weights or of the result


def gemm_reference(a: FP8Tensor, b: FP8Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``dequantize(a) @ dequantize(b).T + bias``, block by block along K.

    a: data (M, K) with scale (M, ceil(K/128)); b: data (N, K) with scale (ceil(N/128), ceil(K/128)); bias (N,) or None.
    Returns (M, N) in ``out_dtype``.

    For each block of 128 along K the unscaled products are summed, multiplied by the two float32 scales and added to a
    float32 accumulator (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). E4M3 values are exact in TF32 and bfloat16, so
    the products are exact whatever ``torch.set_float32_matmul_precision`` says. A non-finite scale or value reaches the
    outputs that depend on it and no other. Columns of the result are computed in chunks: memory beside it is a float32
    copy of the activations and at most tens of MB, or what 128 columns take where that is more.
    """
    a_data, a_scale = a
    b_data, b_scale = b
    m, k = a_data.shape
    n = b_data.shape[0]
    a_values = to_float32(a_data)
    column_scale = b_scale.repeat_interleave(BLOCK, dim=0)[:n]
    out = torch.empty(m, n, dtype=out_dtype, device=a_data.device)
    chunk = max(1, _CHUNK // max(m, k, 1) // BLOCK) * BLOCK
    for first in range(0, n, chunk):
        rows = slice(first, first + chunk)
        b_values = to_float32(b_data[rows])
        accumulator = torch.zeros(m, b_values.shape[0], dtype=torch.float32, device=a_data.device)
        for block, start in enumerate(range(0, k, BLOCK)):
            partial = products(a_values[:, start : start + BLOCK], b_values[:, start : start + BLOCK].T)
            accumulator.addcmul_(partial.mul_(a_scale[:, block, None]), column_scale[rows, block])
        if bias is not None:
            accumulator += bias[rows]
        out[:, rows] = accumulator
    return out


def products(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32, also under autocast, which operators leave to the functions that they call."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def to_float32(data: Tensor) -> Tensor:
    """E4M3 values in float32. PyTorch converts them one by one on a CPU; a table of all 256 is five times faster."""
    if data.device.type != "cpu":
        return data.float()
    return _e4m3_values().index_select(0, data.view(torch.uint8).int().flatten()).view(data.shape)


@functools.cache
def _e4m3_values() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
