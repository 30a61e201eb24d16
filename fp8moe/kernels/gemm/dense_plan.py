"""Launches the dense GEMM: plans by the layout of the operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8moe.kernels.gemm.config import GemmConfig
from fp8moe.kernels.gemm.epilogue import AddAndStore, PlainStore
from fp8moe.kernels.gemm.plan import Plan
from fp8moe.runtime import config
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_plans: PlanCache[Plan] = PlanCache()


def _key(a, a_scale, b, b_scale, bias, c, out_dtype, cfg=None, pdl=False) -> tuple:
    """All that the checks of the operands and the plan depend on, save addresses."""
    return (
        *(a.shape, a.stride(), a.dtype, a.get_device()),
        *(a_scale.shape, a_scale.stride(), a_scale.dtype, a_scale.get_device()),
        *(b.shape, b.stride(), b.dtype, b.get_device()),
        *(b_scale.shape, b_scale.stride(), b_scale.dtype, b_scale.get_device()),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        None if c is None else (c.shape, c.stride(), c.dtype, c.get_device()),
        *(out_dtype, cfg, pdl),
    )


def find(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    out_dtype: torch.dtype,
) -> Plan | None:
    """The plan to `run` on these operands if one like them has run: then there is nothing to check or to copy."""
    plan = _plans.find(_key(a, a_scale, b, b_scale, bias, c, out_dtype))
    if plan is None or config.settings.backend == "reference":
        return None
    addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | (0 if c is None else c.data_ptr())
    return None if addresses & 15 else plan


def make(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    c: Tensor | None = None,
    cfg: GemmConfig | None = None,
    pdl: bool = False,
) -> Plan:
    """The plan for operands as `gemm` takes them, built if it is new."""

    def build() -> Plan:
        with device_guard(a.get_device()):
            out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
            store = PlainStore if c is None else AddAndStore
            epilogue = store(out_dtype, None if bias is None else bias.dtype)
            return Plan(a, a_scale, b, out, epilogue, cfg=cfg, pdl=pdl)

    return _plans.get(_key(a, a_scale, b, b_scale, bias, c, out_dtype, cfg, pdl), build)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    out: Tensor,
    *,
    cfg: GemmConfig | None = None,
    pdl: bool = False,
) -> None:
    """``out = a @ b.T + bias + c`` on tensors that ``kernels.gemm.dense`` has checked.

    Args:
        a, a_scale: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, ceil(K / 128)) float32, MN-major, 16-byte aligned.
        b, b_scale: (N, K) float8_e4m3fn, rows 16-byte aligned; (ceil(N / 128), ceil(K / 128)) float32, contiguous.
        bias: (N,) bfloat16 or float32, contiguous, or None.
        c: (M, N) like out, which it may be, or None.
        out: (M, N) bfloat16 or float32, rows 16-byte aligned, written.
        cfg: the variant to run instead of the cost model's choice.
        pdl: start before the kernel in front of this one has ended; only its weights may be read before that.
    """
    plan = make(a, a_scale, b, b_scale, bias, out.dtype, c=c, cfg=cfg, pdl=pdl)
    run(plan, a, a_scale, b, b_scale, bias, c, out)


def run(
    plan: Plan,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    out: Tensor,
) -> None:
    """Launch the plan of these operands, on PyTorch's current stream."""
    index = plan.index
    addend = () if c is None else (c.data_ptr(), c.stride(0))
    with device_guard(index):
        plan.launch(
            current_stream(index),
            *(a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr(), 0),
            (out.data_ptr(), out.stride(0), 0 if bias is None else bias.data_ptr(), *addend),
        )
