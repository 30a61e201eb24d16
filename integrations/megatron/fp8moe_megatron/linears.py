"""ColumnParallelLinear and RowParallelLinear of Megatron-Core in FP8, with the same parameters and collectives."""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from fp8moe.layers import check_master_dtype, linear_of_master
from fp8moe_megatron.main_grad import Trained, refuse, with_main_grad

_REFUSED = {"fp8": None, "fp4": None, "cpu_offloading": False, "delay_wgrad_compute": False}


class _FP8(Trained):
    """The product of both linears. Megatron's own forwards call `_forward_impl` between their collectives."""

    def __init__(self, *args, config, **options):
        name = type(self).__name__
        refuse(f"fp8moe_megatron.{name}", config, _REFUSED)
        check_master_dtype(config.params_dtype)
        if options.get("skip_weight_param_allocation"):
            raise NotImplementedError(f"fp8moe_megatron.{name}: a weight of another module is not supported")
        super().__init__(*args, config=config, **options)
        if getattr(self, "gtp_remat_size", 1) > 1:
            raise NotImplementedError(f"fp8moe_megatron.{name}: weights sharded by GTP are not supported")

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: torch.distributed.ProcessGroup | None,
        **others: object,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return linear_of_master(input, weight, bias, receiver=with_main_grad(weight))


class FP8ColumnParallelLinear(_FP8, ColumnParallelLinear):
    """Megatron's ColumnParallelLinear, (..., K) -> (..., N / tensor parallel size), in FP8.

    Parameters, initialization, collectives and sharded state dict are Megatron's. Under sequence parallelism the input
    is kept gathered, in FP8, where Megatron keeps its part in bfloat16 and gathers it again. Raises NotImplementedError
    for settings of the config that have no FP8 form, TypeError for a params_dtype other than bfloat16 and float32.
    """


class FP8RowParallelLinear(_FP8, RowParallelLinear):
    """Megatron's RowParallelLinear in FP8: each rank's product is rounded before Megatron sums it over the ranks.

    Parameters, errors: as for `FP8ColumnParallelLinear`.
    """
