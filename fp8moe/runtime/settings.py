"""Make calls of fp8moe independent of PyTorch's default device.

fp8moe names dtype and device of all tensors and models that it makes, but libraries that it calls use PyTorch's default
device. PyTorch's default dtype is shared by all threads, so no call of fp8moe changes it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def standard_device() -> AbstractContextManager[Any]:
    """Return a context manager that makes the CPU the default device, or does nothing if it already is the default.

    Setting a default device slows down every operation within the context.
    """
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu
