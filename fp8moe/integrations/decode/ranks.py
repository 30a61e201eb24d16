"""A model that several ranks hold together: what these decide alike, so that all of them run the same steps."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(NamedTuple):
    """groups: process groups that hold the model together; none for a model on one rank.

    key_heads: over how many ranks the heads of keys and values are spread.
    """

    groups: tuple[Any, ...] = ()
    key_heads: int = 1

    @property
    def most(self) -> int:
        """The ranks of the largest group."""
        return max((dist.get_world_size(group) for group in self.groups), default=1)

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values. device: of the model, which the groups communicate on."""
        if not self.groups:
            return value
        agreed = torch.tensor([value], device=device)
        for group in self.groups:
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
        return int(agreed)

    def first(self, values: list[int], device: torch.device) -> list[int]:
        """The values of the first rank."""
        if not self.groups:
            return values
        agreed = torch.tensor(values, device=device)
        for group in self.groups:
            dist.broadcast(agreed, group_src=0, group=group)
        return agreed.tolist()


ALONE = Ranks()


def ranks_of(model: Any) -> Ranks:
    """Those that hold the parameters of the model as DTensors."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
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
    """The mesh of a DTensor, None for other tensors."""
    from torch.distributed.tensor import DTensor

    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _sharded_over(weight: Tensor) -> int:
    """Over how many ranks the rows of a weight are spread."""
    mesh = _mesh(weight)
    if mesh is None:
        return 1
    return next((mesh.size(dim) for dim, place in enumerate(weight.placements) if place.is_shard(0)), 1)
