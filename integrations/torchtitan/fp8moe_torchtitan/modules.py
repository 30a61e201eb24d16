"""What the modules for both versions of torchtitan share: experts and linears in FP8 over torchtitan's own masters."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe import FP8Linear
from fp8moe.layers import MasterModule, experts_rows_training


class Experts(MasterModule):
    """Base of experts that keep torchtitan's parameters, gate, down and up apart, and compute in FP8."""

    trainable = True

    def compute(self, rows: Tensor, counts: Tensor, gate: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The experts' results, in the dtype of rows (R, D), of which expert e has the next ``counts[e]``.

        gate, up: (E, F, D), down: (E, D, F), or DTensors. Rows behind those of all experts give zeros. As torchtitan's
        own experts do, these compute with rows in bfloat16.
        """
        offsets = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return experts_rows_training(rows.bfloat16(), offsets, gate, up, down).type_as(rows)


class Linear(FP8Linear):
    """FP8Linear that takes its input in autocast's dtype, as nn.Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return super().forward(x)


def check_tensor_parallel(degree: int) -> None:
    """Raise NotImplementedError for linears on several ranks of tensor parallelism."""
    if degree > 1:
        raise NotImplementedError(
            f"fp8moe_torchtitan.linears: tensor parallelism of {degree} ranks shards linears, which have no FP8 form "
            "for that; leave fp8moe_torchtitan.linears out (fp8moe_torchtitan.experts works with it), or set it to 1"
        )
