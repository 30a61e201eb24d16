"""Reference GEMMs in plain PyTorch, on any device: they define the kernels' results. The host reads group sizes."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.quant import reference
from fp8moe.quant.arranged import ARRANGED, as_stored
from fp8moe.quant.formats import (
    BLOCK,
    MX_BLOCK,
    FP8Tensor,
    as_float,
    ceil_div,
    has_block_scales,
    has_channel_scales,
    is_packed,
    packed_format,
    packed_group,
)
from fp8moe.quant.packed import blocks_of_nvfp4, packed_values
from fp8moe.runtime.fixed_rows import by_fixed_rows

_CHUNK = 1 << 22  # largest number of weights converted, or results computed, at a time


def gemm_reference(a: FP8Tensor, b: FP8Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Compute the GEMM that `_gemm` describes; in batch-invariant mode, a fixed number of activation rows at a time."""
    return by_fixed_rows(lambda data, scale: _gemm(FP8Tensor(data, scale), b, bias, out_dtype), *a)


def _gemm(a: FP8Tensor, b: FP8Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return ``dequantize(a) @ dequantize(b).T + bias`` (M, N) in ``out_dtype``, computed block by block along K.

    a: data (M, K) with scale (M, ceil(K/128)). b: data (N, K) with scale (ceil(N/128), ceil(K/128)), or channel scales
    (N, 1), which multiply the finished sums; or packed data (N, K/2) with its scale. bias: (N,) or None.

    For each block of 128 along K, or for each group of INT4, the unscaled products are summed, multiplied by the two
    float32 scales and added to a float32 accumulator (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). A non-finite scale
    or value affects only the outputs that depend on it. Columns of the result are computed in chunks of a multiple of
    128. Temporary memory is a float32 copy of the activations, and tens of MB for a chunk, or more if a chunk of only
    128 columns needs more.
    """
    a_data, a_scale = a
    m, k = a_data.shape
    n = b.data.shape[0]
    if is_packed(b.data) and packed_format(b.scale) in ARRANGED:
        b = FP8Tensor(*as_stored(*b)[:2]) if packed_format(b.scale) == "mxfp4" else blocks_of_nvfp4(*b)
    a_values = to_float32(a_data)
    channels = has_channel_scales(*b)
    out = torch.empty(m, n, dtype=out_dtype, device=a_data.device)
    chunk = max(1, _CHUNK // max(m, k, 1) // BLOCK) * BLOCK
    for first in range(0, n, chunk):
        rows = slice(first, first + chunk)
        b_values, column_scale, step = _scaled_columns(b, rows)
        accumulator = torch.zeros(m, b_values.shape[0], dtype=torch.float32, device=a_data.device)
        for index, start in enumerate(range(0, k, step)):
            partial = products(a_values[:, start : start + step], b_values[:, start : start + step].T)
            partial.mul_(a_scale[:, start // BLOCK, None])
            if channels:
                accumulator += partial
            else:
                accumulator.addcmul_(partial, column_scale[:, index])
        if channels:
            accumulator *= b.scale[rows, 0]
        if bias is not None:
            accumulator += bias[rows]
        out[:, rows] = accumulator
    return out


def _scaled_columns(b: FP8Tensor, rows: slice) -> tuple[Tensor, Tensor, int]:
    """Return what some rows of the weights b are in float32: values (rows, K), scales (rows, K / step), and step.

    Products with `step` values along K share a scale; channel scales are not among the scales. rows: a range that
    begins at a multiple of 128.
    """
    data, scale = b
    if not is_packed(data):
        blocks = slice(rows.start // BLOCK, ceil_div(rows.stop, BLOCK))
        values = to_float32(data[rows])
        return values, scale[blocks].repeat_interleave(BLOCK, dim=0)[: len(values)], BLOCK
    data, scale = data[rows], scale[rows]
    values = packed_values(data, scale)
    if packed_format(scale) == "int4":
        return values, as_float(scale), packed_group(data, scale) if scale.numel() else BLOCK
    # Hold values as E4M3 does: relative to 2^-6 of the largest power of two in each row and block. Factors that are
    # powers of two change no bit of a sum, so the result has the bits of the same values in FP8 blocks.
    powers, count, per_block = as_float(scale), scale.shape[1], BLOCK // MX_BLOCK
    groups = values.unflatten(1, (count, MX_BLOCK))
    used = groups.any(-1) | powers.isnan()  # a group of zeros may have any scale
    padded = F.pad(torch.where(used, powers, 0), (0, -count % per_block))
    largest = padded.unflatten(1, (ceil_div(count, per_block), per_block)).amax(-1)
    block_scale = (largest * 2**-6).clamp(min=2.0**-126)
    relative = (powers / block_scale.repeat_interleave(per_block, dim=1)[:, :count]).clamp(max=2**6)
    return (groups * relative[..., None]).flatten(1), block_scale, BLOCK


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
    """Write ``gemm(a[rows of e], b[e], bias[e]) + ranks[rows of e] @ factors[e].T`` to ``out[rows of e]``.

    The sum is rounded once. Rows outside all groups are not written.

    a: data (M, K) with scale (M, ceil(K/128)). b: data (E, N, K) with scale (E, ceil(N/128), ceil(K/128)), or any other
    weights of `gemm_reference`. groups, max_m: see `group_rows`. low_rank: ranks (M, r) and factors (E, N, r).
    bias: (E, N). out: (M, N).
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
    projected: Tensor | None = None,
) -> None:
    """Project each group to gate and up, apply `activation` in float32, and quantize the result into ``out``.

    a: data (M, H) with scale (M, ceil(H/128)). gate_up: data (E, 2I, H), gate rows then up rows, with the scales of
    gate, then of up, (E, 2 * ceil(I/128), ceil(H/128)) or (E, 2I, 1). bias: (E, 2I). out: data (M, I), scale
    (M, ceil(I/128)); rows outside all groups are not written. groups, max_m: see `group_rows`. projected: (M, 2I)
    bfloat16 for gate and up, or None; if given, the activation is computed from it and rounded to bfloat16.
    """
    size, blocks = gate_up[0].shape[1] // 2, gate_up[1].shape[1] // 2
    for expert, rows in group_rows(groups, a[0].shape[0], max_m):
        x = _part(a, rows)
        data, scale = _part(gate_up, expert)
        gate_bias, up_bias = (None, None) if bias is None else bias[expert].chunk(2)
        gate = gemm_reference(x, FP8Tensor(data[:size], scale[:blocks]), gate_bias, torch.float32)
        up = gemm_reference(x, FP8Tensor(data[size:], scale[blocks:]), up_bias, torch.float32)
        both = torch.cat([gate, up], dim=-1)
        if projected is not None:
            projected[rows] = both.bfloat16()
            h = activation(projected[rows].float()).bfloat16()
        else:
            h = activation(both)
        quantized = reference.quantize_1x128(h, False)
        out.data[rows], out.scale[rows] = quantized


