"""Modules for torchtitan 0.3, built from configurations that the overrides derive."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from fp8moe_torchtitan.modules import Experts, Linear, check_tensor_parallel


class FP8GroupedExperts(GroupedExperts, Experts):
    """torchtitan's GroupedExperts in FP8: the same parameters, configuration and arguments.

    Under expert parallelism groups of any size come as they are: no padding is needed. Under tensor parallelism each
    rank has its part of F.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return self.compute(x_RD, num_tokens_per_expert_E, self.w1_EFD, self.w2_EDF, self.w3_EFD)


class FP8TitanLinear(Linear, Module):
    """torchtitan's Linear in FP8: the same parameters, masters in the dtype of training."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        pass

    def __init__(self, config: Config):
        dtype = torch.get_default_dtype()
        super().__init__(config.in_features, config.out_features, bias=config.bias, dtype=dtype, master_dtype=dtype)

    def parallelize(self, parallel_dims) -> None:
        check_tensor_parallel(parallel_dims.tp)
        super().parallelize(parallel_dims)
