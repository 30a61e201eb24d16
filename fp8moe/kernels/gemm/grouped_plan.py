"""Launches the grouped GEMMs: plans by the layout of the operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.config import GemmConfig
from fp8moe.kernels.gemm.epilogue import AddLowRank, Epilogue, PeerStore, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.plan import Plan
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.peer_table import Targets
from fp8moe.runtime.plans import PlanCache

Option = float | tuple[int, int] | GemmConfig | None

_plans: PlanCache[Plan] = PlanCache()


def grouped_gemm(
    a: FP8Tensor,
    b: FP8Tensor,
    groups: Tensor,
    out: Tensor,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
    **options: Option,
) -> None:
    """``out[rows of e] = a[rows of e] @ b[e].T`` on tensors that ``kernels.gemm.grouped`` has checked.

    Args:
        a: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, ceil(K / 128)) float32, MN-major, 16-byte aligned.
        b: (E, N, K) float8_e4m3fn; (E, ceil(N / 128), ceil(K / 128)) float32; contiguous.
        groups: int32, offsets (E + 1,), ranges of rows (E, 2), or with `max_m`, where M = E * max_m, rows in use (E,).
        out: (M, N) bfloat16 or float32, rows 16-byte aligned, written.
        low_rank: ranks (M, r) and factors (E, N, r), whose product is added; bfloat16, contiguous, r a multiple of 16.
        options: max_m, expected_m, whole and cfg, as for `Plan`.
    """
    if a.data.shape[1] == 0:
        _zero_groups(groups, out, options.get("max_m"))
        return
    epilogue, further = PlainStore(out.dtype), (0,)
    if low_rank is not None:
        ranks, factors = low_rank
        epilogue, further = AddLowRank(out.dtype, rank=ranks.shape[1]), (ranks.data_ptr(), factors.data_ptr())
    _run((*a, *b, groups), out, further, epilogue, options | {"ranges": groups.dim() == 2})


def grouped_gemm_swiglu(
    a: FP8Tensor, b: FP8Tensor, groups: Tensor, out: FP8Tensor, activation: Activation, **options: Option
) -> None:
    """The same with gate and up weights, `activation`, and the result quantized 1x128.

    Args:
        b: (E, 2I, K) float8_e4m3fn; (E, 2 * ceil(I / 128), ceil(K / 128)) float32; I a multiple of 16.
        out: (M, I) float8_e4m3fn; (M, ceil(I / 128)) float32, MN-major; written.
    """
    scale = (out.scale.data_ptr(), out.scale.stride(1))
    _run((*a, *b, groups), out.data, scale, SwigluQuantize(activation), options)


def grouped_gemm_to(
    a: FP8Tensor,
    b: FP8Tensor,
    groups: Tensor,
    assignments: Tensor,
    epilogue: PeerStore,
    targets: Targets,
    **options: Option,
) -> None:
    """The same with each row where its assignment (M,) int32 belongs; b contiguous."""
    index, addresses = a.data.get_device(), targets.addresses
    with device_guard(index):
        key = (a.data.shape, a.data.stride(), a.scale.stride(), b.data.shape, index, epilogue, *sorted(options.items()))
        plan = _plans.get(key, lambda: Plan(*a, b.data, None, epilogue, **options))
        operands = (value.data_ptr() for value in (*a, *b, groups))
        out = (*addresses[: targets.peers], assignments.data_ptr(), *addresses[targets.peers :])
        plan.launch(current_stream(index), *operands, out)


def _run(
    operands: tuple[Tensor, ...], out: Tensor, further: tuple[int, ...], epilogue: Epilogue, options: dict[str, Option]
) -> None:
    """further: the epilogue's addresses and pitches behind those of `out`."""
    a, a_scale, b, _, _ = operands
    index = a.get_device()
    layouts = (a.shape, a.stride(), a_scale.stride(), b.shape, out.stride(), index)
    with device_guard(index):
        key = (*layouts, epilogue, *sorted(options.items()))
        plan = _plans.get(key, lambda: Plan(a, a_scale, b, out, epilogue, **options))
        addresses = (value.data_ptr() for value in operands)
        plan.launch(current_stream(index), *addresses, (out.data_ptr(), out.stride(0), *further))


def _zero_groups(groups: Tensor, out: Tensor, max_m: int | None) -> None:
    """Without any K, rows of groups are zero; the host does not know which they are."""
    rows = torch.arange(out.shape[0], device=out.device)
    if max_m is None:
        starts, ends = groups.unbind(1) if groups.dim() == 2 else (groups[:-1], groups[1:])
        starts, ends = starts.clamp(0, len(rows)), ends.clamp(0, len(rows))
        inside = ((rows[:, None] >= starts) & (rows[:, None] < ends)).any(1)
    else:
        inside = rows % max_m < groups.clamp(0, max_m)[rows // max_m]
    out.masked_fill_(inside[:, None], 0)
