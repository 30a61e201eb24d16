"""Whether the shards of FP8 weights are whole blocks: a scale belongs to 128x128 values of one rank."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from fp8moe.integrations import finegrained
from fp8moe.integrations.names import NAME
from fp8moe.quant.formats import BLOCK


class _Sharded(NamedTuple):
    """A weight whose rows or columns are spread over ranks: `size` of them in each of its `parts`."""

    name: str
    what: str
    size: int
    parts: int
    ranks: int
    experts: bool


def check_whole_blocks(model: nn.Module) -> None:
    """ValueError if a shard of an FP8 weight that fp8moe runs ends inside a block of its scale.

    model: of transformers, with DTensors as parameters; they may be on the meta device. Every rank finds the same.
    """
    sharded = list(_sharded(model))
    broken = next((weight for weight in sharded if weight.size % (BLOCK * weight.ranks)), None)
    if broken is None:
        return
    blocks = math.gcd(*(weight.size for weight in sharded)) / BLOCK
    sizes = [str(size) for size in range(1, max(int(blocks), 1) + 1) if size == 1 or blocks % size == 0]
    way_out = f"expected a tp_size of {' or '.join(sizes)}"
    if broken.experts:
        way_out += ", or expert parallelism, which keeps each expert whole"
    size = f"{broken.parts} x {broken.size}" if broken.parts > 1 else broken.size
    raise ValueError(
        f"distributed_config: {broken.ranks} ranks cannot share the {size} {broken.what} of {broken.name} in whole "
        f"blocks of {BLOCK}; {way_out}"
    )


def _sharded(model: nn.Module) -> Iterator[_Sharded]:
    from torch.distributed.tensor import DTensor

    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if not isinstance(weight, DTensor) or not _runs_here(module, weight):
                continue
            sizes = dict(zip((-2, -1), weight.shape[-2:], strict=True))
            for place, ranks in zip(weight.placements, weight.device_mesh.shape, strict=True):
                if place.is_replicate() or (axis := place.dim % weight.ndim - weight.ndim) not in sizes:
                    continue
                parts = getattr(place, "split_factor", 1)  # of a placement that shards gate and up each by itself
                what = "rows" if axis == -2 else "columns"
                yield _Sharded(f"{path}.{name}", what, sizes[axis] // parts, parts, ranks, weight.ndim == 3)


def _runs_here(module: nn.Module, weight: torch.Tensor) -> bool:
    """Whether fp8moe runs this weight of a module in FP8."""
    if finegrained.refusal(weight, getattr(module, "block_size", None), getattr(module, "activation_scale", None)):
        return False
    return weight.ndim == 2 or getattr(module.config, "_experts_implementation", None) == NAME
