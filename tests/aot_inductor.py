"""Where AOTInductor can make a package and load it."""

import shutil

import torch
from torch.utils.cpp_extension import CUDA_HOME


def can_package(on_gpu: bool) -> bool:
    """It wants a C++ compiler, on a GPU the CUDA toolkit too; there PyTorch 2.11 crashes as it loads any package."""
    crashes = torch.__version__.startswith("2.11.")
    return shutil.which("g++") is not None and (not on_gpu or (CUDA_HOME is not None and not crashes))
