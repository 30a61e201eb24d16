"""DeepGEMM's Hopper API on fp8moe's kernels, with the same names, arguments, layouts and semantics (docs/deep_gemm.md).

Functions that DeepGEMM has only for other GPUs are absent. Operands that only other GPUs support raise
NotImplementedError.
"""

# ruff: noqa: F403
import logging

import fp8moe
from deep_gemm import bfloat16, gemm, indexer, settings, utils
from deep_gemm.bfloat16 import *
from deep_gemm.gemm import *
from deep_gemm.indexer import *
from deep_gemm.settings import *
from deep_gemm.testing import bench_kineto, calc_diff
from deep_gemm.utils.layout import (
    get_col_major_tma_aligned_tensor,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    transform_sf_into_required_layout,
)
from deep_gemm.utils.math import *

__all__ = [
    "__version__",
    "bench_kineto",
    "calc_diff",
    "get_col_major_tma_aligned_tensor",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_tma_aligned_size",
    "install",
    "transform_sf_into_required_layout",
]
__all__ += bfloat16.__all__ + gemm.__all__ + indexer.__all__ + settings.__all__ + utils.math.__all__

# The version of DeepGEMM that the API follows, and the version of fp8moe.
__version__ = f"2.5.0+fp8moe.{fp8moe.__version__.replace('+', '.')}"

logging.getLogger(__name__).info("deep_gemm %s: DeepGEMM's Hopper API on the kernels of fp8moe", __version__)


def install(*, replace: bool = False) -> None:
    """Do nothing: this package already is `deep_gemm`.

    In fp8moe 0.2, this call registered a module of fp8moe under the name `deep_gemm`.
    """
