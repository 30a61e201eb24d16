"""``grouped_gemm_k`` in plain PyTorch, on any device: it defines what the CUDA kernel computes."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm.reference import products
from fp8moe.quant.formats import FP8Tensor

_BLOCK = 128


def grouped_gemm_k_reference(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Tensor, accumulate: bool) -> None:
    """``out[e] (+)= a[:, columns of e] @ b[:, columns of e].T``; arguments as those of `grouped_gemm_k`, checked.

    ValueError where a group does not begin and end at a multiple of 128. Reads the groups on the host.
    """
    k = a[0].shape[1]
    offsets = group_offsets.tolist()
    for group, pair in enumerate(zip(offsets, offsets[1:], strict=False)):
        start, end = (min(max(offset, 0), k) for offset in pair)
        if start < end and (start % _BLOCK or end % _BLOCK):
            raise ValueError(f"group_offsets: expected multiples of {_BLOCK}, got group {group} at {start}:{end}")
        total = out[group] if accumulate else torch.zeros(out.shape[1:], device=out.device)
        for block in range(start // _BLOCK, end // _BLOCK):
            total += products(_block(a, block), _block(b, block).T)
        out[group] = total


def _block(operand: FP8Tensor, block: int) -> Tensor:
    """One block of 128 columns, dequantized."""
    data, scale = operand
    return data[:, block * _BLOCK : (block + 1) * _BLOCK].float() * scale[:, block, None]
