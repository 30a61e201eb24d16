"""What the CPU knows of the end of all sequences, without making the GPU wait."""

import torch
from torch import Tensor


class EndFlag:
    """Tells at each check what the check before it saw: waiting for that copy never leaves the GPU without work."""

    def __init__(self):
        self.value = torch.zeros((), dtype=torch.bool, pin_memory=True)
        self.copied = torch.cuda.Event()
        self.watching = False

    def was_set_then_watch(self, finished: Tensor) -> bool:
        """Whether the tensor of the previous call was all True; if not, start copying whether this one is."""
        if self.watching:
            self.copied.synchronize()
            if self.value.item():
                return True
        self.value.copy_(finished.all(), non_blocking=True)
        self.copied.record()
        self.watching = True
        return False

    def forget(self) -> None:
        self.watching = False
