"""Copies to the device that do not make the host wait for what runs there."""

from collections.abc import Iterable

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; pinned on the way, so that the host does not wait."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def integers_on(device: torch.device, values: Iterable[int]) -> Tensor:
    """(n,) int64."""
    return moved(torch.tensor([*values], dtype=torch.int64), device)
