"""Keeps what a call to fp8moe means apart from what its thread has set: default device, inference mode.

Tensors that fp8moe makes name their dtype and device. What other libraries make on behalf of a call, such as the models
of transformers, takes the defaults: `standard_settings` is for the calls that have them made. PyTorch's default dtype
is one for all threads, so no call here changes it: each names the dtype of the models that it makes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def standard_settings() -> Iterator[None]:
    """Work on the CPU, where a call names no device, and outside of inference mode; usable as a decorator."""
    normal = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with normal, standard_device():
        yield


def standard_device() -> AbstractContextManager[Any]:
    """Return a context whose default device is the CPU; none where it is already, as it costs every operation time."""
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu
