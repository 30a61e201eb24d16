"""Launches ``cuda/gemm.cu``: generated constants, tensor maps, and plans that are built once per problem.

A plan holds everything that does not change from call to call: the kernel, the launch configuration and the tensor maps,
of which a call only replaces addresses.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from fp8moe import config
from fp8moe.kernels.gemm_config import SHARED_LIMIT, GemmConfig, choose, raster_group
from fp8moe.kernels.jit import KernelSpec, load
from fp8moe.kernels.launch import Launcher, anchor, current_stream, device_guard, num_sms, tensor_map

_BIAS_KINDS = {None: 0, torch.bfloat16: 1, torch.float32: 2}
_PRODUCER_REGISTERS = 40
_MAX_PLANS = 4096  # prefill asks for a new M at almost every step


def wgmma_source(columns: int) -> str:
    """CUDA text of ``wgmma(d, a, b, accumulate)``: one m64nNk32 FP8 product with N = ``columns``."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, unsigned long long b, bool accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{registers}}}, %{count}, %{count + 1}, p, 1, 1;\\n}}\\n"
               : {outputs} : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}}
"""


def kernel_spec(
    cfg: GemmConfig, n: int, k: int, *, out_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> KernelSpec:
    """The compiled variant for weights (n, k): sizes of the weights are compile-time constants, M is not."""
    constants = {
        "N": n,
        "K": k,
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "SWAP": int(cfg.swap),
        "WARPGROUPS": cfg.warpgroups,
        "STAGES": cfg.stages,
        "SPLIT_K": cfg.split_k,
        "CLUSTER_M": cfg.cluster_m,
        "CLUSTER_N": cfg.cluster_n,
        "BLOCKS_PER_SM": cfg.blocks_per_sm,
        "MATH_REGISTERS": cfg.math_registers,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "OUT_FLOAT32": int(out_dtype == torch.float32),
        "BIAS": _BIAS_KINDS[bias_dtype],
        "SHARED_LIMIT": SHARED_LIMIT,
        "LAG": 0 if cfg.reduces or cfg.warpgroups == 1 else int(__import__("os").environ.get("LAG", "0")),
    }
    prelude = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    return KernelSpec(
        source="gemm.cu", name="gemm", prelude=prelude + wgmma_source(cfg.block_m if cfg.swap else cfg.block_n)
    )


class _Plan:
    """One (shapes, strides, dtypes, device): the kernel, its grid and tensor maps whose addresses are replaced."""

    def __init__(self, a, a_scale, b, b_scale, bias, out, cfg: GemmConfig | None, pdl: bool):
        m, k = a.shape
        n = b.shape[0]
        sms = num_sms(a.device.index)
        cfg = cfg or choose(m, n, k, sms)
        if config.settings.print_configs:
            print(f"fp8moe gemm m={m} n={n} k={k} out={out.dtype}: {cfg}")
        spec = kernel_spec(cfg, n, k, out_dtype=out.dtype, bias_dtype=None if bias is None else bias.dtype)
        tiles = -(-m // (cfg.block_m * cfg.cluster_m)) * -(-n // (cfg.block_n * cfg.cluster_n))
        # A tile that goes through the reduction buffer is a block's only one; others are walked by a resident grid.
        clusters = tiles if cfg.reduces else min(tiles, sms * cfg.blocks_per_sm // cfg.cluster)
        self.launcher = Launcher(
            load(spec),
            grid=clusters * cfg.cluster,
            block=cfg.threads,
            cluster=cfg.cluster if cfg.cluster > 1 else None,
            smem=cfg.shared_bytes(float32=out.dtype == torch.float32),
            pdl=pdl,
        )
        blocks = a_scale.shape[1]
        self.a = tensor_map(
            a, shape=(m, k), strides=(a.stride(0), 1), box=(cfg.block_m // cfg.cluster_n, 128), swizzle=128
        )
        self.b = tensor_map(
            b, shape=(n, k), strides=(b.stride(0), 1), box=(cfg.block_n // cfg.cluster_m, 128), swizzle=128
        )
        self.a_scale = tensor_map(
            a_scale, shape=(blocks, m), strides=(a_scale.stride(1), 1), box=(1, cfg.block_m), l2_promotion=0
        )
        self.pitch = ctypes.c_longlong(out.stride(0))
        self.m = ctypes.c_int(m)
        self.group = ctypes.c_int(raster_group(cfg, m, n, clusters))
        self.lock = threading.Lock()

    def launch(self, a, a_scale, b, b_scale, bias, out):
        index = a.device.index
        bias_pointer = 0 if bias is None else bias.data_ptr()
        with self.lock:
            self.a.replace_address(a.view(torch.uint8))
            self.a_scale.replace_address(a_scale)
            self.b.replace_address(b.view(torch.uint8))
            self.launcher.launch(
                current_stream(index),
                self.a,
                self.a_scale,
                self.b,
                b_scale.data_ptr(),
                bias_pointer,
                out.data_ptr(),
                self.pitch,
                self.m,
                self.group,
            )
            idle = anchor(index)
            self.a.replace_address(idle)
            self.a_scale.replace_address(idle)
            self.b.replace_address(idle)


_plans: dict[tuple, _Plan] = {}


def gemm(a, a_scale, b, b_scale, bias, out, *, config: GemmConfig | None = None, pdl: bool = False) -> None:
    """``out = a @ b.T`` on tensors that ``kernels.gemm`` has checked.

    Args:
        a, a_scale: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, ceil(K / 128)) float32, MN-major.
        b, b_scale: (N, K) float8_e4m3fn; (ceil(N / 128), ceil(K / 128)) float32, contiguous.
        bias: (N,) bfloat16 or float32, or None.
        out: (M, N) bfloat16 or float32, written.
        config: the variant to run instead of the cost model's choice.
        pdl: start before the kernel in front of this one has ended; only its weights may be read before that.
    """
    index = a.device.index
    key = (
        a.shape,
        a.stride(0),
        a_scale.stride(1),
        b.shape[0],
        b.stride(0),
        out.stride(0),
        out.dtype,
        None if bias is None else bias.dtype,
        index,
        config,
        pdl,
    )
    with device_guard(index):
        plan = _plans.get(key)
        if plan is None:
            if len(_plans) >= _MAX_PLANS:
                _plans.pop(next(iter(_plans)), None)
            plan = _plans[key] = _Plan(a, a_scale, b, b_scale, bias, out, config, pdl)
        plan.launch(a, a_scale, b, b_scale, bias, out)
