"""What each step chose, on the host, without making the GPU wait."""

from collections import deque

import torch
from torch import Tensor


class Readback:
    """Copies tensors to the host in the order of a stream. One is read while the GPU works on what follows it."""

    def __init__(self, device: torch.device):
        self.lag = 1 if device.type == "cuda" else 0
        """How many steps are under way while one is read."""
        self._waiting: deque[tuple[Tensor, Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, values: Tensor) -> None:
        if values.device.type != "cuda":
            self._waiting.append((values, values, None))
            return
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._waiting.append((values, copy, copied))

    def pop(self) -> tuple[Tensor, Tensor]:
        """The oldest: on its device and on the host, both ready to be read."""
        values, copy, copied = self._waiting.popleft()
        if copied is not None:
            copied.synchronize()
        return values, copy
