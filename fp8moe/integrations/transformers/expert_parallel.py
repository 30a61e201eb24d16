"""transformers' expert parallelism on fp8moe.distributed: partial sums in float32, added in the order of ranks."""

import functools
import importlib.util
from typing import Any

from torch import Tensor, nn

from fp8moe.integrations.names import NAME

_STYLES = {"moe_tp_experts": f"{NAME}_experts", "ep_router": None}
"""Styles of transformers 5.17's plans for experts, and what takes their place: the router needs nothing."""


def register() -> None:
    """Make it known to transformers as the implementation "fp8moe", which "auto" then is for experts of that name.

    Versions before 5.21 have no interface for it but styles of plans: see `adapt_plan`.
    """
    if _has_interface():
        from transformers.distributed import expert_parallel

        theirs = expert_parallel.EPImplementationInterface()["auto"]
        expert_parallel.EPImplementationInterface.register(NAME, _bring_tokens)
        expert_parallel.EPImplementationInterface.register("auto", functools.partial(_choose, theirs))
    else:
        from transformers.distributed import tensor_parallel

        tensor_parallel.ParallelInterface.register(_STYLES["moe_tp_experts"], _style())


def adapt_plan(model: Any, distributed_config: Any) -> None:
    """Have experts that are sharded whole run on `fp8moe.distributed`, where transformers has no interface for it."""
    if _has_interface():
        return
    model._ep_plan = _adapted(model._ep_plan, model)
    if isinstance(distributed_config.tp_plan, dict):
        distributed_config.tp_plan = _adapted(distributed_config.tp_plan, model)


def _adapted(plan: dict[str, str], model: Any) -> dict[str, str]:
    """A plan of transformers 5.17 with our style for experts, and rules for their scales, if it shards them whole."""
    whole = [name for name, style in plan.items() if style == "grouped_gemm"]
    if not whole:
        return plan
    scales = {f"{name}_scale_inv": "grouped_gemm" for name in whole if not name.endswith("_scale_inv")}
    plan = {name: _STYLES.get(style, style) for name, style in plan.items()}
    plan = {name: style for name, style in plan.items() if style is not None}
    return plan | scales if getattr(model, "is_quantized", False) else plan


def _has_interface() -> bool:
    return importlib.util.find_spec("transformers.distributed.expert_parallel") is not None


def _choose(theirs: type, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> Any:
    """What brings the experts their tokens if ep_implementation is "auto"."""
    return (_bring_tokens if _chosen(experts) == NAME else theirs)(experts, ep_mesh, tp_mesh)


def _bring_tokens(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> Any:
    _check(experts)
    return _implementation()(experts, ep_mesh, tp_mesh)


def _chosen(experts: nn.Module) -> str | None:
    return getattr(getattr(experts, "config", None), "_experts_implementation", None)


def _check(experts: nn.Module) -> None:
    """ValueError for experts that other code runs, which knows those of this rank alone."""
    if _chosen(experts) != NAME:
        raise ValueError(
            f"experts_implementation: expected {NAME!r} for experts that fp8moe has spread over ranks, got "
            f"{_chosen(experts)!r}"
        )


def _spread(experts: nn.Module, mesh: Any, same_tokens: bool) -> None:
    """Have the module run with the experts of all ranks of the mesh, which have its parameters as DTensors."""
    from fp8moe.distributed import ExpertParallel

    experts.num_experts *= mesh.size()  # that of this rank until now
    method = "replicated" if same_tokens else "auto"
    ExpertParallel(method=method, uniform=same_tokens)._apply(experts, mesh)


@functools.cache
def _implementation() -> type:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.expert_parallel import EPImplementation

    class Implementation(EPImplementation):
        """Of the tokens that this rank has; ranks of the tensor-parallel mesh have the same ones."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any):
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            _spread(experts, ep_mesh, self.shares_batch)

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            _check(self.experts)
            inputs = hidden_states, top_k_index, top_k_weights
            if self.shares_batch or self.tp_mesh.size() == 1:
                return self.experts_forward(*inputs)
            # Each rank takes a part of the tokens to the experts of all, so that none is computed twice.
            whole = [DTensor.from_local(value, self.tp_mesh, [Replicate()], run_check=False) for value in inputs]
            part = self.experts_forward(*(value.redistribute(placements=[Shard(0)]).to_local() for value in whole))
            size = {"shape": hidden_states.shape, "stride": hidden_states.stride()}
            return DTensor.from_local(part, self.tp_mesh, [Shard(0)], run_check=False, **size).full_tensor()

    return Implementation


@functools.cache
def _style() -> Any:
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class Style(TensorParallelLayer):
        """Of an experts module, in a plan of transformers 5.17 that shards its parameters by expert."""

        def should_use_local_tensors(self, module: nn.Module) -> bool:
            return True

        def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: Any) -> tuple:
            _check(module)
            return args, kwargs

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            _spread(module, mesh, same_tokens=True)
            return super().install_forward(module, mesh)

    return Style()
