"""Keeps what a call to fp8moe means apart from what the process has set: default dtype and device, inference mode.

Tensors that fp8moe makes name their dtype and device. What other libraries make on behalf of a call, such as the models
of transformers, takes the defaults: `standard_settings` is for the calls that have them made.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

_lock = threading.Lock()
_calls = 0
_before = torch.float32


@contextmanager
def standard_settings() -> Iterator[None]:
    """Work in float32, on the CPU and outside of inference mode, where a call says nothing else; usable as a decorator.

    PyTorch's default dtype is one for all threads: it changes with the first such call, and is what it was again after
    the last.
    """
    global _calls, _before
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(standard_device())
        with _lock:
            if not _calls:
                _before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            _calls += 1
        try:
            yield
        finally:
            with _lock:
                _calls -= 1
                if not _calls:
                    torch.set_default_dtype(_before)


def standard_device() -> AbstractContextManager[Any]:
    """Return a context whose default device is the CPU; none where it is already, as it costs every operation time."""
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu
