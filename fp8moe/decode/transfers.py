"""Copies between host and GPU that do not block the host, and detection of operations that do."""

from collections import deque
from collections.abc import Iterable
from contextvars import Token
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8moe.runtime.capture import rehearsed

aten = torch.ops.aten
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; from a CPU to a GPU through pinned memory, so that the host does not wait."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def integers_on(device: torch.device, values: Iterable[int]) -> Tensor:
    """Return the values as a tensor (n,) int64 on the device, without waiting."""
    return to_device(torch.tensor([*values], dtype=torch.int64, device="cpu"), device)


class _Copy(NamedTuple):
    values: Tensor
    host: Tensor
    copied: torch.cuda.Event | None


class Readback:
    """Copies tensors to the host in stream order, so that the host reads a copy while the GPU runs later operations.

    lag: the number of newer copies that are under way while the host reads a copy.
    """

    def __init__(self, device: torch.device):
        self.lag = 1 if device.type == "cuda" else 0
        self._waiting: deque[_Copy] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, values: Tensor) -> None:
        if values.device.type != "cuda":
            self._waiting.append(_Copy(values, values, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._waiting.append(_Copy(values, host, copied))

    def pop(self) -> tuple[Tensor, Tensor]:
        """Wait for the oldest copy and return it: the tensor on its device, and the copy on the host."""
        values, host, copied = self._waiting.popleft()
        if copied is not None:
            copied.synchronize()
        return values, host


class HostReads(TorchDispatchMode):
    """Records operations on tensors of a device that read values on the host, which a CUDA graph cannot capture.

    Such an operation returns values to the host, or the shape of its result depends on values. What runs rehearses a
    capture: an operation that would not read there does not here.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.operations: list[str] = []
        self._before: list[Token[bool]] = []

    def __enter__(self) -> Self:
        self._before.append(rehearsed.set(True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        rehearsed.reset(self._before.pop())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if any(tensor.device == self.device for tensor in tensors) and _reads(function, args, kwargs):
            self.operations.append(str(function))
        return function(*args, **kwargs)


def _reads(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    match function:
        case aten.index.Tensor:
            return _has_mask(args[1])
        case aten.index_put.default | aten.index_put_.default:
            return _has_mask(args[1]) and args[2].numel() != 1  # a single value is filled in without a read
        case aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        case aten._to_copy.default:
            return kwargs.get("device") == torch.device("cpu") != args[0].device and not kwargs.get("non_blocking")
    return not WAITING_TAGS.isdisjoint(function.tags)


def _has_mask(indices: list[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
