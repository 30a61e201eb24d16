"""Launches ``cuda/gemm.cu``: plans that are built once per problem, in which a call puts its pointers.

A plan holds everything that does not change from call to call: the kernel, the launch configuration, the tensor maps.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch
from torch import Tensor

from fp8moe.kernels.gemm.config import GemmConfig, choose, raster_group
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.runtime import config
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard, num_sms, tensor_map

_MAX_PLANS = 4096  # prefill asks for a new M at almost every step


class Output(ctypes.Structure):
    """``struct Output`` of cuda/gemm_epilogue.cuh."""

    _fields_ = (
        ("data", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("bias", ctypes.c_int64),
        ("scale", ctypes.c_int64),
        ("scale_pitch", ctypes.c_int64),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )


class Plan:
    """How to run the GEMM on operands of given shapes, strides, dtypes and device, which is to be current.

    shape: (M, N) of the result. new_out(): an uninitialized result.
    """

    def __init__(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        cfg: GemmConfig | None,
        pdl: bool,
    ):
        m, k = a.shape
        n = b.shape[0]
        self.shape = (m, n)
        self.index = a.get_device()
        # With strides, and bound beforehand, an allocation takes half the time of torch.empty.
        self.new_out = functools.partial(torch.empty_strided, self.shape, (n, 1), dtype=out_dtype, device=a.device)
        sms = num_sms(self.index)
        cfg = cfg or choose(m, n, k, sms)
        if config.settings.print_configs:
            print(f"fp8moe gemm m={m} n={n} k={k} out={out_dtype}: {cfg}")
        self.a = tensor_map(a, shape=(m, k), strides=(a.stride(0), 1), box=(cfg.block_m, 128), swizzle=128)
        self.b = tensor_map(b, shape=(n, k), strides=(b.stride(0), 1), box=(cfg.block_n, 128), swizzle=128)
        blocks = a_scale.shape[1]
        self.a_scale = tensor_map(
            a_scale, shape=(blocks, m), strides=(a_scale.stride(1), 1), box=(1, cfg.scale_box), l2_promotion=0
        )
        # Of a contiguous result; one with another pitch is written without it.
        boxed = out_dtype == torch.bfloat16 and cfg.staged
        self.out_map = (
            tensor_map(self.new_out(), shape=self.shape, strides=(n, 1), box=(64, 64), swizzle=128) if boxed else None
        )
        self.b_scale, no_groups = ctypes.c_int64(), ctypes.c_int64()
        self.out = Output()
        tiles = -(-m // cfg.block_m) * -(-n // cfg.block_n)
        # A tile that goes through the reduction buffer is a block's only one; others are walked by a resident grid.
        concurrent = tiles if cfg.single_tile else min(tiles, sms * cfg.blocks_per_sm)
        group = raster_group(cfg, m, concurrent)
        self.launcher = Launcher(
            load(kernel_spec(cfg, n, k, out_dtype=out_dtype, bias_dtype=None if bias is None else bias.dtype)),
            grid=concurrent * cfg.split_k,
            block=cfg.threads,
            cluster=cfg.split_k,
            smem=cfg.shared_bytes,
            pdl=pdl,
            args=(
                *(self.a, self.a_scale, self.b, self.out_map or self.a),
                *(self.b_scale, no_groups, self.out),
                *(ctypes.c_int(m), ctypes.c_int(), ctypes.c_int(group)),
            ),
        )

    def launch(self, stream: int, a: int, a_scale: int, b: int, b_scale: int, bias: int, out: int, pitch: int) -> None:
        """Enqueue the kernel. All but `stream` and `pitch` are addresses, `bias` is 0 if there is none.

        a, a_scale, b, out: multiples of 16. pitch: elements from one row of the result to the next.
        """
        launcher = self.launcher
        with launcher.lock:
            self.a.replace_address(a)
            self.a_scale.replace_address(a_scale)
            self.b.replace_address(b)
            if self.out_map is not None:
                self.out_map.replace_address(out)
            self.b_scale.value = b_scale
            output = self.out
            output.data = out
            output.pitch = pitch
            output.bias = bias
            launcher.launch(stream)


_plans: dict[tuple, Plan] = {}
_plans_lock = threading.Lock()


def _key(a, a_scale, b, b_scale, bias, out_dtype, cfg=None, pdl=False) -> tuple:
    """All that the checks of the operands and the plan depend on, save addresses."""
    return (
        *(a.shape, a.stride(), a.dtype, a.get_device()),
        *(a_scale.shape, a_scale.stride(), a_scale.dtype, a_scale.get_device()),
        *(b.shape, b.stride(), b.dtype, b.get_device()),
        *(b_scale.shape, b_scale.stride(), b_scale.dtype, b_scale.get_device()),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        *(out_dtype, cfg, pdl),
    )


def find_plan(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Plan | None:
    """The plan to `run` on these operands if one like them has run: then there is nothing to check or to copy."""
    plan = _plans.get(_key(a, a_scale, b, b_scale, bias, out_dtype))
    if plan is None or config.settings.backend == "reference":
        return None
    return None if (a.data_ptr() | a_scale.data_ptr() | b.data_ptr()) & 15 else plan


def make_plan(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    config: GemmConfig | None = None,
    pdl: bool = False,
) -> Plan:
    """The plan for operands as `gemm` takes them, built if it is new."""
    key = _key(a, a_scale, b, b_scale, bias, out_dtype, config, pdl)
    plan = _plans.get(key)
    if plan is None:
        with device_guard(a.get_device()):
            plan = remember(_plans, key, Plan(a, a_scale, b, bias, out_dtype, config, pdl))
    return plan


def remember(plans: dict, key: tuple, plan):
    """Keep a plan, and drop the oldest where there are too many. Returns the plan."""
    with _plans_lock:
        if len(plans) >= _MAX_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
    return plan


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    config: GemmConfig | None = None,
    pdl: bool = False,
) -> None:
    """``out = a @ b.T`` on tensors that ``kernels.gemm`` has checked.

    Args:
        a, a_scale: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, ceil(K / 128)) float32, MN-major, 16-byte aligned.
        b, b_scale: (N, K) float8_e4m3fn, rows 16-byte aligned; (ceil(N / 128), ceil(K / 128)) float32, contiguous.
        bias: (N,) bfloat16 or float32, contiguous, or None.
        out: (M, N) bfloat16 or float32, rows 16-byte aligned, written.
        config: the variant to run instead of the cost model's choice.
        pdl: start before the kernel in front of this one has ended; only its weights may be read before that.
    """
    plan = make_plan(a, a_scale, b, b_scale, bias, out.dtype, config=config, pdl=pdl)
    run(plan, a, a_scale, b, b_scale, bias, out)


def run(plan: Plan, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Launch the plan of these operands, on PyTorch's current stream."""
    index = plan.index
    with device_guard(index):
        plan.launch(
            current_stream(index),
            *(a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr()),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
        )
