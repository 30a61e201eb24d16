"""Backends of torch.compile that need something beside PyTorch, for parametrized tests."""

import importlib.util
import shutil

import pytest

INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
)
_CAN_TRITON = shutil.which("gcc") and importlib.util.find_spec("triton")
CUDA_INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not _CAN_TRITON, reason="inductor needs Triton and a C compiler")
)
