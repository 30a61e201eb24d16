"""Keeps what a call to fp8moe means apart from what its thread has set.

Tensors and models that fp8moe makes name their dtype and device. Other libraries that make tensors on behalf of a call
take PyTorch's default device; PyTorch's default dtype is one for all threads, so no call changes it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def standard_device() -> AbstractContextManager[Any]:
    """Return a context whose default device is the CPU; none where it is already, as it costs every operation time."""
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu
