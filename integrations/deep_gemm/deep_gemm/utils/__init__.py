"""Casts to FP8 and layout helpers, under DeepGEMM's names."""

from deep_gemm.utils import layout, math
from deep_gemm.utils.layout import *  # noqa: F403
from deep_gemm.utils.math import *  # noqa: F403

__all__ = []
__all__ += layout.__all__ + math.__all__
