"""Grouped GEMMs of operands as DeepGEMM lays them out: `grouped_gemm_by_layout` and `grouped_gemm_k_flat`."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, reference
from fp8moe.kernels.gemm.api import NAMES, grouped_gemm_k, multiply_groups
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.checks import check_scale, check_vector, fp8_data
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, check_device, check_like
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned, resident_blocks
from fp8moe.runtime.operator import Written, define
from fp8moe.runtime.sm90 import WARP

# ---- groups of rows in any order ----

_RANGES_THREADS = 1024


def grouped_gemm_by_layout(
    a: FP8Tensor, b: FP8Tensor, layout: Tensor, out: Tensor, *, alignment: int | None = None, expected_m: int
) -> None:
    """`grouped_gemm` into ``out``, of groups that lie in any order.

    a, b, out: as for `grouped_gemm`, tensors already.
    layout: int32, on the device of the operands. Without alignment (M,), the group of each row; a row whose group is
        outside [0, E) has none. A group's rows lie together, but for rows of no group among them, which are computed
        with it. With alignment (E,), where each group ends: group 0 begins at row 0, each other one at the next
        multiple of alignment behind the end before it.
    expected_m: about how many rows a group has; only the speed depends on it.

    The host neither knows nor waits for the groups on the CUDA backend, where groups whose rows do not lie together are
    multiplied with the weights of one or the other. On the reference backend they raise ValueError.
    """
    operands = (*a, *b, layout)
    autograd.check_out("fp8moe.grouped_gemm_by_layout", (*NAMES, "layout", "out"), (*operands, out))
    _by_layout_op(*operands, alignment, expected_m, out)


def ranges_spec(groups: int) -> KernelSpec:
    return KernelSpec("group_ranges.cu", "group_ranges", (("GROUPS", groups), ("THREADS", _RANGES_THREADS)))


@planned
def _ranges_launcher(device_index: int, rows: int, groups: int, alignment: int | None) -> PointerLauncher:
    """The launcher for a layout and the ranges, both contiguous."""
    args = ctypes.c_int(rows), ctypes.c_int(alignment or 0)
    return PointerLauncher(load(ranges_spec(groups)), grid=1, block=_RANGES_THREADS, pointers=2, args=args)


def group_ranges(layout: Tensor, groups: int, alignment: int | None) -> Tensor:
    """First row and end of each group (groups, 2) int32, of a layout as `grouped_gemm_by_layout` takes it."""
    if not use_cuda(layout):
        return reference.group_ranges(layout, groups, alignment)
    ranges = torch.empty((groups, 2), dtype=torch.int32, device=layout.device)
    if groups:
        _ranges_launcher(layout.get_device(), layout.shape[0], groups, alignment)(aligned(layout), ranges)
    return ranges


class _ByLayout(NamedTuple):
    a: FP8Tensor
    b: FP8Tensor
    layout: Tensor
    alignment: int | None
    expected_m: int
    out: Written


def _by_layout(call: _ByLayout) -> None:
    a, b, layout, alignment, expected_m, out = call
    _by_layout_fake(call)
    checks.own_memory(out, a, b, layout=layout)
    multiply_groups(a, b, group_ranges(layout, b.data.shape[0], alignment), out, Grouping(expected_m))


def _by_layout_fake(call: _ByLayout) -> None:
    a, b, layout, alignment, expected_m, out = call
    m, n = checks.rows_of_experts(a, b)
    checks.result(out, (m, n), a.data.device)
    check_vector("layout", layout, torch.int32, m if alignment is None else b.data.shape[0], a.data.device)
    checks.expected_rows(expected_m)
    if alignment is not None and alignment < 1:
        raise ValueError(f"alignment: expected a number of rows, got {alignment}")


_by_layout_op = define("grouped_gemm_by_layout -> ()", _by_layout, _by_layout_fake, forward_only=True)


# ---- groups along K, each a matrix of its own ----

_JOIN_WARPS = 8  # of a thread block
_JOIN_BLOCKS_PER_SM = 8
_JOIN_ROWS = 32  # that a warp takes of a block of 128 columns


def grouped_gemm_k_flat(a: FP8Tensor, b: FP8Tensor, sizes: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """``out[e] (+)= a_e @ b_e.T`` of dequantized operands, for every group e along K.

    a: data (M * K,) float8_e4m3fn: the matrices (M, sizes[e]) of all groups, row-major, one behind the other; scale
        (M, K/128) float32, a column for each 128 of all groups. b: likewise with N instead of M, a multiple of 8.
    sizes: (E,) int32, on the device of the operands, multiples of 128. Their sum is at most K.
    out: (E, M, N) float32, or bfloat16 unless accumulate; contiguous, in memory that no operand uses.
    accumulate: add to what ``out`` holds. Otherwise groups without columns give zeros.

    On the CUDA backend the host neither knows nor waits for the sizes. Both operands are copied to one matrix each.
    Groups that do not lie within K at multiples of 128 are uninitialized or NaN there, and ValueError on the reference
    backend.
    """
    operands = (*a, *b, sizes)
    autograd.check_out("fp8moe.grouped_gemm_k_flat", (*NAMES, "sizes", "out"), (*operands, out))
    _flat_op(*operands, out, accumulate)


class _JoinSizes(ctypes.Structure):
    """``struct Sizes`` of cuda/join_groups.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("a_rows", "b_rows", "k"))


