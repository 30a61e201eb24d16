"""A second stream of a GPU, for work that need not wait for other GPUs."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SecondStream:
    """Runs work beside the current stream of a device: from where that is when this is made, until it waits for it.

    What the two streams allocate is freed for their own later work only, which comes after they have met again; so no
    memory is written while the other stream reads it. In the capture of a CUDA graph both become part of the graph.
    """

    def __init__(self, device: torch.device):
        self._stream = _stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """The result of work, for which the current stream waits."""
        current = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            out = work()
        current.wait_stream(self._stream)
        return out
