"""Launches ``cuda/gemm_k.cu``: a plan for each problem, in which a call puts its pointers."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm.config import GroupedKConfig
from fp8moe.kernels.gemm.source import GroupedKArguments, grouped_k_spec
from fp8moe.kernels.gemm.tiles import choose_grouped_k
from fp8moe.quant.formats import FP8Tensor, ceil_div
from fp8moe.runtime import config
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard, num_sms, tensor_map
from fp8moe.runtime.plans import PlanCache


class Plan:
    """How to run on operands of given shapes, strides and device, which is to be current."""

    def __init__(self, a: FP8Tensor, b: FP8Tensor, out: Tensor, accumulate: bool, cfg: GroupedKConfig | None):
        (groups, m, n), k = out.shape, a.data.shape[1]
        sms = num_sms(out.get_device())
        cfg = cfg or choose_grouped_k(groups, m, n, sms)
        if config.settings.print_configs:
            print(f"fp8moe grouped_gemm_k groups={groups} m={m} n={n} k={k}: {cfg}")
        self._maps = []
        for (data, scale), rows in ((a, cfg.block_m), (b, cfg.block_n)):
            blocks = scale.shape[1]
            self._maps += [
                tensor_map(data, shape=data.shape, strides=(data.stride(0), 1), box=(rows, 128), swizzle=128),
                tensor_map(
                    scale, shape=(blocks, len(scale)), strides=(scale.stride(1), 1), box=(1, rows), l2_promotion=0
                ),
            ]
        columns = 128 // out.element_size()  # that TMA writes at once
        rest = cfg.block_n % columns or columns  # the last ones of a tile
        for width in (columns, rest):
            swizzle = 128 if width == columns else 0
            self._maps.append(
                tensor_map(out, shape=out.shape, strides=out.stride(), box=(1, 16, width), swizzle=swizzle)
            )
        rows = ceil_div(m, cfg.block_m)
        grid = min(groups * rows * ceil_div(n, cfg.block_n), sms)
        # The square-most footprint reads the least of both operands.
        raster = min(rows, max(1, round((grid * cfg.block_n / cfg.block_m) ** 0.5)))
        self._arguments = GroupedKArguments(groups=groups, m=m, k=k, raster=raster)
        self._launcher = Launcher(
            load(grouped_k_spec(cfg, n, out_float32=out.dtype == torch.float32, accumulate=accumulate)),
            grid=grid,
            block=cfg.threads,
            smem=cfg.shared_bytes,
            args=(*self._maps, self._arguments),
        )

    def launch(self, stream: int, operands: tuple[int, ...], offsets: int, out: int) -> None:
        """Enqueue the kernel. All but `stream` are addresses, those of the operands and of `out` multiples of 16."""
        with self._launcher.lock:
            for descriptor, address in zip(self._maps, (*operands, out, out), strict=True):
                descriptor.replace_address(address)
            self._arguments.offsets = offsets
            self._launcher.launch(stream)


_plans: PlanCache[Plan] = PlanCache()


def grouped_gemm_k(
    a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Tensor, accumulate: bool, cfg: GroupedKConfig | None = None
) -> None:
    """``out[e] (+)= a[:, columns of e] @ b[:, columns of e].T`` on tensors that ``kernels.gemm.grouped_k`` has checked.

    a: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, K / 128) float32, MN-major, 16-byte aligned; likewise b.
    group_offsets: (E + 1,) int32, contiguous.
    out: (E, M, N) float32, or bfloat16 unless accumulate, contiguous, 16-byte aligned, written.
    cfg: the variant to run instead of the choice.
    """
    index = out.get_device()
    operands = (*a, *b)
    key = (*(value.shape for value in operands), *(value.stride() for value in operands), out.shape[0], out.dtype)
    with device_guard(index):
        plan = _plans.get((*key, accumulate, index, cfg), lambda: Plan(a, b, out, accumulate, cfg))
        addresses = tuple(value.data_ptr() for value in operands)
        plan.launch(current_stream(index), addresses, group_offsets.data_ptr(), out.data_ptr())
