"""Which operations wait for values of a tensor: a CUDA graph cannot hold them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class HostReads(TorchDispatchMode):
    """Records in `found` the operations on tensors of a device that read their values on the host.

    The host reads the values themselves, or the shape of a result that depends on them.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if any(tensor.device == self.device for tensor in tensors) and _reads(function, args, kwargs):
            self.found.append(str(function))
        return function(*args, **kwargs)


def _reads(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    match function:
        case aten.index.Tensor:
            return _has_mask(args[1])
        case aten.index_put.default | aten.index_put_.default:
            return _has_mask(args[1]) and args[2].numel() != 1  # one value is filled in under the mask
        case aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        case aten._to_copy.default:
            return kwargs.get("device") == torch.device("cpu") != args[0].device and not kwargs.get("non_blocking")
    return not WAITING_TAGS.isdisjoint(function.tags)


def _has_mask(indices: list[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
