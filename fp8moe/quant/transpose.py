"""For training: quantize a matrix by rows and columns in one pass, or by columns alone, and transpose FP8 weights."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant import reference
from fp8moe.quant.checks import check_groups, check_padded, check_scale, check_vector, fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div, empty_quantized, padded_rows
from fp8moe.quant.quantize import (
    Places,
    has_vector_rows,
    launch_128x128,
    quantize_128x128,
    quantizer_defines,
    unit_stride,
)
from fp8moe.quant.reference import Results, pad_groups
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.checks import FLOATING, check_dtype, check_like, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, num_sms, planned
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import WARP

_TRANSPOSED = "_fp8moe_transposed"  # attribute of the storage of FP8 weights
TILE_BYTES = BLOCK * BLOCK  # bytes of the transposed tile in shared memory
_WARPS = 8  # warps per thread block
_STRIP = 3  # the most tiles that a thread block processes, side by side
_BLOCKS_PER_SM = 16  # the fewest thread blocks that a launch should have for each SM
_SLAB_BYTES = 16 << 20  # bytes of all tokens in the columns of a strip, which shall stay in L2 if rows are gathered


class Transposed(NamedTuple):
    """A matrix (R, F) of E groups of rows, quantized along its rows and along its columns.

    rows: data (R, F), scale (R, ceil(F/128)) MN-major, as `quantize_1x128` returns them.
    columns: the transpose, with every group padded with zeros to a multiple of 128 rows: data (F, P), scale (F, P/128)
        or, of blocks, (ceil(F/128), P/128), MN-major, P = `padded_rows` (R, E). Columns past ``offsets[E]`` are
        uninitialized.
    offsets: (E+1,) int32: group e has the columns ``offsets[e]:offsets[e+1]`` of `columns`.
    """

    rows: FP8Tensor
    columns: FP8Tensor
    offsets: Tensor


def quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None = None, *, tokens: Tensor | None = None, blocks: bool = False
) -> Transposed:
    """Quantize the rows of x and the rows of its transpose, reading x once.

    A weight gradient ``dY.T @ X`` sums over tokens, so its operands need blocks of 128 tokens along K, besides the
    blocks of 128 features that forward and input gradient need: DeepSeek-V3, arXiv:2412.19437, section 3.3.

    The rows have blocks of 1x128, and so has the transpose. With `blocks` the transpose has blocks of 128x128, as X may
    have: their scales are those of their finite values, and infinities become NaN.

    x: (M, F) bfloat16, float16 or float32, any strides.
    group_offsets: (E+1,) int32: group e has the rows ``group_offsets[e]:group_offsets[e+1]``, any number of them. Both
        ends are clamped to [0, R]; a group whose end is before its start is empty. None: one group of all rows.
    tokens: (R,) int32: row r is ``x[tokens[r]]``, or zeros if tokens[r] is outside [0, M). None: R = M, row r is x[r].
    Returns `Transposed`, detached from the autograd graph. Rows outside all groups are uninitialized. A NaN or infinity
    affects only its block of the row and its block of the column, with `blocks` only itself there. Equal inputs give
    bitwise equal results. On the CUDA
    backend a call can be captured in a CUDA graph: the host does not read the group sizes.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device.
    """
    check_tensor("x", x)
    for name, value in (("group_offsets", group_offsets), ("tokens", tokens)):
        if value is not None:
            check_tensor(name, value)
    return transposed(*_quantize_with_transpose(detached(x), group_offsets, tokens, blocks))


def quantize_columns(
    x: Tensor, group_offsets: Tensor | None = None, *, tokens: Tensor | None = None
) -> tuple[FP8Tensor, Tensor]:
    """Return columns and offsets of `quantize_with_transpose` with `blocks`, bit for bit, without writing rows.

    Operands and errors are those of `quantize_with_transpose`.
    """
    check_tensor("x", x)
    for name, value in (("group_offsets", group_offsets), ("tokens", tokens)):
        if value is not None:
            check_tensor(name, value)
    data, scale, offsets = _quantize_columns(detached(x), group_offsets, tokens)
    return FP8Tensor(data, scale), offsets


def transpose_fp8(w: FP8Tensor) -> FP8Tensor:
    """Transpose weights quantized in blocks of 128x128, bit for bit.

    A block of 128x128 keeps its one scale when it is transposed, so the input gradient uses exactly the values of the
    forward: DeepSeek-V3, arXiv:2412.19437, section 3.3.

    w: FP8Tensor or (data, scale): data (..., N, K) float8_e4m3fn, scale (..., ceil(N/128), ceil(K/128)) float32, as
        `quantize_128x128` returns them; any N and K. Operands that are not contiguous are copied first.
    Returns data (..., K, N) and scale (..., ceil(K/128), ceil(N/128)), contiguous, detached from the autograd graph.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, device or scale shape.
    """
    data, scale = fp8_operand("w", w)
    return FP8Tensor(*_transpose_fp8(detached(data), detached(scale)))


def quantize_both_ways(w: Tensor, below: Tensor | None = None) -> FP8Tensor:
    """Quantize weights as `quantize_128x128` does, and keep their transpose, made in the same pass.

    w: (..., N, K) bfloat16, float16 or float32, any strides. below: (..., N, K), rows that follow those of w, in blocks
        of their own, as `up` follows `gate`; None for none.
    Returns data (..., N or 2N, K) and scale (..., the blocks of w and of below, ceil(K/128)), contiguous, detached. As
    long as the data's memory lives, it holds the transpose, a byte for each value; see `backward_operand`.

    Raises TypeError for a wrong dtype, ValueError for a wrong rank, or a `below` that is not like w.
    """
    data, scale, *transposed = _quantize_both_ways(detached(w), None if below is None else detached(below))
    setattr(data.untyped_storage(), _TRANSPOSED, FP8Tensor(*transposed))
    return FP8Tensor(data, scale)


def backward_operand(w: FP8Tensor) -> FP8Tensor:
    """Return the weights that a backward should keep: w, or its transpose where `quantize_both_ways` has made that.

    The transpose has the shape of w, strides of a transposed matrix, and memory of its own. It is there if w is the
    whole result of `quantize_both_ways`. No PyTorch operator is called: selective activation checkpointing would expect
    it again.
    """
    kept = getattr(w.data.untyped_storage(), _TRANSPOSED, None)
    return kept if kept is not None and kept.data.shape == w.data.shape and w.data.is_contiguous() else w


def transposed_weight(w: FP8Tensor) -> FP8Tensor:
    """Return `transpose_fp8(w)`, without a kernel if w is transposed in memory, as `backward_operand` may return it."""
    data, scale = w.data.mT, w.scale.mT
    return FP8Tensor(data, scale) if data.is_contiguous() and scale.is_contiguous() else transpose_fp8(w)


class _ResultPointers(ctypes.Structure):
    """``struct Results`` of cuda/common/row_tiles.cuh."""

    _pointers_ = 6
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "row_scale", "columns", "column_scale", "offsets", "groups")),
        *((name, ctypes.c_int64) for name in ("width", "row_scale_pitch", "column_scale_pitch")),
        *((name, ctypes.c_uint32) for name in ("num_rows", "num_groups", "row_tiles", "column_tiles", "strip")),
    )


class _GatheredRows(ctypes.Structure):
    """``struct Source`` of cuda/ops/quantize_transpose.cu."""

    _pointers_ = 2
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("x", "tokens", "row_stride")),
        ("num_tokens", ctypes.c_uint32),
    )


def tile_spec(
    name: str,
    source: type[ctypes.Structure],
    dtype: torch.dtype,
    *,
    shared_bytes: int,
    vector: bool = True,
    **defines: int,
) -> KernelSpec:
    """Return the spec of the kernel `name`, which includes quantize_tile.cuh.

    source: ctypes type of the kernel's ``struct Source``. dtype, vector: see `quantizer_defines`. shared_bytes: dynamic
    shared memory of a thread block. defines: further macros.
    """
    defines |= {
        "WARPS": _WARPS,
        "RESULTS_BYTES": ctypes.sizeof(_ResultPointers),
        "SOURCE_BYTES": ctypes.sizeof(source),
        "SHARED_BYTES": shared_bytes,
    }
    return KernelSpec(f"{name}.cu", name, (*quantizer_defines(dtype, vector=vector), *defines.items()))


def kernel_spec(dtype: torch.dtype, vector: bool, by_rows: bool, blocks: bool) -> KernelSpec:
    # Shared memory holds the transposed tile, and the values of the next tile.
    options = {"shared_bytes": TILE_BYTES * (1 + dtype.itemsize), "vector": vector}
    modes = {"BY_ROWS": int(by_rows), "BLOCK_SCALES": int(blocks)}
    return tile_spec("quantize_transpose", _GatheredRows, dtype, **options, **modes)


def strip_width(device_index: int, rows: int, groups: int, column_tiles: int, slab_rows: int = 0) -> int:
    """Return how many tiles a thread block processes, side by side, so that all SMs have work until the end.

    rows, groups, column_tiles: see `tile_launcher`. slab_rows: the number of rows that are gathered, repeatedly; in the
    columns of a strip they take at most `_SLAB_BYTES`, in 16 bits. 0: rows are read once.
    """
    most = min(_STRIP, _SLAB_BYTES // (slab_rows * BLOCK * 2)) if slab_rows else _STRIP
    tiles = padded_rows(rows, groups) // BLOCK * column_tiles
    strip = max(1, min(most, tiles // (_BLOCKS_PER_SM * num_sms(device_index))))
    return ceil_div(column_tiles, ceil_div(column_tiles, strip))  # strips of equal width, if possible


def tile_launcher(
    spec: KernelSpec,
    source: ctypes.Structure,
    *,
    rows: int,
    width: int,
    groups: int,
    column_tiles: int,
    strip: int,
    blocks: bool = False,
) -> PointerLauncher:
    """Build the launcher, on the current device, of a kernel whose spec `tile_spec` returned.

    The launcher is called with the tensors of `Results`, contiguous group offsets or None, then the tensors of
    `source`. source: the kernel's ``struct Source`` with its sizes filled in. rows, width, groups: numbers of rows,
    columns and groups of the results. column_tiles: number of tiles of 128 columns side by side. strip: how many of
    them a thread block processes. blocks: the transpose has scales of blocks.
    """
    row_tiles = padded_rows(rows, groups) // BLOCK
    sizes = {"num_rows": rows, "num_groups": groups, "row_tiles": row_tiles, "column_tiles": column_tiles}
    scales = ceil_div(width, BLOCK) if blocks else width
    pitches = {"row_scale_pitch": align(rows, 4), "column_scale_pitch": align(scales, 4)}
    results = _ResultPointers(width=width, **pitches, **sizes, strip=strip)
    smem = int(dict(spec.defines)["SHARED_BYTES"])
    grid = row_tiles, ceil_div(column_tiles, strip)
    return PointerLauncher(load(spec), grid=grid, block=_WARPS * WARP, smem=smem, args=(results, source))


@planned
def launcher(
    device_index: int, x: Tensor, rows: int, groups: int, vector: bool, by_rows: bool, blocks: bool, strip: int
) -> PointerLauncher:
    """Build the `tile_launcher` of quantize_transpose.cu; its source tensors are x and tokens, or x and None.

    x: (M, F), last stride 1. vector: `has_vector_rows` of x. by_rows: whether rows are written; otherwise the launcher
    takes any tensors for them. blocks, strip: see `tile_launcher`.
    """
    source = _GatheredRows(row_stride=x.stride(0), num_tokens=x.shape[0])
    sizes = {"rows": rows, "width": x.shape[1], "groups": groups, "column_tiles": ceil_div(x.shape[1], BLOCK)}
    return tile_launcher(kernel_spec(x.dtype, vector, by_rows, blocks), source, **sizes, strip=strip, blocks=blocks)


def launch(x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, blocks: bool, results: Results) -> Results:
    """Compute `quantize_with_transpose` into `results` with the CUDA kernel. Returns `results`."""
    _launch((x, group_offsets, tokens), results[:2], results[2:], blocks)
    return results


def launch_columns(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, results: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `quantize_columns` into `results`: data, scale and offsets. Returns `results`."""
    _launch((x, group_offsets, tokens), None, results, True)
    return results


