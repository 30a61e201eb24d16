"""The grouped GEMMs in plain PyTorch, on any device: they define what the CUDA kernels compute.

They read the groups on the host, so on a GPU they wait for it and cannot be captured in a CUDA graph.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.reference import gemm_reference
from fp8moe.quant import reference
from fp8moe.quant.formats import FP8Tensor


def grouped_gemm_reference(
    a: FP8Tensor, b: FP8Tensor, groups: Tensor, out: Tensor, *, max_m: int | None = None
) -> None:
    """``out[rows of e] = gemm(a[rows of e], b[e])`` for every expert e. Other rows of ``out`` are left alone.

    a: data (M, K) with scale (M, ceil(K/128)); b: data (E, N, K) with scale (E, ceil(N/128), ceil(K/128)); out (M, N).
    groups, max_m: see `group_rows`.
    """
    for expert, rows in group_rows(groups, a[0].shape[0], max_m):
        out[rows] = gemm_reference(_part(a, rows), _part(b, expert), None, out.dtype)


def grouped_gemm_swiglu_reference(
    a: FP8Tensor,
    gate_up: FP8Tensor,
    groups: Tensor,
    activation: Activation,
    out: FP8Tensor,
    *,
    max_m: int | None = None,
) -> None:
    """Each group's two projections, `activation` in float32, quantized 1x128 into ``out``. Other rows are left alone.

    a: data (M, H) with scale (M, ceil(H/128)). gate_up: data (E, 2I, H), gate rows then up rows, with the scales of
    gate and then of up, (E, 2 * ceil(I/128), ceil(H/128)). out: data (M, I), scale (M, ceil(I/128)).
    groups, max_m: see `group_rows`.
    """
    size, blocks = gate_up[0].shape[1] // 2, gate_up[1].shape[1] // 2
    for expert, rows in group_rows(groups, a[0].shape[0], max_m):
        x = _part(a, rows)
        data, scale = _part(gate_up, expert)
        gate = gemm_reference(x, FP8Tensor(data[:size], scale[:blocks]), None, torch.float32)
        up = gemm_reference(x, FP8Tensor(data[size:], scale[blocks:]), None, torch.float32)
        quantized = reference.quantize_1x128(activation(torch.cat([gate, up], dim=-1)), False)
        out.data[rows], out.scale[rows] = quantized


def group_rows(groups: Tensor, m: int, max_m: int | None) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and which of the ``m`` rows these are.

    Without max_m ``groups`` is group_offsets (E+1,): expert e has rows ``offsets[e]:offsets[e+1]``, both clamped to
    [0, m]. With max_m it is masked_m (E,): the first ``masked_m[e]``, clamped to [0, max_m], of max_m rows each.
    """
    sizes = groups.tolist()
    if max_m is None:
        bounds = [(min(max(start, 0), m), min(end, m)) for start, end in zip(sizes, sizes[1:], strict=False)]
    else:
        bounds = [(e * max_m, e * max_m + min(size, max_m)) for e, size in enumerate(sizes)]
    for expert, (start, end) in enumerate(bounds):
        if start < end:
            yield expert, slice(start, end)


def _part(operand: FP8Tensor, index: int | slice) -> FP8Tensor:
    """A group's rows or an expert's weights."""
    data, scale = operand
    return FP8Tensor(data[index], scale[index])
