"""fp8moe.GroupedExperts in the place of the experts of Megatron's MoELayer."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor, nn

from fp8moe import GroupedExperts
from fp8moe_megatron.main_grad import Trained, refuse, with_main_grad

_NAME = "fp8moe_megatron.FP8Experts"
_ACTIVATIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", squared_relu: "relu2"}
_REFUSED = {
    "add_bias_linear": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "fp8": None,
    "fp4": None,
    "delay_wgrad_compute": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    "use_transformer_engine_op_fuser": False,
    "fine_grained_activation_offloading": False,
    "init_model_with_meta_device": False,
}


def _activation(config: TransformerConfig) -> dict[str, Any]:
    """Return the arguments of GroupedExperts for the config's activation."""
    function, limit = config.activation_func, getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0)
    if not config.gated_linear_unit:
        limit, offset = None, 0.0
    if function in _ACTIVATIONS and not offset:
        return {"activation": _ACTIVATIONS[function], "gated": config.gated_linear_unit, "swiglu_limit": limit}
    if function is quick_gelu and config.gated_linear_unit and offset == 1 and limit is not None:
        return {"swiglu_limit": limit, "swiglu_alpha": 1.702}
    raise NotImplementedError(
        f"{_NAME}: activation_func={getattr(function, '__name__', function)} with glu_linear_offset={offset} and "
        f"activation_func_clamp_value={limit} is not supported; use one of "
        f"{', '.join(each.__name__ for each in _ACTIVATIONS)} without an offset"
    )


