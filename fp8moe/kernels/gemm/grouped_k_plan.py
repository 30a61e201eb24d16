"""Launches ``cuda/gemm_k.cu``, see `gemm_cuda`: a plan for each problem, in which a call puts its pointers."""

import ctypes
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from fp8moe.kernels.gemm.config import PRODUCER_REGISTERS
from fp8moe.kernels.gemm.plan import remember
from fp8moe.kernels.wgmma import wgmma_source
from fp8moe.runtime import config
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard, num_sms, tensor_map


@dataclass(frozen=True)
class Tile:
    """One compiled variant of ``cuda/gemm_k.cu``, up to N.

    Attributes:
        block_m, block_n: rows of a and of b.
        stages: depth of the shared-memory ring, about 190 KB.
    """

    block_m: int
    block_n: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages of both tiles, their scales and two mbarriers, and room to align them."""
        rows = self.block_m + self.block_n
        return self.stages * (rows * 128 + ceil(rows * 4 / 128) * 128 + 16) + 1024


TILES = (Tile(256, 96, 4), Tile(256, 112, 4), Tile(128, 96, 6))
_LOW_TILE = 1.2  # a row of a low tile takes longer: it shares its loads of b with fewer
_THREADS = 384  # two math warpgroups and the producer
_MATH_REGISTERS = 240


def choose(groups: int, m: int, n: int, num_sms: int) -> Tile:
    """The tile whose waves over the SMs cover the least area: low ones need more loads, but fill up the last wave."""

    def cost(tile: Tile) -> float:
        waves = ceil(groups * ceil(m / tile.block_m) * ceil(n / tile.block_n) / num_sms)
        return waves * tile.block_m * tile.block_n * (_LOW_TILE if tile.block_m == 128 else 1)

    return min(TILES, key=cost)


def kernel_spec(tile: Tile, n: int, out_dtype: torch.dtype, accumulate: bool) -> KernelSpec:
    """The compiled variant: M, K and the groups are not constants."""
    constants = {
        "N": n,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "OUT_FLOAT32": int(out_dtype == torch.float32),
        "ACCUMULATE": int(accumulate),
        "MATH_REGISTERS": _MATH_REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "SHARED_BYTES": tile.shared_bytes,
    }
    prelude = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    return KernelSpec(source="gemm_k.cu", name="gemm_k", prelude=prelude + wgmma_source(tile.block_n))


class Plan:
    """How to run on operands of given shapes, strides and device, which is to be current."""

    def __init__(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        out: Tensor,
        accumulate: bool,
        tile: Tile | None,
    ):
        (groups, m, n), k = out.shape, a.shape[1]
        sms = num_sms(a.get_device())
        tile = tile or choose(groups, m, n, sms)
        if config.settings.print_configs:
            print(f"fp8moe grouped_gemm_k groups={groups} m={m} n={n} k={k}: {tile}")
        self.maps = []
        for data, scale, rows in ((a, a_scale, tile.block_m), (b, b_scale, tile.block_n)):
            blocks = scale.shape[1]
            self.maps += [
                tensor_map(data, shape=data.shape, strides=(data.stride(0), 1), box=(rows, 128), swizzle=128),
                tensor_map(
                    scale, shape=(blocks, len(scale)), strides=(scale.stride(1), 1), box=(1, rows), l2_promotion=0
                ),
            ]
        self.offsets, self.out = ctypes.c_int64(), ctypes.c_int64()
        rows = ceil(m / tile.block_m)
        grid = min(groups * rows * ceil(n / tile.block_n), sms)
        # The square-most footprint reads the least of both operands.
        raster = min(rows, max(1, round((grid * tile.block_n / tile.block_m) ** 0.5)))
        self.launcher = Launcher(
            load(kernel_spec(tile, n, out.dtype, accumulate)),
            grid=grid,
            block=_THREADS,
            smem=tile.shared_bytes,
            args=(*self.maps, self.offsets, self.out, *map(ctypes.c_int, (groups, m, k, raster))),
        )

    def launch(self, stream: int, operands: tuple[int, int, int, int], offsets: int, out: int) -> None:
        """Enqueue the kernel. All but `stream` are addresses, those of the operands multiples of 16."""
        with self.launcher.lock:
            for descriptor, address in zip(self.maps, operands, strict=True):
                descriptor.replace_address(address)
            self.offsets.value = offsets
            self.out.value = out
            self.launcher.launch(stream)


_plans: dict[tuple, Plan] = {}


def grouped_gemm_k(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    group_offsets: Tensor,
    out: Tensor,
    accumulate: bool,
    *,
    tile: Tile | None = None,
) -> None:
    """``out[e] (+)= a[:, columns of e] @ b[:, columns of e].T`` on tensors that ``kernels.grouped_k`` has checked.

    a, a_scale: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, K / 128) float32, MN-major, 16-byte aligned; likewise b.
    group_offsets: (E + 1,) int32, contiguous.
    out: (E, M, N) float32, or bfloat16 unless accumulate, contiguous, 16-byte aligned, written.
    tile: the variant to run instead of the choice.
    """
    index = a.get_device()
    layouts = (*a.shape, a.stride(0), a_scale.stride(1), b.shape[0], b.stride(0), b_scale.stride(1))
    key = (*layouts, out.shape[0], out.dtype, accumulate, index, tile)
    with device_guard(index):
        plan = _plans.get(key)
        if plan is None:
            plan = remember(_plans, key, Plan(a, a_scale, b, b_scale, out, accumulate, tile))
        addresses = (a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr())
        plan.launch(current_stream(index), addresses, group_offsets.data_ptr(), out.data_ptr())
