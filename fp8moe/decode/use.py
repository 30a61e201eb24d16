"""A decoder's use of its model: the ranks that hold the model, and detection of changes to it."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe.decode.output import OutputLayer
from fp8moe.layers.master import Fingerprint
from fp8moe.weights.closing import modules_of, refits_of


class Ranks(NamedTuple):
    """The ranks that hold a model together. They agree on values, so that all run the same steps.

    groups: process groups that the model is sharded over; empty for a model on one rank.
    key_heads: the number of ranks that the heads of keys and values are split over.
    """

    groups: tuple[Any, ...] = ()
    key_heads: int = 1

    @property
    def most(self) -> int:
        """Return the size of the largest group."""
        return max((dist.get_world_size(group) for group in self.groups), default=1)

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest of the values that the ranks pass. device: the model's device, used to communicate."""
        if not self.groups:
            return value
        agreed = torch.tensor([value], dtype=torch.int64, device=device)
        for group in self.groups:
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
        return int(agreed)

    def first(self, values: list[int], device: torch.device) -> list[int]:
        """Return the values that the first rank passes. device: the model's device, used to communicate."""
        if not self.groups:
            return values
        agreed = torch.tensor(values, dtype=torch.int64, device=device)
        for group in self.groups:
            dist.broadcast(agreed, group_src=0, group=group)
        return agreed.tolist()


def ranks_of(model: Any) -> Ranks:
    """Find the ranks that hold the model's parameters as DTensors."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    groups = {}
    for parameter in model.parameters():
        if mesh := _mesh(parameter):
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    projections = (getattr(module, "k_proj", None) for module in model.modules())
    spread = [_sharded_over(projection.weight) for projection in projections if hasattr(projection, "weight")]
    return Ranks(tuple(group for ranks, group in groups.items() if len(ranks) > 1), max(spread, default=1))


def _mesh(parameter: Tensor) -> Any:
    """Return the device mesh of a DTensor, or None for other tensors."""
    from torch.distributed.tensor import DTensor

    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _sharded_over(weight: Tensor) -> int:
    """Return how many ranks the rows of a weight are sharded over, 1 if they are not."""
    mesh = _mesh(weight)
    if mesh is None:
        return 1
    return next((mesh.size(dim) for dim, place in enumerate(weight.placements) if place.is_shard(0)), 1)


class ModelState:
    """A snapshot of a model: addresses and versions of its weights, and peft's active adapters with their scales.

    CUDA graphs and cached keys are valid while the model matches it. The snapshot keeps no weights in memory.
    output: an FP8 copy of the model's output layer, which `renew` quantizes again.
    """

    def __init__(self, model: nn.Module, output: OutputLayer | None = None):
        self._output = output
        self._take(model)
        self._adapters = [(ref(module), _active(module)) for module in model.modules() if _has_adapters(module)]

    def renew(self, model: nn.Module) -> None:
        """Take a new snapshot of the weights; `change` compares with it from now on."""
        self._take(model)
        if self._output is not None:
            self._output.renew()

    def _take(self, model: nn.Module) -> None:
        self._weights = Fingerprint(_weights(model))
        self._refits = refits_of(model).count

    def change(self, model: nn.Module) -> str | None:
        """Return what has changed in the model since the snapshot, as the start of a sentence, or None."""
        if refits_of(model).count != self._refits:
            return "the model's weights were refitted"
        if not self._weights.matches(_weights(model)):
            return "the model's weights have moved or changed"
        if any(module() is None or _active(module()) != active for module, active in self._adapters):
            return "the model's adapters have been switched, scaled or disabled"
        return None


def check_eval(model: nn.Module) -> None:
    """Raise ValueError if a module of the model is in training mode."""
    if any(module.training for module in modules_of(model)):
        path = next(path for path, module in model.named_modules() if module.training)
        raise ValueError(f"model: call model.eval() first, {path or 'it'} is in training mode")


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield all parameters and buffers. Buffers matter too: many models keep the bias of router scores in a buffer."""
    for module in modules_of(model):
        for tensors in (module._parameters, module._buffers):
            yield from [tensor for tensor in tensors.values() if tensor is not None]


def _has_adapters(module: nn.Module) -> bool:
    """Return whether a module is a layer of peft. Adapters that are added later show up as new parameters."""
    return isinstance(getattr(module, "merged_adapters", None), list)


def _active(module: Any) -> tuple:
    scaling = tuple(getattr(module, "scaling", {}).items())
    return tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters), scaling