class FP8Experts(Trained, GroupedExperts):
    """The experts of one rank in Megatron's MoELayer: `fp8moe.GroupedExperts` on the rows that its dispatcher sorted.

    Parameters, in ``config.params_dtype``, for E local experts, I being the rank's share of ``moe_ffn_hidden_size``
    under expert tensor parallelism: gate_up_proj (E, 2I, H), gate rows, then up rows, or up_proj (E, I, H) without a
    gate; down_proj (E, H, I). Initialization is that of SequentialMLP. Distributed checkpoints are those of
    SequentialMLP and TEGroupedMLP, and state dicts of both load.

    Gradients of weights are float32 sums, added to ``main_grad`` where Megatron's DistributedDataParallel has made one;
    otherwise autograd sets ``grad``.

    Args: as Megatron's experts have them; submodules are ignored. Raises NotImplementedError for settings of the config
    that have no FP8 form, TypeError for a params_dtype other than bfloat16 and float32.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: object = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ):
        refuse(_NAME, config, _REFUSED)
        self._groups = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        super().__init__(
            num_experts=num_local_experts,
            hidden_size=config.hidden_size,
            intermediate_size=divide(config.moe_ffn_hidden_size, pg_collection.expt_tp.size()),
            device="meta",
            master_dtype=config.params_dtype,
            **_activation(config),
        )
        self.config = config
        self.num_local_experts = num_local_experts
        self.to_empty(device="cpu" if config.use_cpu_initialization else torch.cuda.current_device())
        if config.perform_initialization:
            self._initialize()
        expert_tensor, tensor = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
        reduced_with_others = config.expert_model_parallel_size == 1 and expert_tensor == tensor
        for weight, dim, stride in ((self._up, 1, 1 + self.activation.gated), (self.down_proj, 2, 1)):
            weight.allreduce = reduced_with_others
            set_tensor_model_parallel_attributes(weight, True, dim, stride)

    @property
    def _up(self) -> nn.Parameter:
        return getattr(self, self.up_name)

    def _initialize(self) -> None:
        """Initialize the weights as Megatron's SequentialMLP does, with the same random numbers."""
        config, (_, tensor, _) = self.config, self._groups
        stride = 1 + self.activation.gated
        for up, down in zip(self._up.data, self.down_proj.data, strict=True):
            for weight, init, dim, stride_of in (
                (up, config.init_method, 0, stride),
                (down, config.output_layer_init_method, 1, 1),
            ):
                if not config.use_cpu_initialization:
                    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                        init(weight)
                    continue
                whole = [size * (tensor.size() if axis == dim else 1) for axis, size in enumerate(weight.shape)]
                ranks = {"rank": tensor.rank(), "world_size": tensor.size()}
                _initialize_affine_weight_cpu(weight, *whole, weight.shape[dim], dim, init, stride_of, **ranks)

    def local_weights(self) -> tuple:
        weights = super().local_weights()
        received = weights.masters._make(None if each is None else with_main_grad(each) for each in weights.masters)
        return weights._replace(masters=received)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' results times their probabilities, (R, H) in the dtype of the rows, and None for a bias.

        permuted_local_hidden_states: (R, H), rows sorted by expert. tokens_per_expert: (E,), on any device; rows after
        those of the last expert give zeros. permuted_probs: (R,), routing weights. The CPU does not wait for the GPU.

        `FP8MoELayer` gives tokens (T, H), their experts (T, K) and weights (T, K), as for `GroupedExperts`, and gets
        each token's sum, (T, H).
        """
        rows = permuted_local_hidden_states
        probs = permuted_probs.float() if permuted_probs.dtype is torch.float64 else permuted_probs
        if probs.dim() == 2:
            return super().forward(rows, tokens_per_expert, probs), None
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0)
        expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
        return super().forward(rows, expert[:, None], probs[:, None]), None

    def backward_dw(self) -> None:
        """Do nothing: the backward has computed the weight gradients."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """Return both weights under the keys, shapes and shards that SequentialMLP and TEGroupedMLP save them by."""
        _, _, data = self._groups
        singleton = bool((metadata or {}).get("singleton_local_shards", False))
        result = {}
        for name, module, axis in ((self.up_name, "linear_fc1", 0), ("down_proj", "linear_fc2", 1)):
            build = partial(self._shards, (prefix, module, axis, tuple(sharded_offsets), singleton))
            merge = partial(_merge, 2 if self.activation.gated and axis == 0 else 1)
            key, weight = f"{prefix}experts.{module}.weight", getattr(self, name)
            result[f"{prefix}{name}"] = ShardedTensorFactory(key, weight, build, merge, (0, 0, data.rank()))
        return result

    @torch.no_grad()
    def _shards(
        self, where: tuple, key: str, value: Tensor, replica_id: tuple, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """Return the shards of a weight, or of its optimizer state, expert by expert, gate before up."""
        if flattened_range is not None:
            raise NotImplementedError(
                f"{_NAME}: optimizer states in flattened ranges are not supported; save them as 'fully_reshardable' "
                "or 'dp_reshardable'"
            )
        prefix, module, axis, offsets, singleton = where
        expert, tensor, _ = self._groups
        parts = 2 if self.activation.gated and axis == 0 else 1
        first, leading = expert.rank() * self.num_local_experts, len(offsets)
        shards = []
        for number, matrix in enumerate(value, first):
            of_expert = (*offsets, *(() if singleton else ((leading, number, expert.size() * self.num_local_experts),)))
            own = key.replace(f"{prefix}experts.{module}", f"{prefix}experts.{number}.{module}") if singleton else key
            for part, half in enumerate(matrix.chunk(parts, axis)):
                named = f"{own}_{'wv'[part]}" if singleton and parts == 2 else own
                among = (
                    (tensor.rank(), tensor.size())
                    if singleton
                    else (tensor.rank() + part * tensor.size(), parts * tensor.size())
                )
                shard = (*of_expert, (len(of_expert) + axis, *among))
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        named, half, *shard, replica_id=replica_id, prepend_axis_num=len(of_expert)
                    )
                )
        return shards

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for name, module in ((self.up_name, "linear_fc1"), ("down_proj", "linear_fc2")):
            for form in (f"local_experts.{{}}.{module}.weight", f"{module}.weight{{}}"):
                keys = [prefix + form.format(expert) for expert in range(self.num_local_experts)]
                if all(key in state_dict for key in keys):
                    state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
        for key in [key for key in state_dict if key.startswith(prefix) and key.endswith("_extra_state")]:
            del state_dict[key]  # what SequentialMLP and TEGroupedMLP save beside their weights
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


@torch.no_grad()
def _merge(parts: int, shards: list[Tensor]) -> Tensor:
    """Put the shards of `FP8Experts._shards` together."""
    matrices = [torch.cat(shards[first : first + parts]) for first in range(0, len(shards), parts)]
    return torch.stack(matrices)
