"""Launches the dense GEMM: plans by the layout of the operands."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.gemm.config import GemmConfig
from fp8moe.kernels.gemm.epilogue import AddAndStore, PlainStore
from fp8moe.kernels.gemm.plan import Plan
from fp8moe.runtime import config
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.plans import PlanCache


class Operands(NamedTuple):
    """What ``gemm`` multiplies and adds.

    a, a_scale: (M, K) float8_e4m3fn and (M, ceil(K / 128)) float32.
    b, b_scale: (N, K) float8_e4m3fn and (ceil(N / 128), ceil(K / 128)) float32.
    bias: (N,). c: (M, N) of the result's dtype.
    """

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    bias: Tensor | None = None
    c: Tensor | None = None


_plans: PlanCache[Plan] = PlanCache()


def _key(operands: Operands, *options: torch.dtype | GemmConfig | bool | None) -> tuple:
    """All that the checks of the operands and the plan depend on, save addresses."""
    layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in operands]
    return (*layouts, *options)


def find(operands: Operands, out_dtype: torch.dtype, *, pdl: bool = False) -> Plan | None:
    """The plan to `run` on these operands if one like them has run: then there is nothing to check or to copy."""
    plan = _plans.find(_key(operands, out_dtype, None, pdl))
    if plan is None or config.settings.backend == "reference":
        return None
    a, a_scale, b, _, _, c = operands
    addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | (0 if c is None else c.data_ptr())
    return None if addresses & 15 else plan


def make(operands: Operands, out_dtype: torch.dtype, *, cfg: GemmConfig | None = None, pdl: bool = False) -> Plan:
    """The plan for operands as `gemm` takes them, built if it is new."""

    def build() -> Plan:
        a, a_scale, b, _, bias, c = operands
        epilogue = PlainStore if c is None else AddAndStore
        with device_guard(a.get_device()):
            out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
            bias_dtype = None if bias is None else bias.dtype
            return Plan(a, a_scale, b, out, epilogue(out_dtype, bias_dtype), cfg=cfg, pdl=pdl)

    return _plans.get(_key(operands, out_dtype, cfg, pdl), build)


def gemm(operands: Operands, out: Tensor, *, cfg: GemmConfig | None = None, pdl: bool = False) -> None:
    """``out = a @ b.T + bias + c`` on tensors that ``kernels.gemm.dense`` has checked.

    operands: rows of a, b and c at multiples of 16 bytes; a_scale MN-major and at such a multiple; b_scale contiguous;
        bias bfloat16 or float32, contiguous.
    out: (M, N) bfloat16 or float32, rows at multiples of 16 bytes, written. It may be c.
    cfg: the variant to run instead of the cost model's choice. pdl: start before the kernel ahead has ended.
    """
    run(make(operands, out.dtype, cfg=cfg, pdl=pdl), operands, out)


def run(plan: Plan, operands: Operands, out: Tensor) -> None:
    """Launch the plan of these operands, on PyTorch's current stream."""
    a, a_scale, b, b_scale, bias, c = operands
    index = plan.index
    addend = () if c is None else (c.data_ptr(), c.stride(0))
    with device_guard(index):
        plan.launch(
            current_stream(index),
            *(a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr(), 0),
            (out.data_ptr(), out.stride(0), 0 if bias is None else bias.data_ptr(), *addend),
        )
