"""Launches ``cuda/pick_ranks.cu`` and ``cuda/spread_ranks.cu``. Arguments are checked by the callers."""

import ctypes

from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_THREADS = 256
_CHUNK = 8  # ranks of a thread

_plans: PlanCache[PointerLauncher] = PlanCache()


def kernel_spec(name: str, num_experts: int, top_k: int, rank: int) -> KernelSpec:
    """The kernel `name`, pick_ranks or spread_ranks."""
    defines = (("EXPERTS", num_experts), ("TOP_K", top_k), ("RANK", rank), ("THREADS", _THREADS))
    return KernelSpec(f"{name}.cu", name, defines)


def pick_ranks(ranks: Tensor, index: Tensor, rows: Tensor, num_experts: int, picked: Tensor) -> None:
    """Fill `picked` as ``experts.ranks.pick_ranks`` describes."""
    rank = picked.shape[1]
    _launch("pick_ranks", rows.numel() * rank, num_experts, rank, (ranks,), index, rows, picked)


def spread_ranks(picked: Tensor, weights: Tensor | None, index: Tensor, rows: Tensor, ranks: Tensor) -> None:
    """Fill `ranks` as ``experts.ranks.spread_ranks`` describes."""
    rank = picked.shape[1]
    _launch("spread_ranks", ranks.numel(), ranks.shape[1] // rank, rank, (picked, weights), index, rows, ranks)


def _launch(
    name: str,
    count: int,
    num_experts: int,
    rank: int,
    sources: tuple[Tensor | None, ...],
    index: Tensor,
    rows: Tensor,
    out: Tensor,
) -> None:
    """count: ranks that are copied or made."""
    if not count:
        return
    (tokens, top_k), device = rows.shape, out.get_device()

    def build() -> PointerLauncher:
        return PointerLauncher(
            load(kernel_spec(name, num_experts, top_k, rank)),
            grid=ceil_div(count // _CHUNK, _THREADS),
            block=_THREADS,
            pointers=len(sources) + 3,
            args=(ctypes.c_uint32(tokens),),
        )

    operands = *(None if source is None else aligned(source) for source in sources), index.contiguous(), rows, out
    with device_guard(device):
        plan = _plans.get((name, tokens, top_k, num_experts, rank, device), build)
        plan.launch(current_stream(device), *(0 if value is None else value.data_ptr() for value in operands))
