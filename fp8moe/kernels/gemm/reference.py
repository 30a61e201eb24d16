"""The GEMMs in plain PyTorch, on any device, groups read on the host: they define what the CUDA kernels compute."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.quant import reference
from fp8moe.quant.formats import BLOCK, FP8Tensor, has_channel_scales
from fp8moe.runtime.fixed_rows import by_fixed_rows

_CHUNK = 1 << 22  # elements of a chunk of weights or of the result


def gemm_reference(a: FP8Tensor, b: FP8Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`_gemm`, by fixed numbers of rows where results are to be batch invariant."""
    return by_fixed_rows(lambda data, scale: _gemm(FP8Tensor(data, scale), b, bias, out_dtype), *a)


def _gemm(a: FP8Tensor, b: FP8Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``dequantize(a) @ dequantize(b).T + bias``, block by block along K.

    a: data (M, K) with scale (M, ceil(K/128)); b: data (N, K) with scale (ceil(N/128), ceil(K/128)), or (N, 1), by
    which the sums are multiplied at their end; bias (N,) or None. Returns (M, N) in ``out_dtype``.

    For each block of 128 along K the unscaled products are summed, multiplied by the two float32 scales and added to a
    float32 accumulator (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). A non-finite scale or value reaches the outputs
    that depend on it and no other. Columns of the result are computed in chunks: memory beside it is a float32 copy of
    the activations and at most tens of MB, or what 128 columns take where that is more.
    """
    a_data, a_scale = a
    b_data, b_scale = b
    m, k = a_data.shape
    n = b_data.shape[0]
    a_values = to_float32(a_data)
    channels = has_channel_scales(b_data, b_scale)
    column_scale = None if channels else b_scale.repeat_interleave(BLOCK, dim=0)[:n]
    out = torch.empty(m, n, dtype=out_dtype, device=a_data.device)
    chunk = max(1, _CHUNK // max(m, k, 1) // BLOCK) * BLOCK
    for first in range(0, n, chunk):
        rows = slice(first, first + chunk)
        b_values = to_float32(b_data[rows])
        accumulator = torch.zeros(m, b_values.shape[0], dtype=torch.float32, device=a_data.device)
        for block, start in enumerate(range(0, k, BLOCK)):
            partial = products(a_values[:, start : start + BLOCK], b_values[:, start : start + BLOCK].T)
            partial.mul_(a_scale[:, block, None])
            if channels:
                accumulator += partial
            else:
                accumulator.addcmul_(partial, column_scale[rows, block])
        if channels:
            accumulator *= b_scale[rows, 0]
        if bias is not None:
            accumulator += bias[rows]
        out[:, rows] = accumulator
    return out


def grouped_gemm_reference(
    a: FP8Tensor,
    b: FP8Tensor,
    groups: Tensor,
    out: Tensor,
    *,
    max_m: int | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> None:
    """``out[rows of e] = gemm(a[rows of e], b[e], bias[e])`` for every expert e, plus ``ranks[rows of e] @
    factors[e].T`` of low_rank, rounded once. Other rows of ``out`` are left alone.

    a: data (M, K) with scale (M, ceil(K/128)); b: data (E, N, K) with scale (E, ceil(N/128), ceil(K/128)); bias (E, N);
    out (M, N).
    groups, max_m: see `group_rows`.
    """
    for expert, rows in group_rows(groups, a[0].shape[0], max_m):
        added = None if bias is None else bias[expert]
        result = gemm_reference(_part(a, rows), _part(b, expert), added, torch.float32)
        if low_rank is not None:
            ranks, factors = low_rank
            result += products(ranks[rows].float(), factors[expert].float().T)
        out[rows] = result.to(out.dtype)


def grouped_gemm_swiglu_reference(
    a: FP8Tensor,
    gate_up: FP8Tensor,
    groups: Tensor,
    activation: Activation,
    out: FP8Tensor,
    *,
    max_m: int | None = None,
    bias: Tensor | None = None,
) -> None:
    """Each group's two projections, `activation` in float32, quantized 1x128 into ``out``. Other rows are left alone.

    a: data (M, H) with scale (M, ceil(H/128)). gate_up: data (E, 2I, H), gate rows then up rows, with the scales of
    gate and then of up, (E, 2 * ceil(I/128), ceil(H/128)) or (E, 2I, 1); bias (E, 2I). out: data (M, I), scale
    (M, ceil(I/128)).
    groups, max_m: see `group_rows`.
    """
    size, blocks = gate_up[0].shape[1] // 2, gate_up[1].shape[1] // 2
    for expert, rows in group_rows(groups, a[0].shape[0], max_m):
        x = _part(a, rows)
        data, scale = _part(gate_up, expert)
        gate_bias, up_bias = (None, None) if bias is None else bias[expert].chunk(2)
        gate = gemm_reference(x, FP8Tensor(data[:size], scale[:blocks]), gate_bias, torch.float32)
        up = gemm_reference(x, FP8Tensor(data[size:], scale[blocks:]), up_bias, torch.float32)
        quantized = reference.quantize_1x128(activation(torch.cat([gate, up], dim=-1)), False)
        out.data[rows], out.scale[rows] = quantized


def group_rows(groups: Tensor, m: int, max_m: int | None) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and which of the ``m`` rows these are.

    Without max_m ``groups`` is group_offsets (E+1,): expert e has rows ``offsets[e]:offsets[e+1]``, both clamped to
    [0, m]. Or it is their ranges (E, 2), in any order. With max_m it is masked_m (E,): the first ``masked_m[e]``,
    clamped to [0, max_m], of max_m rows each.
    """
    sizes = groups.tolist()
    if max_m is None:
        ranges = sizes if groups.dim() == 2 else zip(sizes, sizes[1:], strict=False)
        bounds = [(min(max(start, 0), m), min(end, m)) for start, end in ranges]
    else:
        bounds = [(e * max_m, e * max_m + min(size, max_m)) for e, size in enumerate(sizes)]
    for expert, (start, end) in enumerate(bounds):
        if start < end:
            yield expert, slice(start, end)


def group_ranges(layout: Tensor, groups: int, alignment: int | None) -> Tensor:
    """First row and end of each group (groups, 2), of a layout as `layouts.grouped_gemm_by_layout` takes it.

    ValueError where rows of a group lie between those of others.
    """
    layout = layout.long()
    if alignment is not None:
        starts = torch.nn.functional.pad((layout[:-1].clamp(min=0) + alignment - 1) // alignment * alignment, (1, 0))
        return torch.stack([starts[:groups], layout], dim=1)
    ranges = torch.zeros(groups, 2, dtype=torch.int64)
    runs, sizes = torch.unique_consecutive(layout.cpu(), return_counts=True)
    before = -1
    for group, end, size in zip(runs.tolist(), sizes.cumsum(0).tolist(), sizes.tolist(), strict=True):
        if not 0 <= group < groups:
            continue
        if ranges[group, 1] and group != before:
            raise ValueError(f"layout: expected the rows of a group together, got group {group} behind group {before}")
        ranges[group] = torch.tensor([ranges[group, 0] if ranges[group, 1] else end - size, end])
        before = group
    return ranges


def _part(operand: FP8Tensor, index: int | slice) -> FP8Tensor:
    """A group's rows or an expert's weights."""
    data, scale = operand
    return FP8Tensor(data[index], scale[index])


def grouped_gemm_k_reference(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Tensor, accumulate: bool) -> None:
    """``out[e] (+)= a[:, columns of e] @ b[:, columns of e].T``; arguments as those of `grouped_gemm_k`, checked.

    ValueError where a group does not begin and end at a multiple of 128.
    """
    k = a[0].shape[1]
    offsets = [min(max(offset, 0), k) for offset in group_offsets.tolist()]
    groups = list(zip(offsets, offsets[1:], strict=False))
    for group, (start, end) in enumerate(groups):
        if start < end and (start % BLOCK or end % BLOCK):
            raise ValueError(f"group_offsets: expected multiples of {BLOCK}, got group {group} at {start}:{end}")
    for group, (start, end) in enumerate(groups):
        total = out[group] if accumulate else torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
        for block in range(start // BLOCK, end // BLOCK):
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            partial = products(to_float32(a[0][:, columns]), to_float32(b[0][:, columns]).T)
            total.addcmul_(partial, a[1][:, block, None] * b[1][:, block])
        out[group] = total


def grouped_gemm_k_by_sizes(a: FP8Tensor, b: FP8Tensor, sizes: Tensor, out: Tensor, accumulate: bool) -> None:
    """`layouts.grouped_gemm_k_by_sizes` of checked arguments."""
    if a.data.dim() == 2:
        a, b = (FP8Tensor(data.t(), scale.t()) for data, scale in (a, b))
        offsets = offsets_of_sizes(sizes, a.data.shape[1])
    else:
        a_data, b_data, offsets = join_groups(a.data, b.data, sizes, *out.shape[1:], a.scale.shape[1] * BLOCK)
        a, b = FP8Tensor(a_data, a.scale), FP8Tensor(b_data, b.scale)
    grouped_gemm_k_reference(a, b, offsets, out, accumulate)


def offsets_of_sizes(sizes: Tensor, k: int) -> Tensor:
    """Where groups of these sizes begin (E + 1,) int32. ValueError where they are more than k together."""
    offsets = torch.nn.functional.pad(sizes.long().clamp(min=0).cumsum(0), (1, 0))
    if offsets[-1] > k:
        expected = f"groups that fill at most the {k} columns of the operands"
        raise ValueError(f"sizes: expected {expected}, got {int(offsets[-1])}")
    return offsets.int()


def join_groups(a: Tensor, b: Tensor, sizes: Tensor, m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups along K one behind the other, a (m * k,) and b (n * k,), as matrices (m, k), (n, k), and offsets (E + 1,).

    sizes: (E,) of the groups. Columns behind the last are zeros. ValueError where they are more than k.
    """
    offsets = offsets_of_sizes(sizes, k)
    bounds = offsets.tolist()
    joined = []
    for flat, rows in ((a, m), (b, n)):
        flat, matrix = flat.contiguous().view(torch.uint8), torch.zeros(rows, k, dtype=torch.uint8, device=flat.device)
        for start, end in zip(bounds, bounds[1:], strict=False):
            matrix[:, start:end] = flat[rows * start : rows * end].view(rows, end - start)
        joined.append(matrix.view(torch.float8_e4m3fn))
    return *joined, offsets


def products(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of E4M3 values held in float32.

    They are exact in TF32 and bfloat16 too, so that ``torch.set_float32_matmul_precision`` changes no product: scales
    come afterwards. Autocast, which operators leave to the functions that they call, would round the sums.
    """
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def to_float32(data: Tensor) -> Tensor:
    """FP8 values in float32. PyTorch converts them one by one on a CPU; a table of all 256 is five times faster."""
    if data.device.type != "cpu":
        return data.float()
    return _values(data.dtype).index_select(0, data.view(torch.uint8).int().flatten()).view(data.shape)


@functools.cache
def _values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