def _launch(operands: tuple, by_rows: tuple | None, by_columns: tuple, blocks: bool) -> None:
    """Launch the kernel on x, group_offsets, tokens. by_rows: data and scale, or None. blocks: see `tile_launcher`."""
    x, *others = operands
    columns, _, offsets = by_columns
    group_offsets, tokens = (None if value is None else value.contiguous() for value in others)
    rows, groups = (x if tokens is None else tokens).shape[0], offsets.shape[0] - 1
    if not columns.numel():
        offsets.copy_(pad_groups(group_offsets, rows, x.device)[2])
        return
    x = unit_stride(x)
    form = has_vector_rows(x), by_rows is not None, blocks
    slab_rows = 0 if tokens is None else x.shape[0]
    strip = strip_width(x.get_device(), rows, groups, ceil_div(x.shape[1], BLOCK), slab_rows)
    run = launcher(x.get_device(), x, rows, groups, *form, strip)
    unused = by_columns[:2]  # in place of rows: the launcher takes the device of its first tensor
    run(*(by_rows or unused), *by_columns, group_offsets, x, tokens)


def transposed(rows: Tensor, row_scale: Tensor, columns: Tensor, column_scale: Tensor, offsets: Tensor) -> Transposed:
    """Return a `Transposed` made of the five tensors that an operator returns."""
    return Transposed(FP8Tensor(rows, row_scale), FP8Tensor(columns, column_scale), offsets)


def empty_results(like: Tensor, rows: int, features: int, groups: int, blocks: bool = False) -> Results:
    """Return uninitialized `Results` for a matrix (rows, features) in `groups` groups, on the device of `like`.

    blocks: the transpose has scales of blocks.
    """
    columns = empty_quantized(like, features, padded_rows(rows, groups), blocks=blocks)
    return Results(*empty_quantized(like, rows, features), *columns, like.new_empty((groups + 1,), dtype=torch.int32))


def _check(x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, blocks: bool = True) -> None:
    check_dtype("x", x, *FLOATING)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (M, F), got {tuple(x.shape)}")
    rows = x.shape[0]
    if tokens is not None:
        check_vector("tokens", tokens, torch.int32, None, x.device)
        rows = tokens.shape[0]
    if group_offsets is None:
        check_padded(rows, 1)
    else:
        check_groups(group_offsets, rows, x.device)


def _empty(x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, blocks: bool) -> Results:
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    return empty_results(x, rows, x.shape[1], 1 if group_offsets is None else group_offsets.shape[0] - 1, blocks)


_quantize_with_transpose = operator(
    "quantize_with_transpose(Tensor x, Tensor? group_offsets, Tensor? tokens, bool blocks) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    cuda=lambda *operands: launch(*operands, _empty(*operands)),
    reference=reference.quantize_with_transpose,
    fake=_empty,
)


def _columns(x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the uninitialized results of `quantize_columns`."""
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    groups = 1 if group_offsets is None else group_offsets.shape[0] - 1
    columns = empty_quantized(x, x.shape[1], padded_rows(rows, groups), blocks=True)
    return *columns, x.new_empty((groups + 1,), dtype=torch.int32)


_quantize_columns = operator(
    "quantize_columns(Tensor x, Tensor? group_offsets, Tensor? tokens) -> (Tensor, Tensor, Tensor)",
    check=_check,
    cuda=lambda *operands: launch_columns(*operands, _columns(*operands)),
    reference=reference.quantize_columns,
    fake=_columns,
)


# ---- FP8 weights ----


def fp8_kernel_spec(load_aligned: bool, store_aligned: bool) -> KernelSpec:
    """Return the spec of transpose_fp8.cu. load_aligned, store_aligned: `has_vector_rows` of input and output."""
    alignment = (("LOAD_ALIGNED", int(load_aligned)), ("STORE_ALIGNED", int(store_aligned)))
    return KernelSpec("transpose_fp8.cu", "transpose_fp8", (("BLOCK", BLOCK), ("WARPS", _WARPS), *alignment))


@planned
def fp8_launcher(device_index: int, data: Tensor, scale: Tensor, load_aligned: bool) -> PointerLauncher:
    """Build the launcher of transpose_fp8.cu. Call it with the tensors (data, scale, data_out, scale_out).

    The tensors must be contiguous and not empty; data_out must start at a multiple of 16 bytes. load_aligned:
    `has_vector_rows` of data.
    """
    n, k = data.shape[-2:]
    return PointerLauncher(
        load(fp8_kernel_spec(load_aligned, n % 16 == 0)),
        grid=scale.numel(),
        block=_WARPS * WARP,
        pointers=4,
        args=tuple(map(ctypes.c_int64, (n, k, *scale.shape[-2:]))),
    )


def _check_fp8(data: Tensor, scale: Tensor) -> None:
    check_dtype("w.data", data, torch.float8_e4m3fn)
    if data.dim() < 2:
        raise ValueError(f"w.data: expected at least two dimensions, got shape {tuple(data.shape)}")
    *lead, n, k = data.shape
    check_scale("w.scale", scale, (*lead, ceil_div(n, BLOCK), ceil_div(k, BLOCK)), data.device)


def _launch_fp8(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    results = _empty_fp8(data, scale)
    if data.numel():
        data, scale = data.contiguous(), scale.contiguous()
        fp8_launcher(data.get_device(), data, scale, has_vector_rows(data))(data, scale, *results)
    return results


def _reference_fp8(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    results = _empty_fp8(data, scale)
    results[0].view(torch.uint8).copy_(data.view(torch.uint8).mT)
    results[1].copy_(scale.mT)
    return results


def _empty_fp8(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return data.new_empty(data.mT.shape), scale.new_empty(scale.mT.shape)


def _check_both_ways(w: Tensor, below: Tensor | None) -> None:
    check_dtype("w", w, *FLOATING)
    if w.dim() < 2:
        raise ValueError(f"w: expected at least 2 dimension(s), got shape {tuple(w.shape)}")
    if below is not None:
        check_like("below", below, (w.dtype,), w.shape, w.device, "w")


def _launch_both_ways(w: Tensor, below: Tensor | None) -> tuple[Tensor, ...]:
    results = data, scale, *_ = _empty_both_ways(w, below)
    places = Places(data.shape[-2], scale.shape[-2])
    rows, blocks = w.shape[-2], ceil_div(w.shape[-2], BLOCK)
    for half, weight in enumerate([w] if below is None else [w, below]):
        firsts = (half * rows, half * blocks) * 2
        out = [result[..., first:, :] for result, first in zip(results, firsts, strict=True)]
        launch_128x128(weight, "float32", out[:2], places, out[2:])
    return results


def _reference_both_ways(w: Tensor, below: Tensor | None) -> tuple[Tensor, ...]:
    halves = [quantize_128x128(weight) for weight in ([w] if below is None else [w, below])]
    data = torch.cat([half.data.view(torch.uint8) for half in halves], -2).view(torch.float8_e4m3fn)
    scale = torch.cat([half.scale for half in halves], -2)
    return data, scale, *(result.mT for result in _reference_fp8(data, scale))


def _empty_both_ways(w: Tensor, below: Tensor | None) -> tuple[Tensor, ...]:
    """Return empty data and scale, and others of their shapes that are transposed in memory."""
    *lead, n, k = w.shape
    halves = 1 if below is None else 2
    data = w.new_empty((*lead, halves * n, k), dtype=torch.float8_e4m3fn)
    scale = w.new_empty((*lead, halves * ceil_div(n, BLOCK), ceil_div(k, BLOCK)), dtype=torch.float32)
    return data, scale, *(result.mT for result in _empty_fp8(data, scale))


_quantize_both_ways = operator(
    "quantize_both_ways(Tensor w, Tensor? below) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check_both_ways,
    cuda=_launch_both_ways,
    reference=_reference_both_ways,
    fake=_empty_both_ways,
)
_transpose_fp8 = operator(
    "transpose_fp8(Tensor data, Tensor scale) -> (Tensor, Tensor)",
    check=_check_fp8,
    cuda=_launch_fp8,
    reference=_reference_fp8,
    fake=_empty_fp8,
)
