"""transformers' tensor and expert parallelism for models that run on fp8moe.

Experts that it shards by expert run on fp8moe.distributed: partial sums in float32, added in the order of ranks.
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
    """Wrap transformers' sharding of a model that has no data yet: its plan becomes ours, its shards are checked."""

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
    """Wrap transformers' plans of a model: an empty tp_plan means that no rule applies, as transformers documents it.

    Only the experts are sharded then, and attention is the same on all ranks. transformers itself refuses such a plan.
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
    """Return the class of fp8moe's ep_implementation, for versions of transformers that have these."""
    from transformers.distributed.expert_parallel import EPImplementation

    class Implementation(EPImplementation):
        """Experts for the tokens that this rank has; ranks of the tensor-parallel mesh have equal ones."""

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
            # Each rank takes a part of the tokens to the experts of all, so that none is computed twice.
            whole = [DTensor.from_local(value, self.tp_mesh, [Replicate()], run_check=False) for value in inputs]
            mine = (value.redistribute(placements=[Shard(0)]).to_local() for value in whole)
            part = experts_forward(self.experts, *mine)
            size = {"shape": hidden_states.shape, "stride": hidden_states.stride()}
            return DTensor.from_local(part, self.tp_mesh, [Shard(0)], run_check=False, **size).full_tensor()

    return Implementation


def automatic(theirs):
    """Wrap transformers' ep_implementation "auto": it is fp8moe's for experts that fp8moe runs."""

    def choose(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> Any:
        chosen = implementation() if chosen_implementation(experts) == NAME else theirs
        return chosen(experts, ep_mesh, tp_mesh)

    return choose


def style() -> Any:
    """Make fp8moe's style of plans for experts, for versions of transformers that have these."""
    return versions.make_style(check_chosen, functools.partial(spread, same_tokens=True))


def check_chosen(experts: nn.Module) -> None:
    """Raise ValueError for experts that other code runs, which knows the experts of this rank alone."""
    if (chosen := chosen_implementation(experts)) != NAME:
        raise ValueError(
            f"experts_implementation: expected {NAME!r} for experts that fp8moe has spread over ranks, got {chosen!r}"
        )


def spread(experts: nn.Module, mesh: Any, same_tokens: bool) -> None:
    """Have the module run with the experts of all ranks of the mesh, which have its parameters as DTensors."""
    from fp8moe.distributed import ExpertParallel

    experts.num_experts *= mesh.size()  # that of this rank until now
    method = "replicated" if same_tokens else "auto"
    ExpertParallel(method=method, uniform=same_tokens)._apply(experts, mesh)


class _ShardedWeight(NamedTuple):
    """A weight whose rows or columns are spread over ranks: each of its `parts` has `size` of them."""

    name: str
    what: str
    size: int
    parts: int
    ranks: int
    experts: bool


def check_whole_blocks(model: nn.Module) -> None:
    """Raise ValueError if a shard of an FP8 weight that fp8moe runs ends inside a block of its scale.

    model: of transformers, with DTensors as parameters; they may be on the meta device. Every rank finds the same.
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
                parts = getattr(placement, "split_factor", 1)  # if it shards gate and up each by itself
                what = "rows" if axis == -2 else "columns"
                yield _ShardedWeight(f"{path}.{name}", what, sizes[axis] // parts, parts, ranks, weight.ndim == 3)


def _runs_here(module: nn.Module, weight: torch.Tensor) -> bool:
    """Return whether fp8moe runs this weight of a module in FP8."""
    if linears.refusal(weight, getattr(module, "block_size", None), getattr(module, "activation_scale", None)):
        return False
    return weight.ndim == 2 or chosen_implementation(module) == NAME
