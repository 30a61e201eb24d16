"""Launches ``cuda/lora_shrink.cu`` and ``cuda/lora_gradient.cu``. Arguments are checked by the callers."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_RANKS = 16  # of a thread block, of both kernels
_GRADIENT_COLUMNS, _GRADIENT_WARPS = 256, 4  # of a thread block of cuda/lora_gradient.cu


class _ShrinkBlock(NamedTuple):
    """A thread block of cuda/lora_shrink.cu: its rows, its warps, which share K, and how many an SM has room for."""

    rows: int
    warps: int
    per_sm: int


_MANY, _FEW = _ShrinkBlock(32, 4, 6), _ShrinkBlock(16, 16, 2)
_FEW_ROWS = 16  # of a group, on average: then what a block takes for one is its K

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of cuda/lora_shrink.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("k", "rows", "num_groups"))


def shrink_spec(rank: int, gathered: bool, few: bool) -> KernelSpec:
    rows, warps, per_sm = _FEW if few else _MANY
    block = (("RANKS", _RANKS), ("ROWS", rows), ("WARPS", warps), ("BLOCKS_PER_SM", per_sm))
    return KernelSpec("lora_shrink.cu", "lora_shrink", (("RANK", rank), ("GATHERED", int(gathered)), *block))


def gradient_spec(rank: int, gathered: bool) -> KernelSpec:
    block = (("RANKS", _RANKS), ("COLUMNS", _GRADIENT_COLUMNS), ("WARPS", _GRADIENT_WARPS))
    return KernelSpec("lora_gradient.cu", "lora_gradient", (("RANK", rank), ("GATHERED", int(gathered)), *block))


def lora_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None, out: Tensor) -> None:
    """Fill `out` as ``experts.lora.lora_shrink`` describes."""
    (rows, rank), groups, width = out.shape, factors.shape[0], x.shape[1]
    few = rows < _FEW_ROWS * groups
    block = _FEW if few else _MANY
    # As many share rows as these have groups, if all have equally many.
    sharing = min(block.rows, ceil_div(block.rows * groups, max(rows, 1)))

    def build() -> PointerLauncher:
        return PointerLauncher(
            load(shrink_spec(rank, tokens is not None, few)),
            grid=(ceil_div(rows, block.rows), rank // _RANKS, sharing),
            block=32 * block.warps,
            pointers=0,
            args=((ctypes.c_int64 * 5)(), _Sizes(width, rows, groups)),
        )

    if rows and groups:
        _launch(("shrink", rows, rank, groups, width), build, x, factors, group_offsets, tokens, out)


def lora_gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None, out: Tensor) -> None:
    """Fill `out` as ``experts.lora.lora_gradient`` describes."""
    groups, rank, width = out.shape

    def build() -> PointerLauncher:
        return PointerLauncher(
            load(gradient_spec(rank, tokens is not None)),
            grid=(ceil_div(width, _GRADIENT_COLUMNS), groups, rank // _RANKS),
            block=32 * _GRADIENT_WARPS,
            pointers=0,
            args=((ctypes.c_int64 * 5)(), ctypes.c_int64(width)),
        )

    if groups and width:
        _launch(("gradient", rank, groups, width), build, x, ranks, group_offsets, tokens, out)


def _launch(key: tuple, build: Callable[[], PointerLauncher], *operands: Tensor | None) -> None:
    """operands: in the order of the kernel's ``struct Operands``; the last two are tokens and the result."""
    *sources, out = operands
    device = out.get_device()
    sources = [None if value is None else aligned(value.contiguous()) for value in sources]
    with device_guard(device):
        plan = _plans.get((*key, sources[-1] is not None, device), build)
        plan.launch(current_stream(device), *(0 if value is None else value.data_ptr() for value in (*sources, out)))
