"""transformers' tensor and expert parallelism: what it lacks for models that run on fp8moe."""

import dataclasses
import functools
from typing import Any

import torch.distributed as dist

from fp8moe.integrations.names import NAME
from fp8moe.integrations.transformers import expert_parallel
from fp8moe.integrations.transformers.whole_blocks import check_whole_blocks


def route_parallelism() -> None:
    """Run the experts that transformers shards by expert on fp8moe.distributed. A second call changes nothing."""
    from transformers import PreTrainedModel
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    if not dist.is_available() or hasattr(PreTrainedModel.maybe_distribute_model.__func__, "_fp8moe"):
        return
    PreTrainedModel.maybe_distribute_model = classmethod(_checked(PreTrainedModel.maybe_distribute_model.__func__))
    if hasattr(PreTrainedModel, "_resolve_parallel_plans"):
        PreTrainedModel._resolve_parallel_plans = _without_rules(PreTrainedModel._resolve_parallel_plans)
    if hasattr(FineGrainedFP8HfQuantizer, "update_tp_plan"):
        FineGrainedFP8HfQuantizer.update_tp_plan = _with_rules(FineGrainedFP8HfQuantizer.update_tp_plan)
    expert_parallel.register()


def _checked(theirs):
    """transformers' sharding of a model that has no data yet, with the plan and the shards made ours."""

    @functools.wraps(theirs)
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        if mesh is None:
            return theirs(cls, model, distributed_config, mesh)
        if _runs_here(model):
            expert_parallel.adapt_plan(model, distributed_config)
        model = theirs(cls, model, distributed_config, mesh)
        check_whole_blocks(model)
        return model

    maybe_distribute_model._fp8moe = True
    return maybe_distribute_model


def _without_rules(theirs):
    """transformers' plans of a model, where an empty tp_plan means what transformers says of it: no rule applies.

    transformers 5.23 refuses it itself. With it only the experts are sharded, and attention is the same on all ranks.
    """

    @functools.wraps(theirs)
    def _resolve_parallel_plans(self, distributed_config):
        if distributed_config.tp_plan != {} or distributed_config.ep_size == 1 or not _runs_here(self):
            return theirs(self, distributed_config)
        replicated = dataclasses.replace(distributed_config, tp_plan=dict.fromkeys(self.tp_plan, "replicate"))
        return {}, *theirs(self, replicated)[1:]

    return _resolve_parallel_plans


def _with_rules(theirs):
    """transformers' plan for an FP8 model, where it has lost rules: those of whole modules, and of experts' scales.

    transformers 5.17 leaves rules of weights alone in Qwen3's plan, so that nothing takes DTensors apart.
    """

    @functools.wraps(theirs)
    def update_tp_plan(self, config):
        plan = dict(config.base_model_tp_plan or {})
        config = theirs(self, config)
        plan |= config.base_model_tp_plan or {}
        for name, style in list(plan.items()):
            if plan.get(name.rpartition(".")[0]) == "moe_tp_experts":
                plan.setdefault(f"{name}_scale_inv", style)
        config.base_model_tp_plan = plan
        return config

    return update_tp_plan


def _runs_here(model: Any) -> bool:
    return model.config._experts_implementation == NAME
