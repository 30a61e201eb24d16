"""What a decoder runs in, whatever its caller is in."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def surroundings(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Within them the device is the current one, and on it this stream; torch.autocast is off, as in a capture."""
    place = nullcontext()
    if device.type == "cuda":
        place = torch.cuda.device(device) if stream is None else torch.cuda.stream(stream)
    with place, torch.autocast(device.type, enabled=False):
        yield
