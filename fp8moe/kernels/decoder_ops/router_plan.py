"""Launches ``cuda/router_logits.cu`` and ``cuda/route.cu``."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.threads import VECTOR_BYTES, row_threads
from fp8moe.quant.formats import align, ceil_div
from fp8moe.quant.quantize import INPUT_TYPES, input_defines
from fp8moe.runtime import config
from fp8moe.runtime.fixed_rows import by_fixed_rows
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, num_sms
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

MAX_TOKENS = 64  # of a thread block of router_logits.cu
_MAX_BYTES = 256 << 10  # of x: every thread block reads all of it
_MAX_ROW_BYTES = 32 << 10  # of which each of 256 threads has 8 vectors
_MAX_EXPERTS_AT_ONCE, _MAX_TOKENS_AT_ONCE = 8, 8  # of a thread block: more cost registers and hide no latency
_MAX_SUMS = WARP  # of a thread: one for each expert and token
_ROUTE_WARPS = 4  # of a thread block

_plans: PlanCache[PointerLauncher] = PlanCache()


class Form(NamedTuple):
    """How `route` chooses and weighs: what is compiled into the kernel.

    sigmoid: the scores, otherwise softmax. bias: there is one.
    """

    top_k: int
    sigmoid: bool
    bias: bool
    num_groups: int
    top_groups: int
    normalize: bool


def by_kernel(tokens: int, row_bytes: int) -> bool:
    """Whether `logits_plan` computes the logits of so many tokens: of more, a GEMM reads less, but its sums depend on
    how many there are."""
    if not 0 < row_bytes <= _MAX_ROW_BYTES:
        return False
    return config.settings.batch_invariant or tokens <= min(MAX_TOKENS, _MAX_BYTES // row_bytes)


def shares(tokens: int, experts: int, sms: int) -> tuple[int, int]:
    """Experts of a thread block, so that there are as many blocks as SMs, and tokens that it takes at a time.

    Powers of two. They are compiled into the kernel, and the order of its sums depends on them.
    """
    if config.settings.batch_invariant:
        tokens = MAX_TOKENS
    block_experts = min(_power_of_two_from(ceil_div(experts, sms)), _MAX_EXPERTS_AT_ONCE)
    return block_experts, min(_power_of_two_from(tokens), _MAX_TOKENS_AT_ONCE, _MAX_SUMS // block_experts)


def _power_of_two_from(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _logits_threads(hidden: int, dtype: torch.dtype) -> int:
    return align(row_threads(hidden * dtype.itemsize), WARP)


def logits_spec(
    block_shares: tuple[int, int], experts: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype, vector: bool
) -> KernelSpec:
    """The kernel for weights (experts, hidden) and logits of these dtypes; block_shares as from `shares`.

    vector: x and the weight start at multiples of 16 bytes, and their rows are multiples of 16 bytes long.
    """
    block_experts, block_tokens = block_shares
    sizes = (
        *(("HIDDEN", hidden), ("NUM_EXPERTS", experts), ("EXPERTS", block_experts), ("TOKENS", block_tokens)),
        *(("MAX_TOKENS", MAX_TOKENS), ("THREADS", _logits_threads(hidden, dtype))),
    )
    types = (*input_defines(dtype, vector=vector), ("OUTPUT", INPUT_TYPES[out_dtype]))
    return KernelSpec("router_logits.cu", "router_logits", (*types, *sizes))


def logits_plan(
    tokens: int,
    experts: int,
    hidden: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device_index: int,
    *,
    vector: bool,
) -> PointerLauncher:
    """The launcher for x (tokens, hidden), weight (experts, hidden) and logits (tokens, experts), in this order.

    None of the sizes is 0, all are contiguous, vector as for `logits_spec`.
    device_index: of the current device. The kernel starts before the one ahead has ended; nothing is read into
    registers or written before it has.
    """

    def build() -> PointerLauncher:
        block_shares = shares(tokens, experts, num_sms(device_index))
        return PointerLauncher(
            load(logits_spec(block_shares, experts, hidden, dtype, out_dtype, vector)),
            grid=(ceil_div(experts, block_shares[0]), ceil_div(tokens, MAX_TOKENS)),
            block=_logits_threads(hidden, dtype),
            pdl=True,
            pointers=3,
            args=(ctypes.c_int32(tokens),),
        )

    return _plans.get(("logits", tokens, experts, hidden, dtype, out_dtype, device_index, vector), build)


def router_logits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits (T, E) of x (T, H) and weight (E, H) in any layout."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    if not by_kernel(tokens, hidden * x.itemsize) or not (tokens and experts):
        return by_fixed_rows(lambda rows: _gemm(rows, weight).to(dtype), x)
    logits = torch.empty((tokens, experts), dtype=dtype, device=x.device)
    x, weight = x.contiguous(), weight.contiguous()
    vector = not (x.data_ptr() | weight.data_ptr() | hidden * x.itemsize) % VECTOR_BYTES
    index = x.get_device()
    with device_guard(index):
        launcher = logits_plan(tokens, experts, hidden, x.dtype, dtype, index, vector=vector)
        launcher.launch(current_stream(index), x.data_ptr(), weight.data_ptr(), logits.data_ptr())
    return logits


def _gemm(x: Tensor, weight: Tensor) -> Tensor:
    """float32."""
    if x.dtype is torch.float32:
        return x @ weight.t()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def route_spec(experts: int, form: Form, dtype: torch.dtype, out_dtype: torch.dtype) -> KernelSpec:
    """The kernel for logits of `experts` experts and of `dtype`, and weights of `out_dtype`."""
    names = ("TOP_K", "SIGMOID", "BIAS", "GROUPS", "TOP_GROUPS", "NORMALIZE")
    types = (*input_defines(dtype, vector=False), ("OUTPUT", INPUT_TYPES[out_dtype]))
    constants = zip(names, map(int, form), strict=True)
    return KernelSpec("route.cu", "route", (*types, ("EXPERTS", experts), *constants, ("WARPS", _ROUTE_WARPS)))


def route_plan(
    tokens: int,
    experts: int,
    form: Form,
    scale: float,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device_index: int,
) -> PointerLauncher:
    """The launcher for logits (tokens, experts), bias (experts,) or 0, index, weights (tokens, top_k), in this order.

    tokens is not 0, all are contiguous. device_index: of the current device. The kernel starts before the one ahead has
    ended; nothing is read or written before it has.
    """
    return _plans.get(
        ("route", tokens, experts, form, scale, dtype, out_dtype, device_index),
        lambda: PointerLauncher(
            load(route_spec(experts, form, dtype, out_dtype)),
            grid=ceil_div(tokens, _ROUTE_WARPS),
            block=_ROUTE_WARPS * WARP,
            pdl=True,
            pointers=4,
            args=(ctypes.c_int64(tokens), ctypes.c_float(scale)),
        ),
    )


def route(logits: Tensor, bias: Tensor | None, form: Form, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Index and weights (T, top_k) of logits (T, E) in any layout."""
    tokens, experts = logits.shape
    index = torch.empty((tokens, form.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, form.top_k), dtype=dtype, device=logits.device)
    if tokens:
        logits, bias = logits.contiguous(), None if bias is None else bias.contiguous()
        device_index = logits.get_device()
        operands = (logits, bias, index, weights)
        with device_guard(device_index):
            route_plan(tokens, experts, form, scale, logits.dtype, dtype, device_index).launch(
                current_stream(device_index), *(0 if operand is None else operand.data_ptr() for operand in operands)
            )
    return index, weights