def join_spec(groups: int) -> KernelSpec:
    block = (("WARPS", _JOIN_WARPS), ("ROWS", _JOIN_ROWS), ("SIZES_BYTES", ctypes.sizeof(_JoinSizes)))
    return KernelSpec("join_groups.cu", "join_groups", (("GROUPS", groups), *block))


@planned
def _join_launcher(device_index: int, groups: int, m: int, n: int, k: int) -> PointerLauncher:
    """The launcher for a, b, sizes, both joined matrices and offsets."""
    units = (ceil_div(m, _JOIN_ROWS) + ceil_div(n, _JOIN_ROWS)) * (k // BLOCK)
    return PointerLauncher(
        load(join_spec(groups)),
        grid=max(1, min(ceil_div(units, _JOIN_WARPS), resident_blocks(_JOIN_BLOCKS_PER_SM, device_index))),
        block=_JOIN_WARPS * WARP,
        pointers=6,
        args=(_JoinSizes(m, n, k),),
    )


def join_groups(a: Tensor, b: Tensor, sizes: Tensor, m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """a (m * k,) and b (n * k,), 16-byte aligned, as matrices (m, k) and (n, k), and the groups' offsets (E + 1,)."""
    groups = sizes.shape[0]
    joined = tuple(torch.empty((rows, k), dtype=a.dtype, device=a.device) for rows in (m, n))
    offsets = torch.empty(groups + 1, dtype=torch.int32, device=a.device)
    if not groups:
        return *joined, offsets.zero_()
    _join_launcher(sizes.get_device(), groups, m, n, k)(a, b, sizes, *joined, offsets)
    return *joined, offsets


def _flat(a: FP8Tensor, b: FP8Tensor, sizes: Tensor, out: Written, accumulate: bool) -> None:
    _flat_fake(a, b, sizes, out, accumulate)
    checks.own_memory(out, a, b, sizes=sizes)
    shape = *out.shape[1:], a.scale.shape[1] * BLOCK
    if use_cuda(a.data):
        a_data, b_data, offsets = join_groups(aligned(a.data), aligned(b.data), sizes.contiguous(), *shape)
    else:
        a_data, b_data, offsets = reference.join_groups(a.data.contiguous(), b.data.contiguous(), sizes, *shape)
    grouped_gemm_k(FP8Tensor(a_data, a.scale), FP8Tensor(b_data, b.scale), offsets, out=out, accumulate=accumulate)


def _flat_fake(a: FP8Tensor, b: FP8Tensor, sizes: Tensor, out: Tensor, accumulate: bool) -> None:
    device = a.data.device
    check_vector("sizes", sizes, torch.int32, None, device)
    dtypes = (torch.float32,) if accumulate else (torch.float32, torch.bfloat16)
    if out.dim() != 3:
        raise ValueError(f"out: expected shape (E, M, N), got {tuple(out.shape)}")
    check_like("out", out, dtypes, (sizes.shape[0], *out.shape[1:]), device, "a.data")
    _, m, n = out.shape
    blocks = a.scale.shape[-1] if a.scale.dim() else 0
    for name, (data, scale), rows in (("a", a, m), ("b", b, n)):
        (length,) = fp8_data(f"{name}.data", data, "(rows * K)")
        if length != rows * blocks * BLOCK:
            expected = f"({rows} * {blocks * BLOCK},) to match out {tuple(out.shape)} and the scales of a"
            raise ValueError(f"{name}.data: expected shape {expected}, got {tuple(data.shape)}")
        check_device(f"{name}.data", data, device, "a.data")
        check_scale(f"{name}.scale", scale, (rows, blocks), device)


_flat_op = define("grouped_gemm_k_flat -> ()", _flat, _flat_fake, forward_only=True)
