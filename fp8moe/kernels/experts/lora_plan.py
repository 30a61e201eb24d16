"""Launches ``cuda/lora_shrink.cu`` and ``cuda/lora_gradient.cu``. Arguments are checked by the callers."""

import ctypes
from collections.abc import Callable

from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_RANKS = 16  # of a thread block
_SHRINK_ROWS, _SHRINK_WARPS, _SHRINK_BLOCKS_PER_SM = 32, 4, 6
_GRADIENT_COLUMNS, _GRADIENT_WARPS = 256, 4

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of cuda/lora_shrink.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("k", "rows", "num_groups"))


def shrink_spec(rank: int, gathered: bool) -> KernelSpec:
    defines = (("RANK", rank), ("GATHERED", int(gathered)), ("ROWS", _SHRINK_ROWS), ("WARPS", _SHRINK_WARPS))
    return KernelSpec("lora_shrink.cu", "lora_shrink", (*defines, ("BLOCKS_PER_SM", _SHRINK_BLOCKS_PER_SM)))


def gradient_spec(rank: int, gathered: bool) -> KernelSpec:
    defines = (("RANK", rank), ("GATHERED", int(gathered)), ("WARPS", _GRADIENT_WARPS))
    return KernelSpec("lora_gradient.cu", "lora_gradient", defines)


def lora_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None, out: Tensor) -> None:
    """Fill `out` as ``experts.lora.lora_shrink`` describes."""
    (rows, rank), groups, width = out.shape, factors.shape[0], x.shape[1]

    def build() -> PointerLauncher:
        return PointerLauncher(
            load(shrink_spec(rank, tokens is not None)),
            grid=(ceil_div(rows, _SHRINK_ROWS), rank // _RANKS),
            block=32 * _SHRINK_WARPS,
            pointers=0,
            table=5,
            args=(_Sizes(width, rows, groups),),
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
            table=5,
            args=(ctypes.c_int64(width),),
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
