"""Grouped GEMMs of operands in DeepGEMM's layouts: `grouped_gemm_by_layout` and `grouped_gemm_k_by_sizes`."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, launch, reference
from fp8moe.kernels.gemm.api import NAMES, multiply_groups
from fp8moe.kernels.gemm.epilogue import PlainStore
from fp8moe.kernels.gemm.launch import GemmOperands
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.checks import check_vector, mn_major
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, check_out, row_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, layout_of, planned, resident_blocks
from fp8moe.runtime.operator import Written, define
from fp8moe.runtime.sm90 import WARP

_GroupedOperands = Annotated[GemmOperands, (*GemmOperands._fields[:4], "groups")]


class _Launchers(NamedTuple):
    """The launchers of one call.

    `ahead` runs before `gemm`, and fills the tensors that the functions in `new` allocate.
    """

    ahead: PointerLauncher
    new: tuple[Callable[[], Tensor], ...]
    gemm: launch.GemmLauncher


# ---- groups of rows in any order ----

_RANGES_THREADS = 1024


def grouped_gemm_by_layout(
    a: FP8Tensor, b: FP8Tensor, layout: Tensor, out: Tensor, *, alignment: int | None = None, expected_m: int
) -> None:
    """Compute `grouped_gemm` into ``out`` for groups in any order.

    a, b, out: as for `grouped_gemm`.
    layout: int32, on the device of the operands. Without alignment: (M,), the group of each row; values outside [0, E)
        mean no group. The rows of a group must be contiguous; rows of no group between them are computed like the
        group's rows. With alignment: (E,), the end of each group; group 0 begins at row 0, every other group at the
        next multiple of alignment after the end of the previous group.
    expected_m: the expected number of rows per group; affects the speed only.

    On the CUDA backend the host does not read or wait for the groups, and a group whose rows are not contiguous may be
    multiplied with another group's weights; on the reference backend such a group raises ValueError.
    """
    operands = (*a, *b, layout)
    autograd.check_out("fp8moe.grouped_gemm_by_layout", (*NAMES, "layout", "out"), (*operands, out))
    _by_layout_op(*operands, alignment, expected_m, out)


def ranges_spec(groups: int) -> KernelSpec:
    return KernelSpec("group_ranges.cu", "group_ranges", (("GROUPS", groups), ("THREADS", _RANGES_THREADS)))


@planned
def _ranges_launcher(device_index: int, rows: int, groups: int, alignment: int | None) -> PointerLauncher:
    """Build the launcher of group_ranges.cu, to be called with (layout, ranges), both contiguous."""
    args = ctypes.c_int(rows), ctypes.c_int(alignment or 0)
    return PointerLauncher(load(ranges_spec(groups)), grid=1, block=_RANGES_THREADS, pointers=2, args=args)


def group_ranges(layout: Tensor, groups: int, alignment: int | None) -> Tensor:
    """Return the first row and the end of each group, (groups, 2) int32. layout: see `grouped_gemm_by_layout`."""
    if not use_cuda(layout):
        return reference.group_ranges(layout, groups, alignment)
    ranges = torch.empty((groups, 2), dtype=torch.int32, device=layout.device)
    if groups:
        _ranges_launcher(layout.get_device(), layout.shape[0], groups, alignment)(aligned(layout), ranges)
    return ranges


@planned
def _layout_launchers(
    device_index: int, operands: GemmOperands, alignment: int | None, expected_m: int, out: Tensor
) -> _Launchers:
    """Build the launchers: `ahead` computes each group's range of rows from the layout, given as operands.groups."""
    groups = operands.b.shape[0]
    new_ranges = partial(torch.empty_strided, (groups, 2), (2, 1), dtype=torch.int32, device=out.device)
    how = PlainStore(out.dtype), Grouping(expected_m), None if out.is_contiguous() else out
    return _Launchers(
        _ranges_launcher(device_index, len(operands.groups), groups, alignment),
        (new_ranges,),
        launch.grouped(device_index, operands._replace(groups=new_ranges()), *how),
    )


