"""Backends of torch.compile that need something beside PyTorch, for parametrized tests."""

import shutil

import pytest

INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
)
