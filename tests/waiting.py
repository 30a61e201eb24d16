"""For tests that nothing waits for the GPU."""

from contextlib import contextmanager

import torch


@contextmanager
def no_waiting():
    """What waits for the GPU inside raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
