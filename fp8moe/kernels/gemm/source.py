"""The compiled variants of ``cuda/gemm.cu``: constants and the wgmma wrapper, text in front of the source."""

import torch

from fp8moe.kernels.gemm.config import PRODUCER_REGISTERS, GemmConfig
from fp8moe.kernels.wgmma import wgmma_source
from fp8moe.runtime.hopper import SHARED_LIMIT
from fp8moe.runtime.jit import KernelSpec

_BIAS_KINDS = {None: 0, torch.bfloat16: 1, torch.float32: 2}


def kernel_spec(
    cfg: GemmConfig,
    n: int,
    k: int,
    *,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None = None,
    swiglu: int = 0,
) -> KernelSpec:
    """The compiled variant for weights (n, k): sizes of the weights are compile-time constants, M is not.

    swiglu: of a grouped GEMM with gate and up weights: 1 plain, 2 clamped, 3 clamped with alpha; 0 without.
    """
    constants = {
        "N": n,
        "K": k,
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "SWAP": int(cfg.swap),
        "WARPGROUPS": cfg.warpgroups,
        "STAGES": cfg.stages,
        "SPLIT_K": cfg.split_k,
        "BLOCKS_PER_SM": cfg.blocks_per_sm,
        "STAGED": int(cfg.staged),
        "GROUPS": cfg.groups,
        "SWIGLU": swiglu,
        "MATH_REGISTERS": cfg.math_registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "OUT_FLOAT32": int(out_dtype == torch.float32),
        "BIAS": _BIAS_KINDS[bias_dtype],
        "SHARED_LIMIT": SHARED_LIMIT,
    }
    prelude = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    return KernelSpec(source="gemm.cu", name="gemm", prelude=prelude + wgmma_source(cfg.columns))
