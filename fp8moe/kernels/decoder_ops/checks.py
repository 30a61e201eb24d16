"""Checks of the arguments of norms and routers, in the manner of `runtime.checks`."""

import math

import torch
from torch import Tensor

from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_int, check_like, describe

MAX_HIDDEN = 32768
MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_GROUPS = 32
SCORES = ("softmax", "sigmoid")


def number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None, values: bool, quantized: bool) -> None:
    """Dtypes, shapes and devices of the arguments of `rms_norm`."""
    check_dtype("x", x, *FLOATING)
    if not x.dim() or x.shape[-1] > MAX_HIDDEN or math.prod(x.shape[:-1]) >= 1 << 31:
        raise ValueError(
            f"x: expected shape (..., H) with fewer than 2**31 rows and H up to {MAX_HIDDEN}, got {tuple(x.shape)}"
        )
    check_like("weight", weight, (x.dtype,), (x.shape[-1],), x.device, "x")
    if residual is not None:
        check_like("residual", residual, (x.dtype,), x.shape, x.device, "x")
    if not (values or quantized):
        raise ValueError("values: expected True where quantized is False, got False")


def router_logits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Dtypes, shapes and devices of the arguments of `router_logits`."""
    check_dtype("x", x, *FLOATING)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (T, H), got {tuple(x.shape)}")
    check_dtype("weight", weight, x.dtype)
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: expected shape (E, {x.shape[1]}), got {tuple(weight.shape)}")
    check_device("weight", weight, x.device, "x")
    _floating("dtype", dtype)


def form(top_k: int, score: str, num_groups: int, top_groups: int) -> None:
    """Types of the arguments of `route` that are not tensors, and the score."""
    for name, value in (("top_k", top_k), ("num_groups", num_groups), ("top_groups", top_groups)):
        check_int(name, value)
    if score not in SCORES:
        raise ValueError(f"score: expected one of {SCORES}, got {score!r}")


def route(
    logits: Tensor, top_k: int, bias: Tensor | None, num_groups: int, top_groups: int, dtype: torch.dtype
) -> None:
    """Dtypes, sizes and devices of the arguments of `route`."""
    check_dtype("logits", logits, *FLOATING)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"logits: expected shape (T, E) with E from 1 to {MAX_EXPERTS}, got {tuple(logits.shape)}")
    experts = logits.shape[1]
    if bias is not None:
        check_like("bias", bias, (torch.float32,), (experts,), logits.device, "logits")
    if not 1 <= num_groups <= MAX_GROUPS or experts % num_groups or (num_groups > 1 and experts == num_groups):
        raise ValueError(
            f"num_groups: expected 1, or up to {MAX_GROUPS} groups of equal size, 2 or more of {experts} experts in "
            f"each, got {num_groups}"
        )
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups: expected 1 to {num_groups}, got {top_groups}")
    limit = min(MAX_TOP_K, experts // num_groups * top_groups)
    if not 1 <= top_k <= limit:
        raise ValueError(f"top_k: expected 1 to {limit} of {experts} experts, got {top_k}")
    _floating("dtype", dtype)


def _floating(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATING:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {dtype}")
