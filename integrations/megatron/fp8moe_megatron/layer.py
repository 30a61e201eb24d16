"""Megatron's MoELayer around FP8Experts, which get whole tokens: no rows are sorted, copied or summed around them."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fp8moe.distributed import ExpertParallel
from fp8moe_megatron.experts import FP8Experts

# Settings under which Megatron looks into its dispatcher, or has it compute something else.
_DISPATCHED = {
    "moe_shared_expert_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "cuda_graph_impl": "none",
}


class FP8MoELayer(MoELayer):
    """Megatron's MoELayer; its forward gives `FP8Experts` whole tokens.

    The kernels that quantize and sum then read and write tokens in their own order. If this rank has all experts, the
    CPU does not wait for the numbers of tokens. Under expert parallelism tokens go to other ranks, and sums come back,
    as with `fp8moe.distributed.ExpertParallel`: a token goes to a rank once, however many of its experts are there. The
    ranks exchange their numbers of tokens beforehand if the config has variable_seq_lengths; otherwise the numbers must
    be equal, which training checks.

    Router, losses, dropped tokens, shared experts and recomputation are Megatron's in any case. Rows are dispatched as
    Megatron does it under expert tensor parallelism, CUDA graphs and overlapped communication, with its flex
    dispatcher, and for routers and experts of other classes. What pads the rows of experts is ignored otherwise.

    Args: those of MoELayer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ):
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, groups, **options)
        if self._takes_tokens():
            if self.token_dispatcher.ep_size > 1:
                # As training sends tokens in any case, so does evaluation: unquantized, by collectives of this group.
                style = ExpertParallel(payload="bf16", uniform=not config.variable_seq_lengths)
                style.connect(self.experts, groups.ep, config.num_moe_experts)
            self.token_dispatcher = _WholeTokens(config, groups)

    def _takes_tokens(self) -> bool:
        config, dispatcher = self.config, self.token_dispatcher
        # A router of another class may choose more than K experts, or return their indices.
        ours = isinstance(self.experts, FP8Experts) and type(self.router) is TopKRouter
        others = dispatcher.tp_size > 1 or hasattr(self, "_inference_token_dispatcher")
        others |= dispatcher.ep_size > 1 and config.moe_token_dispatcher_type == "flex"
        return ours and not others and all(getattr(config, name, to) == to for name, to in _DISPATCHED.items())


class _WholeTokens(MoETokenDispatcher):
    """Passes tokens on as they are; in place of numbers of rows and their probabilities, (T, K) indices and weights."""

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._shape = tokens.shape
        self._index, picked = chosen_experts(probs, routing_map, self.config.moe_router_topk)
        return tokens.flatten(0, -2), picked

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index, self._index = self._index, None
        return hidden_states, index, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)


def chosen_experts(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their probabilities, (T, top_k), differentiably.

    probs, routing_map: (T, E), of which at most top_k are not 0 and True in each row. The map may also be True where a
    router pads to a capacity; probs are 0 there. The index is E in place of experts that a token lacks.
    """
    values, index = torch.where(routing_map, probs, 0).topk(top_k, dim=1, sorted=False)
    return torch.where(values != 0, index, probs.shape[1]), values
