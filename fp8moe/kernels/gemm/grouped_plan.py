"""Launches the grouped GEMMs: plans by the layout of the operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.config import GemmConfig
from fp8moe.kernels.gemm.epilogue import Epilogue, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.plan import Plan
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_plans: PlanCache[Plan] = PlanCache()


def grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    groups: Tensor,
    out: Tensor,
    *,
    max_m: int | None = None,
    expected_m: float | None = None,
    cfg: GemmConfig | None = None,
) -> None:
    """``out[rows of e] = a[rows of e] @ b[e].T`` on tensors that ``kernels.gemm.grouped`` has checked.

    Args:
        a, a_scale: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, ceil(K / 128)) float32, MN-major, 16-byte aligned.
        b, b_scale: (E, N, K) float8_e4m3fn; (E, ceil(N / 128), ceil(K / 128)) float32; contiguous.
        groups: int32, offsets (E + 1,), or with `max_m`, where M = E * max_m, rows in use (E,).
        out: (M, N) bfloat16 or float32, rows 16-byte aligned, written.
        expected_m: rows that a group is expected to have; by default M / E.
        cfg: the variant to run instead of the cost model's choice.
    """
    if a.shape[1] == 0:
        _zero_groups(groups, out, max_m)
        return
    options = {"max_m": max_m, "expected_m": expected_m, "cfg": cfg}
    _run((a, a_scale, b, b_scale), groups, out, (0,), PlainStore(out.dtype), **options)


def grouped_gemm_swiglu(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    groups: Tensor,
    out_data: Tensor,
    out_scale: Tensor,
    *,
    activation: Activation,
    max_m: int | None = None,
    expected_m: float | None = None,
    cfg: GemmConfig | None = None,
) -> None:
    """The same with gate and up weights, `activation`, and the result quantized 1x128.

    Args:
        b, b_scale: (E, 2I, K) float8_e4m3fn; (E, 2 * ceil(I / 128), ceil(K / 128)) float32; I a multiple of 16.
        out_data, out_scale: (M, I) float8_e4m3fn; (M, ceil(I / 128)) float32, MN-major; written.
    """
    options = {"max_m": max_m, "expected_m": expected_m, "cfg": cfg}
    scale = (out_scale.data_ptr(), out_scale.stride(1))
    _run((a, a_scale, b, b_scale), groups, out_data, scale, SwigluQuantize(activation), **options)


def _run(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    groups: Tensor,
    out: Tensor,
    further: tuple[int, ...],
    epilogue: Epilogue,
    **options: float | GemmConfig | None,
) -> None:
    """further: the epilogue's addresses and pitches behind those of `out`."""
    a, a_scale, b, _ = operands
    index = a.get_device()
    layouts = (a.shape, a.stride(), a_scale.stride(), b.shape, out.stride(), index)
    with device_guard(index):
        plan = _plans.get(
            (*layouts, epilogue, *options.values()), lambda: Plan(a, a_scale, b, out, epilogue, **options)
        )
        plan.launch(
            current_stream(index),
            *(value.data_ptr() for value in (*operands, groups)),
            (out.data_ptr(), out.stride(0), *further),
        )


def _zero_groups(groups: Tensor, out: Tensor, max_m: int | None) -> None:
    """Without any K, rows of groups are zero; the host does not know which they are."""
    rows = torch.arange(out.shape[0], device=out.device)
    if max_m is None:
        starts, ends = groups[:-1].clamp(0, len(rows)), groups[1:].clamp(0, len(rows))
        inside = ((rows[:, None] >= starts) & (rows[:, None] < ends)).any(1)
    else:
        inside = rows % max_m < groups.clamp(0, max_m)[rows // max_m]
    out.masked_fill_(inside[:, None], 0)
