"""FP8 modules for torchtitan 0.3, which builds them from the Configs that the overrides return."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts
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