def _by_layout(operands: _GroupedOperands, alignment: int | None, expected_m: int, out: Written) -> None:
    a, a_scale, b, b_scale, _, _, layout = operands
    index, pairs = out.get_device(), (FP8Tensor(a, a_scale), FP8Tensor(b, b_scale))
    found = launch.find(_layout_launchers, operands, alignment, expected_m, layout_of(out))
    if layout.data_ptr() % 16:
        found = None
    if found is None:
        _by_layout_fake(operands, alignment, expected_m, out)
    checks.own_memory(out, *pairs, layout=layout)
    if found is None:
        if not (use_cuda(a) and out.numel() and b.numel()):
            multiply_groups(*pairs, group_ranges(layout, b.shape[0], alignment), out, Grouping(expected_m))
            return
        operands = GemmOperands(*checks.activations(a, a_scale), *checks.weights(b, b_scale))
        operands = operands._replace(groups=aligned(layout))
        found = _layout_launchers(index, operands, alignment, expected_m, out)
        a, a_scale, b, b_scale, _, _, layout = operands
    (new_ranges,), address = found.new, out.data_ptr()
    ranges = new_ranges()
    groups = ranges.data_ptr()
    with device_guard(index):
        stream = current_stream(index)
        found.ahead.launch(stream, layout.data_ptr(), groups)
        mapped = a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), address
        found.gemm.launch(stream, mapped, (b_scale.data_ptr(), 0, address, out.stride(0)), groups)


def _by_layout_fake(operands: GemmOperands, alignment: int | None, expected_m: int, out: Tensor) -> None:
    a, a_scale, b, b_scale, _, _, layout = operands
    m, n = checks.rows_of_experts(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale))
    checks.result(out, (m, n), a.device)
    check_vector("layout", layout, torch.int32, m if alignment is None else b.shape[0], a.device)
    checks.expected_rows(expected_m)
    if alignment is not None and alignment < 1:
        raise ValueError(f"alignment: expected a number of rows, got {alignment}")


_by_layout_op = define("grouped_gemm_by_layout -> ()", _by_layout, _by_layout_fake, forward_only=True)


# ---- groups along K, given by sizes ----

_JOIN_WARPS = 8  # warps per thread block
_JOIN_BLOCKS_PER_SM = 8
_JOIN_ROWS = 32  # rows of 128 columns that a warp copies at a time


def grouped_gemm_k_by_sizes(
    a: FP8Tensor, b: FP8Tensor, sizes: Tensor, out: Tensor, *, accumulate: bool = False
) -> None:
    """Compute ``out[e] (+)= a_e @ b_e.T`` of dequantized operands, for every group e along K.

    a: data (M * K,) float8_e4m3fn: the row-major matrices (M, sizes[e]) of all groups, concatenated; scale (M, K/128)
        float32, with one column per 128 columns of the groups. Or one transposed matrix for all groups: data (K, M),
        scale (K/128, M), which are copied unless they are transposed views of (M, K) and (M, K/128).
    b: like a with N instead of M; N must be a multiple of 8.
    sizes: (E,) int32, on the device of the operands, multiples of 128. Their sum is at most K.
    out: (E, M, N) float32, or bfloat16 unless accumulate; contiguous, in memory that no operand uses.
    accumulate: add to ``out``. Otherwise groups without columns give zeros.

    On the CUDA backend the host does not read or wait for the sizes, and concatenated groups are first copied to one
    matrix per operand. A group whose size is not a multiple of 128, or that ends past K, gives uninitialized values or
    NaN on the CUDA backend, and raises ValueError on the reference backend.
    """
    operands = (*a, *b, sizes)
    autograd.check_out("fp8moe.grouped_gemm_k_by_sizes", (*NAMES, "sizes", "out"), (*operands, out))
    _by_sizes_op(*operands, out, accumulate)


