"""Connects transformers' tensor and expert parallelism to fp8moe.

Experts that transformers shards by expert run on fp8moe.distributed: partial sums in float32, added in the order of
ranks.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8moe.hf import linears, versions
from fp8moe.hf.experts import NAME, chosen_implementation, experts_forward
from fp8moe.quant.formats import BLOCK


def checked(theirs):
    """Wrap transformers' sharding of a meta model: use fp8moe's plan for experts, and check the shards afterwards."""

    @functools.wraps(theirs)
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        if mesh is None:
            return theirs(cls, model, distributed_config, mesh)
        if chosen_implementation(model) == NAME and not versions.has_ep_size():
            versions.adapt_plans(model, distributed_config)
        model = theirs(cls, model, distributed_config, mesh)
        check_whole_blocks(model)
        return model

    return maybe_distribute_model


def without_rules(theirs):
    """Wrap the resolution of a model's parallel plans: accept an empty tp_plan, which shards the experts only.

    Attention is then the same on all ranks. transformers documents such a plan but refuses it.
    """

    @functools.wraps(theirs)
    def _resolve_parallel_plans(self, distributed_config):
        if distributed_config.tp_plan != {} or distributed_config.ep_size == 1 or chosen_implementation(self) != NAME:
            return theirs(self, distributed_config)
        replicated = dataclasses.replace(distributed_config, tp_plan=dict.fromkeys(self.tp_plan, "replicate"))
        return {}, *theirs(self, replicated)[1:]

    return _resolve_parallel_plans


@functools.cache
def implementation() -> type:
    """Return the class of fp8moe's ep_implementation, for versions of transformers with ep_implementations."""
    from transformers.distributed.expert_parallel import EPImplementation

    class Implementation(EPImplementation):
        """Runs experts for this rank's tokens, which are the same on all ranks of the tensor-parallel mesh."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any):
            check_chosen(experts)
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            spread(experts, ep_mesh, self.shares_batch)

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            from torch.distributed.tensor import DTensor, Replicate, Shard

            check_chosen(self.experts)
            inputs = hidden_states, top_k_index, top_k_weights
            if self.shares_batch or self.tp_mesh.size() == 1:
                return experts_forward(self.experts, *inputs)
            # Each rank of the tensor-parallel mesh sends a part of the tokens to the experts, so that the experts run
            # once for each token.
            whole = [DTensor.from_local(value, self.tp_mesh, [Replicate()], run_check=False) for value in inputs]
            mine = (value.redistribute(placements=[Shard(0)]).to_local() for value in whole)
            part = experts_forward(self.experts, *mine)
            size = {"shape": hidden_states.shape, "stride": hidden_states.stride()}
            return DTensor.from_local(part, self.tp_mesh, [Shard(0)], run_check=False, **size).full_tensor()

    return Implementation


def automatic(theirs):
    """Wrap transformers' ep_implementation "auto": choose fp8moe's for experts that run on fp8moe."""

    def choose(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> Any:
        chosen = implementation() if chosen_implementation(experts) == NAME else theirs
        return chosen(experts, ep_mesh, tp_mesh)

    return choose


def style() -> Any:
    """Make fp8moe's style for experts in a plan, for versions of transformers that shard experts by styles."""
    return versions.make_style(check_chosen, functools.partial(spread, same_tokens=True))


def check_chosen(experts: nn.Module) -> None:
    """Raise ValueError unless fp8moe runs these experts: other implementations know only the experts of this rank."""
    if (chosen := chosen_implementation(experts)) != NAME:
        raise ValueError(
            f"experts_implementation: expected {NAME!r} for experts that fp8moe has spread over ranks, got {chosen!r}"
        )


def spread(experts: nn.Module, mesh: Any, same_tokens: bool) -> None:
    """Apply ExpertParallel to an experts module that transformers has sharded by expert over the mesh.

    same_tokens: whether all ranks of the mesh have the same tokens.
    """
    from fp8moe.distributed import ExpertParallel

    experts.num_experts *= mesh.size()  # transformers has set it to the number of experts on this rank
    method = "replicated" if same_tokens else "auto"
    ExpertParallel(method=method, uniform=same_tokens)._apply(experts, mesh)


class _ShardedWeight(NamedTuple):
    """A weight whose rows or columns are sharded over `ranks`.

    what: "rows" or "columns". parts: number of matrices that are sharded separately, such as gate and up. size: number
    of rows or columns of each of these matrices. experts: whether the weight belongs to experts.
    """

    name: str
    what: str
    size: int
    parts: int
    ranks: int
    experts: bool


def check_whole_blocks(model: nn.Module) -> None:
    """Raise ValueError, on every rank alike, if a shard of an FP8 weight that fp8moe runs ends inside a scale block.

    model: a model of transformers with DTensors as parameters, which may be on the meta device.
    """
    sharded = list(_sharded_weights(model))
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


def _sharded_weights(model: nn.Module) -> Iterator[_ShardedWeight]:
    from torch.distributed.tensor import DTensor

    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if not isinstance(weight, DTensor) or not _runs_here(module, weight):
                continue
            sizes = dict(zip((-2, -1), weight.shape[-2:], strict=True))
            for placement, ranks in zip(weight.placements, weight.device_mesh.shape, strict=True):
                if placement.is_replicate() or (axis := placement.dim % weight.ndim - weight.ndim) not in sizes:
                    continue
                parts = getattr(placement, "split_factor", 1)  # a _StridedShard, as gate and up are, has it
                what = "rows" if axis == -2 else "columns"
                yield _ShardedWeight(f"{path}.{name}", what, sizes[axis] // parts, parts, ranks, weight.ndim == 3)


def _runs_here(module: nn.Module, weight: torch.Tensor) -> bool:
    """Return whether fp8moe runs this weight of the module in FP8, as a linear or as chosen experts."""
    if linears.refusal(weight, getattr(module, "block_size", None), getattr(module, "activation_scale", None)):
        return False
    return weight.ndim == 2 or chosen_implementation(module) == NAME
