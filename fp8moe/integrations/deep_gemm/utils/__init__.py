"""Casts to FP8 and helpers of layouts, by DeepGEMM's names."""

from fp8moe.integrations.deep_gemm.utils import layout, math
from fp8moe.integrations.deep_gemm.utils.layout import *  # noqa: F403
from fp8moe.integrations.deep_gemm.utils.math import *  # noqa: F403

__all__ = []
__all__ += layout.__all__ + math.__all__
