"""fp8moe's experts as vLLM modular kernels, and the quantization method for layers of experts."""

from collections.abc import Mapping

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
)

import fp8moe
from fp8moe_vllm.layers import Layers
from fp8moe_vllm.versions import not_here

ALL2ALL_BACKEND = "allgather_reducescatter"
"""The supported all-to-all backend of vLLM, for data-parallel attention.

It sends all rows to all ranks, and partial sums back.
"""


SCALES = {
    "block": (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "channel": (kFp8StaticChannelSym, kFp8DynamicTokenSym),
}
"""Maps scales of weights to vLLM's names of the formats of weights and activations."""


def refusal(moe: FusedMoEConfig, scales: str) -> str | None:
    """Return why fp8moe does not run these experts; None if it does. scales: of their weights, a key of SCALES."""
    parallel = moe.moe_parallel_config
    if why := not_here():
        return why
    if parallel.pcp_size > 1:
        return "prefill context parallelism is untried"
    backend = parallel.all2all_backend
    exchanged = parallel.dp_size > 1 or parallel.use_all2all_kernels or backend == "passthrough"
    if exchanged and backend != ALL2ALL_BACKEND:
        return f"--all2all-backend {backend} is untried; {ALL2ALL_BACKEND}, vLLM's default, is taken"
    if parallel.dp_size > 1 and not (parallel.use_ep and parallel.ep_size == parallel.dp_size):
        return "data parallel attention is untried but with --enable-expert-parallel and without tensor parallelism"
    if moe.has_bias:
        return "experts with biases"
    if why := other_swiglu(moe):
        return why
    experts = experts_class(parallel)
    able, why = experts.is_supported_config(experts, moe, *SCALES[scales], experts.activation_format())
    return None if able else why


def other_swiglu(moe: FusedMoEConfig) -> str | None:
    """Return what of the activation's constants differs from those of SiLU, or of GPT-OSS's SwiGLU; None if nothing."""
    limit, alpha, beta = (7.0, 1.702, 1.0) if moe.activation == MoEActivation.SWIGLUOAI else (None, 1.0, 0.0)
    for name, words, usual in (
        ("swiglu_limit", "a limit", limit),
        ("swiglu_alpha", "an alpha", alpha),
        ("swiglu_beta", "a beta", beta),
    ):
        given = getattr(moe, name)
        if given not in (None, usual):
            return f"SwiGLU with {words} of {given}"
    return None


def experts_class(parallel: FusedMoEParallelConfig) -> type[mk.FusedMoEExpertsModular]:
    return Fp8moeBatchedExperts if parallel.use_batched_activation_format else Fp8moeExperts


class _Experts(mk.FusedMoEExpertsModular):
    """Base class of both kernels: tells vLLM which devices, formats and shapes fp8moe supports."""

    @staticmethod
    def _supports_current_device() -> bool:
        return not_here() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) == SCALES["block"]

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True  # `refusal` has already checked the parallel config

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % 16 == 0


class Fp8moeExperts(_Experts):
    """Runs `fp8moe.experts` on tokens in any order.

    Expert ids index the experts of all ranks; -1 and the ids of other ranks' experts add nothing.
    """

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) in SCALES.values()

    expects_unquantized_inputs = True  # as the first kernel of fp8moe.experts quantizes its inputs

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def workspace_shapes(self, M, N, K, topk, *more):  # noqa: N803
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    first_expert: tuple[Tensor, int] | None = None
    """(expert_map, id of this rank's first expert) if the rank's expert ids are contiguous, else None.

    With a first expert instead of a map, `fp8moe.experts` launches fewer kernels.
    """

    def look_at(self, expert_map: Tensor | None, count: int) -> None:
        """Set `first_expert` if the `count` experts on this rank are a contiguous range. Called once, after loading."""
        here = [] if expert_map is None else (expert_map >= 0).nonzero()[:, 0].tolist()
        if here and expert_map[here[0] : here[0] + count].tolist() == list(range(count)):
            self.first_expert = expert_map, here[0]

    def run(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        up, down, place = (w1, self.w1_scale), (w2, self.w2_scale), {"expert_map": expert_map}
        known, first = self.first_expert or (None, 0)
        if expert_map is not None and expert_map is known:
            place = {"first_expert": first, "num_experts": known.shape[0]}
        return fp8moe.experts(hidden_states, topk_ids, topk_weights, up, down, out=out, **place)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        if apply_router_weight_on_input:  # vLLM has already multiplied the inputs by the routing weights
            topk_weights = torch.ones_like(topk_weights)
        self.run(hidden_states, w1, w2, topk_weights, topk_ids, expert_map, output)


class Fp8moeBatchedExperts(_Experts):
    """Runs `fp8moe.experts_masked` on E4M3 rows in the masked layout, as DeepEP's low-latency mode delivers them."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, *more):  # noqa: N803
        return (0,), (0,), (local_num_experts, self.max_num_tokens * self.num_dispatchers, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        rows, up, down = (hidden_states, a1q_scale), (w1, self.w1_scale), (w2, self.w2_scale)
        fp8moe.experts_masked(rows, expert_tokens_meta.expert_num_tokens, up, down, out=output)


class OnFp8moe:
    """Base of quantization methods for experts on fp8moe, before the class of vLLM that creates and loads the weights.

    The weights never change later. how: options of `fp8moe.warm` for them.
    """

    how: Mapping[str, str] = {}

    def take(self, experts_cls: type[mk.FusedMoEExpertsModular]) -> None:
        """Have the experts run by this class, on weights and scales as the checkpoint has them."""
        self.fp8_backend = Fp8MoeBackend.TRITON  # with this backend vLLM leaves weights and scales untouched
        self.experts_cls = experts_cls

    def create_weights(self, layer: RoutedExperts, num_experts: int, hidden_size: int, *args, **more) -> None:
        super().create_weights(layer, num_experts, hidden_size, *args, **more)
        shape = num_experts, layer.w2_weight.shape[2], hidden_size, self.moe.experts_per_token
        self.quant_config.taken("experts", shape, self.moe.max_num_tokens * self.moe.dp_size, **self.how)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        super().process_weights_after_loading(layer)
        self.moe_kernel.fused_experts.look_at(layer.expert_map, layer.w13_weight.shape[0])
        self.quant_config.warm()

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts=None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Run the experts. Without token exchange, bypass vLLM's modular kernel, which would copy the result."""
        if not isinstance(self.moe_kernel.prepare_finalize, MoEPrepareAndFinalizeNoDPEPModular):
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        if layer.apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(f"apply_router_weight_on_input: expected one expert a token, got {topk_ids.shape[1]}")
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        run = self.moe_kernel.fused_experts.run
        return run(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, layer.expert_map)


class Fp8moeMoEMethod(OnFp8moe, Fp8MoEMethod):
    """The quantization method for experts whose weights have scales of 128x128 blocks."""

    def __init__(self, quant_config: Layers, layer: RoutedExperts):
        # skips Fp8MoEMethod.__init__, which would choose a vLLM kernel
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.block_quant, self.per_act_token_quant, self.weight_scale_refine = True, False, None
        self.weight_scale_name = "weight_scale_inv"
        self.take(experts_class(self.moe.moe_parallel_config))
