"""FP8 modules for torchtitan 0.3, which builds them from the Configs that the overrides return."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.protocols.module import Module

from fp8moe_torchtitan.modules import Experts, Linear, check_tensor_parallel


class FP8GroupedExperts(GroupedExperts, Experts):
    """torchtitan's GroupedExperts in FP8, with the same parameters, configuration and arguments.

    Under expert parallelism, the rows of an expert need no padding. Under tensor parallelism, each rank has a shard of
    the intermediate dimension F.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return self.compute(x_RD, num_tokens_per_expert_E, self.w1_EFD, self.w2_EDF, self.w3_EFD)


class FP8RoutedExperts(RoutedExperts):
    """torchtitan's RoutedExperts around `FP8GroupedExperts`: without parallel experts it moves no rows.

    The kernels that quantize and sum read and write tokens in their own order. A RoutedExperts becomes one when
    FP8GroupedExperts are put into it. An override of its Config would exclude overrides of its token dispatcher.
    """

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        experts = self.inner_experts
        # A wrapper around the experts would be passed over.
        if not (isinstance(experts, FP8GroupedExperts) and experts.alone and is_local(self.token_dispatcher)):
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        tokens, index, scores = (value.flatten(0, 1) for value in (x_BLD, topk_expert_ids_BLK, topk_scores_BLK))
        out = experts.compute_tokens(tokens, index, scores, experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
        return out.view(x_BLD.shape)


def is_local(dispatcher: LocalTokenDispatcher) -> bool:
    """Whether a dispatcher does no more than sort the rows of this rank and sum them.

    AllToAllTokenDispatcher, the default of torchtitan's models, does no more where it has no mesh.
    """
    kind = type(dispatcher)
    return kind is LocalTokenDispatcher or (kind is AllToAllTokenDispatcher and dispatcher.ep_mesh is None)


def _adopt(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if type(parent) is RoutedExperts and isinstance(child, FP8GroupedExperts):
        parent.__class__ = FP8RoutedExperts


register_module_module_registration_hook(_adopt)


class FP8TitanLinear(Linear, Module):
    """torchtitan's Linear in FP8, with the same parameters, which are masters in the training dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        pass

    def __init__(self, config: Config):
        dtype = torch.get_default_dtype()
        super().__init__(config.in_features, config.out_features, bias=config.bias, dtype=dtype, master_dtype=dtype)

    def parallelize(self, parallel_dims) -> None:
        check_tensor_parallel(parallel_dims.tp)
        super().parallelize(parallel_dims)
