"""Capture of CUDA graphs, and rehearsals of it."""

from contextvars import ContextVar

import torch
from torch import Tensor

rehearsed = ContextVar("rehearsed", default=False)
"""Whether operations do what they would do in a capture."""


def capturing(like: Tensor) -> bool:
    """Return whether an operation on this tensor is captured in a CUDA graph, or rehearsed for it.

    Such an operation cannot read values on the host.
    """
    return like.is_cuda and (rehearsed.get() or torch.cuda.is_current_stream_capturing())