class _JoinSizes(ctypes.Structure):
    """``struct Sizes`` of cuda/ops/join_groups.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("a_rows", "b_rows", "k"))


def join_spec(groups: int) -> KernelSpec:
    block = (("WARPS", _JOIN_WARPS), ("ROWS", _JOIN_ROWS), ("SIZES_BYTES", ctypes.sizeof(_JoinSizes)))
    return KernelSpec("join_groups.cu", "join_groups", (("GROUPS", groups), *block))


@planned
def join_launcher(device_index: int, groups: int, m: int, n: int, k: int) -> PointerLauncher:
    """Build the launcher of join_groups.cu, to be called with (a, b, sizes, joined a, joined b, offsets).

    Shapes of these tensors: (m * k,), (n * k,), (E,), (m, k), (n, k), (E + 1,). With m = n = 0 the kernel writes only
    the offsets.
    """
    units = (ceil_div(m, _JOIN_ROWS) + ceil_div(n, _JOIN_ROWS)) * (k // BLOCK)
    return PointerLauncher(
        load(join_spec(groups)),
        grid=max(1, min(ceil_div(units, _JOIN_WARPS), resident_blocks(_JOIN_BLOCKS_PER_SM, device_index))),
        block=_JOIN_WARPS * WARP,
        pointers=6,
        args=(_JoinSizes(m, n, k),),
    )


@planned
def _sizes_launchers(device_index: int, operands: GemmOperands, accumulate: bool, out: Tensor) -> _Launchers:
    """Build the launchers: `ahead` computes the groups' offsets from their sizes, given as operands.groups.

    For concatenated operands, `ahead` also joins the groups' matrices into one matrix per operand.
    """
    a, a_scale, b, b_scale, *_ = operands
    (groups, m, n), k = out.shape, a.shape[0]
    new = partial(torch.empty_strided, device=out.device)
    new_joined, joined_rows = (), (0, 0)
    if a.dim() == 1:
        k, joined_rows = k // m, (m, n)
        new_joined = tuple(partial(new, (rows, k), (k, 1), dtype=a.dtype) for rows in joined_rows)
        a, b = (make() for make in new_joined)
    else:
        a, a_scale, b, b_scale = a.t(), a_scale.t(), b.t(), b_scale.t()
    return _Launchers(
        join_launcher(device_index, groups, *joined_rows, k),
        (partial(new, (groups + 1,), (1,), dtype=torch.int32), *new_joined),
        launch.along_k(device_index, FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), out, accumulate),
    )


def _by_sizes(operands: _GroupedOperands, out: Written, accumulate: bool) -> None:
    a, a_scale, b, b_scale, _, _, sizes = operands
    index, pairs = out.get_device(), (FP8Tensor(a, a_scale), FP8Tensor(b, b_scale))
    found = launch.find(_sizes_launchers, operands, accumulate, layout_of(out))
    if b_scale.data_ptr() % 16:
        found = None
    if found is None:
        _by_sizes_fake(operands, out, accumulate)
    checks.own_memory(out, *pairs, sizes=sizes)
    if found is None:
        if not use_cuda(a):
            reference.grouped_gemm_k_by_sizes(*pairs, sizes, out, accumulate)
            return
        if not (out.numel() and a.numel()):
            if not accumulate:
                out.zero_()
            return
        operands = GemmOperands(*_as_read(*pairs[0]), *_as_read(*pairs[1]), groups=sizes.contiguous())
        found = _sizes_launchers(index, operands, accumulate, out)
        a, a_scale, b, b_scale, _, _, sizes = operands
    offsets, *joined = [new() for new in found.new]
    a_joined, b_joined = (x.data_ptr() for x in joined or (a, b))
    groups, address = offsets.data_ptr(), out.data_ptr()
    mapped = a_joined, a_scale.data_ptr(), b_joined, b_scale.data_ptr(), address, address
    with device_guard(index):
        stream = current_stream(index)
        found.ahead.launch(stream, a.data_ptr(), b.data_ptr(), sizes.data_ptr(), a_joined, b_joined, groups)
        found.gemm.launch(stream, mapped, (groups,))


def _as_read(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return data and scale of an operand, copied if the kernels cannot read their memory layout."""
    if data.dim() == 1:
        return aligned(data), mn_major(scale, of_more_rows=True)
    return row_major(data.t()).t(), mn_major(scale.t(), of_more_rows=True).t()


def _by_sizes_fake(operands: GemmOperands, out: Tensor, accumulate: bool) -> None:
    a, a_scale, b, b_scale, _, _, sizes = operands
    check_vector("sizes", sizes, torch.int32, None, a.device)
    if out.dim() != 3:
        raise ValueError(f"out: expected shape (E, M, N), got {tuple(out.shape)}")
    _, m, n = out.shape
    k = a_scale.shape[-1] * BLOCK if a_scale.dim() else 0
    shape = checks.matrices_along_k(_matrix("a", a, a_scale, m, k), _matrix("b", b, b_scale, n, k))
    if a.dim() != b.dim():
        raise ValueError(f"b.data: expected as many dimensions as a.data, got {tuple(b.shape)}")
    dtypes = (torch.float32,) if accumulate else (torch.float32, torch.bfloat16)
    check_out(out, dtypes, (sizes.shape[0], *shape), a.device, "a.data")


def _matrix(name: str, data: Tensor, scale: Tensor, rows: int, k: int) -> FP8Tensor:
    """Return an operand with data viewed as (rows, K). k: number of columns, for concatenated groups."""
    if data.dim() != 1:
        return FP8Tensor(*(part.mT if part.dim() > 1 else part for part in (data, scale)))
    if data.shape[0] != rows * k:
        expected = f"({rows} * {k},) to match out and the scales of a"
        raise ValueError(f"{name}.data: expected shape {expected}, got {tuple(data.shape)}")
    return FP8Tensor(data.view(rows, k), scale)


_by_sizes_op = define("grouped_gemm_k_by_sizes -> ()", _by_sizes, _by_sizes_fake, forward_only=True)
