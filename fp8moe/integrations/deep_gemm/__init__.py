"""DeepGEMM's Hopper API on fp8moe's kernels: its names, arguments, layouts and semantics (docs/deep_gemm.md).

`install` puts it at ``sys.modules["deep_gemm"]``. What DeepGEMM has for other GPUs only is absent, or raises
NotImplementedError where an operand decides.
"""

# ruff: noqa: F403
import importlib.metadata
import importlib.util
import logging
import sys

import fp8moe
from fp8moe.integrations.deep_gemm import bfloat16, gemm, indexer, settings, utils
from fp8moe.integrations.deep_gemm.bfloat16 import *
from fp8moe.integrations.deep_gemm.gemm import *
from fp8moe.integrations.deep_gemm.indexer import *
from fp8moe.integrations.deep_gemm.settings import *
from fp8moe.integrations.deep_gemm.testing import bench_kineto, calc_diff
from fp8moe.integrations.deep_gemm.utils.layout import (
    get_col_major_tma_aligned_tensor,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    transform_sf_into_required_layout,
)
from fp8moe.integrations.deep_gemm.utils.math import *

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

NAME = "deep_gemm"

# Of DeepGEMM whose API it is, and of fp8moe.
__version__ = f"2.5.0+fp8moe.{fp8moe.__version__.replace('+', '.')}"


def install(*, replace: bool = False) -> None:
    """Make ``import deep_gemm`` in this process give `fp8moe.integrations.deep_gemm`, with its submodules.

    replace: True hides another deep_gemm that is imported or installed, in this process. Calling it again changes
        nothing.

    Raises RuntimeError where there is another deep_gemm and replace is False.
    """
    drop_in = sys.modules[__name__]
    if sys.modules.get(NAME) is drop_in:
        return
    other = None if replace else _other()
    if other is not None:
        raise RuntimeError(f"deep_gemm: {other} is there already; install(replace=True) hides it in this process")
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(f"{__name__}."):
            sys.modules[NAME + name.removeprefix(__name__)] = module
    logging.getLogger(__name__).info("deep_gemm %s: DeepGEMM's Hopper API on the kernels of fp8moe", __version__)


def _other() -> str | None:
    """The deep_gemm that is imported or could be, unless it is the distribution of fp8moe; None if there is none."""
    if NAME in sys.modules:
        return repr(sys.modules[NAME])
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return None
    try:
        version = importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return None if "+fp8moe" in version else str(spec.origin)
