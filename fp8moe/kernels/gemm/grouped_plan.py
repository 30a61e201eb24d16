"""Launches ``cuda/gemm.cu`` for groups of rows with a weight matrix each: plans built once per problem."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.config import GemmConfig, raster_group
from fp8moe.kernels.gemm.grouped_config import choose, row_tiles_bound
from fp8moe.kernels.gemm.plan import Output, remember
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.runtime import config
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard, num_sms, tensor_map


class Plan:
    """How to run a grouped GEMM on operands of given shapes, strides and device, which is to be current.

    a (M, K) with MN-major a_scale, b (E, N, K), out (M, N) bfloat16 or float32, or with `activation` E4M3 (M, N / 2).
    max_m: of the masked layout, where M = E * max_m. expected_m: rows that a group is expected to have.
    """

    def __init__(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        activation: Activation | None = None,
        scale_pitch: int = 0,
        max_m: int | None = None,
        expected_m: float | None = None,
        cfg: GemmConfig | None = None,
        pdl: bool = False,
    ):
        m, k = a.shape
        groups, n, _ = b.shape
        sms = num_sms(a.get_device())
        if expected_m is None:
            expected_m = m / groups
        cfg = cfg or choose(m, groups, expected_m, n, k, sms, max_m=max_m, swiglu=activation is not None)
        if config.settings.print_configs:
            name = "grouped_gemm" if activation is None else "grouped_gemm_swiglu"
            print(f"fp8moe {name} m={m} groups={groups} expected_m={expected_m} n={n} k={k}: {cfg}")
        self.a = tensor_map(a, shape=(m, k), strides=(a.stride(0), 1), box=(cfg.block_m, 128), swizzle=128)
        self.a_scale = tensor_map(
            a_scale,
            shape=(a_scale.shape[1], m),
            strides=(a_scale.stride(1), 1),
            box=(1, cfg.scale_box),
            l2_promotion=0,
        )
        rows = cfg.block_n if activation is None else cfg.block_n // 2  # of gate, and as many of up
        self.b = tensor_map(b, shape=(groups * n, k), strides=(k, 1), box=(rows, 128), swizzle=128)
        self.out_map = None
        if cfg.staged and out.dtype == torch.bfloat16 and out.stride(0) == n:
            self.out_map = tensor_map(out, shape=(m, n), strides=(n, 1), box=(64, 64), swizzle=128)
        self.b_scale, self.groups = ctypes.c_int64(), ctypes.c_int64()
        self.out = Output(pitch=out.stride(0), scale_pitch=scale_pitch)
        swiglu = 0
        if activation is not None:
            swiglu = 1 if activation.limit is None else 2 if activation.alpha is None else 3
            self.out.limit = activation.limit or 0
            self.out.alpha = activation.alpha or 0
        tiles = row_tiles_bound(cfg.block_m, m, groups, max_m) * -(-n // cfg.block_n)
        # A split tile is its blocks' only one; others are walked by a resident grid.
        concurrent = tiles if cfg.split_k > 1 else min(tiles, sms * cfg.blocks_per_sm)
        self.launcher = Launcher(
            load(kernel_spec(cfg, n, k, out_dtype=out.dtype, swiglu=swiglu)),
            grid=concurrent * cfg.split_k,
            block=cfg.threads,
            cluster=cfg.split_k,
            smem=cfg.shared_bytes,
            pdl=pdl,
            args=(
                *(self.a, self.a_scale, self.b, self.out_map or self.a),
                *(self.b_scale, self.groups, self.out),
                *(ctypes.c_int(m), ctypes.c_int(max_m or 0)),
                ctypes.c_int(raster_group(cfg, m, concurrent)),
            ),
        )

    def launch(
        self, stream: int, a: int, a_scale: int, b: int, b_scale: int, groups: int, out: int, out_scale: int = 0
    ) -> None:
        """Enqueue the kernel. All but `stream` are addresses; those of a, a_scale, b and out multiples of 16."""
        launcher = self.launcher
        with launcher.lock:
            self.a.replace_address(a)
            self.a_scale.replace_address(a_scale)
            self.b.replace_address(b)
            if self.out_map is not None:
                self.out_map.replace_address(out)
            self.b_scale.value = b_scale
            self.groups.value = groups
            self.out.data = out
            self.out.scale = out_scale
            launcher.launch(stream)


_plans: dict[tuple, Plan] = {}


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
    """``out[rows of e] = a[rows of e] @ b[e].T`` on tensors that ``kernels.grouped`` has checked.

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
    _run(a, a_scale, b, b_scale, groups, out, None, max_m, expected_m, cfg, None)


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
    _run(a, a_scale, b, b_scale, groups, out_data, out_scale, max_m, expected_m, cfg, activation)


def _run(a, a_scale, b, b_scale, groups, out, out_scale, max_m, expected_m, cfg, activation) -> None:
    index = a.get_device()
    scale_pitch = 0 if out_scale is None else out_scale.stride(1)
    key = (
        *(a.shape, a.stride(), a_scale.stride(), b.shape, out.stride(), out.dtype, index),
        *(scale_pitch, max_m, expected_m, cfg, activation),
    )
    with device_guard(index):
        plan = _plans.get(key)
        if plan is None:
            options = {"activation": activation, "scale_pitch": scale_pitch, "max_m": max_m}
            plan = Plan(a, a_scale, b, out, expected_m=expected_m, cfg=cfg, **options)
            remember(_plans, key, plan)
        plan.launch(
            current_stream(index),
            *(a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr(), groups.data_ptr(), out.data_ptr()),
            0 if out_scale is None else out_scale.data_ptr(),
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