def group_rows(groups: Tensor, m: int, max_m: int | None) -> Iterator[tuple[int, slice]]:
    """Yield (expert, slice of its rows) for every expert that has rows. m: number of rows of all experts.

    groups: if max_m is None, either offsets (E+1,): expert e has rows ``offsets[e]:offsets[e+1]``, both clamped to
        [0, m]; or ranges of rows (E, 2), in any order. If max_m is given, groups is masked_m (E,): each expert has
        max_m rows, of which expert e uses the first ``masked_m[e]``, clamped to [0, max_m].
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
    """Return the first row and the end of each group, (groups, 2). layout: see `layouts.grouped_gemm_by_layout`.

    Raises ValueError if rows of one group lie between rows of another group.
    """
    layout = layout.long()
    if alignment is not None:
        starts = F.pad((layout[:-1].clamp(min=0) + alignment - 1) // alignment * alignment, (1, 0))
        return torch.stack([starts[:groups], layout], dim=1)
    ranges = torch.zeros(groups, 2, dtype=torch.int64, device="cpu")
    runs, sizes = torch.unique_consecutive(layout.cpu(), return_counts=True)
    before = -1
    for group, end, size in zip(runs.tolist(), sizes.cumsum(0).tolist(), sizes.tolist(), strict=True):
        if not 0 <= group < groups:
            continue
        if ranges[group, 1] and group != before:
            raise ValueError(f"layout: expected the rows of a group together, got group {group} behind group {before}")
        ranges[group, 0] = ranges[group, 0] if ranges[group, 1] else end - size
        ranges[group, 1] = end
        before = group
    return ranges


def _part(operand: FP8Tensor, index: int | slice) -> FP8Tensor:
    """Return data[index] and scale[index], such as the rows of a group or the weights of an expert."""
    data, scale = operand
    return FP8Tensor(data[index], scale[index])


def grouped_gemm_k_reference(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Tensor, accumulate: bool) -> None:
    """Compute ``out[e] (+)= a[:, columns of e] @ b[:, columns of e].T`` for checked arguments of `grouped_gemm_k`.

    Raises ValueError if a group does not begin and end at a multiple of 128.
    """
    k, b_scale = a[0].shape[1], b.scale
    if has_block_scales(*b):
        b_scale = b_scale.repeat_interleave(BLOCK, dim=0)[: len(b.data)]
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
            total.addcmul_(partial, a[1][:, block, None] * b_scale[:, block])
        out[group] = total


def grouped_gemm_k_by_sizes(a: FP8Tensor, b: FP8Tensor, sizes: Tensor, out: Tensor, accumulate: bool) -> None:
    """Compute `layouts.grouped_gemm_k_by_sizes` for checked arguments."""
    if a.data.dim() == 2:
        a, b = (FP8Tensor(data.t(), scale.t()) for data, scale in (a, b))
        offsets = offsets_of_sizes(sizes, a.data.shape[1])
    else:
        a_data, b_data, offsets = join_groups(a.data, b.data, sizes, *out.shape[1:], a.scale.shape[1] * BLOCK)
        a, b = FP8Tensor(a_data, a.scale), FP8Tensor(b_data, b.scale)
    grouped_gemm_k_reference(a, b, offsets, out, accumulate)


def offsets_of_sizes(sizes: Tensor, k: int) -> Tensor:
    """Return the offsets (E + 1,) int32 of groups of these sizes. Raises ValueError if their sum exceeds k."""
    offsets = F.pad(sizes.long().clamp(min=0).cumsum(0), (1, 0))
    if offsets[-1] > k:
        expected = f"groups that fill at most the {k} columns of the operands"
        raise ValueError(f"sizes: expected {expected}, got {int(offsets[-1])}")
    return offsets.int()


def join_groups(a: Tensor, b: Tensor, sizes: Tensor, m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Join the matrices of all groups: return one matrix (m, k) of ``a``, one (n, k) of ``b``, and offsets (E + 1,).

    ``a`` (m * k,) and ``b`` (n * k,) hold the row-major matrices of all groups, one after the other. sizes: (E,), the
    number of columns of each group. Columns after the last group are zeros. Raises ValueError if sizes sum to more than
    k.
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
    """Return ``a @ b`` of E4M3 values held in float32. Autocast is disabled, since it would round the sums.

    E4M3 values are exact in TF32 and bfloat16 too, so ``torch.set_float32_matmul_precision`` changes no product.
    """
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def to_float32(data: Tensor) -> Tensor:
    """Convert FP8 values to float32. On a CPU, a table of all 256 values is five times faster than `Tensor.float`."""
    if data.device.type != "cpu":
        return data.float()
    return _values(data.dtype).index_select(0, data.view(torch.uint8).int().flatten()).view(data.shape)


@functools.cache
def _values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
