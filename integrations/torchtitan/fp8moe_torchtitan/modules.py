"""FP8 experts and linears for torchtitan 0.2 and 0.3 alike; torchtitan's own parameters are the masters."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fp8moe import FP8Linear
from fp8moe.layers import MasterModule, experts_rows_training, experts_tokens_training


class Experts(MasterModule):
    """Base class of experts that compute in FP8 and keep torchtitan's three parameters: gate, down and up."""

    trainable = True

    def compute(self, rows: Tensor, counts: Tensor, gate: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return the experts' results (R, D), in the dtype of rows.

        rows: (R, D), sorted by expert; expert e has ``counts[e]`` rows, and rows after the last expert's give zeros.
        gate, up: (E, F, D), down: (E, D, F), or DTensors. Rows are cast to bfloat16, as in torchtitan's own experts.
        """
        offsets = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return experts_rows_training(rows.bfloat16(), offsets, gate, up, down).type_as(rows)

    def compute_tokens(
        self, tokens: Tensor, index: Tensor, scores: Tensor, gate: Tensor, down: Tensor, up: Tensor
    ) -> Tensor:
        """Return the sum of the tokens' results times their scores (T, D), in the dtype of tokens.

        tokens: (T, D), cast to bfloat16. index, scores: (T, K), the experts of each token, all of them on this rank.
        gate, up: (E, F, D), down: (E, D, F).
        """
        return experts_tokens_training(tokens.bfloat16(), index, scores, gate, up, down).type_as(tokens)

    @property
    def alone(self) -> bool:
        """Whether this rank has all of the experts, and nothing has to be done to their rows before or after."""
        spread = any(isinstance(weight, DTensor) for weight in self.parameters())
        return not (spread or self._forward_pre_hooks or self._forward_hooks)


class Linear(FP8Linear):
    """An FP8Linear that casts its input to autocast's dtype, as nn.Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return super().forward(x)


def check_tensor_parallel(degree: int) -> None:
    """Raise NotImplementedError if linears would be sharded: for a tensor-parallel degree above 1."""
    if degree > 1:
        raise NotImplementedError(
            f"fp8moe_torchtitan.linears: tensor parallelism of {degree} ranks shards linears, which have no FP8 form "
            "for that; leave fp8moe_torchtitan.linears out (fp8moe_torchtitan.experts works with it), or set it to 1"
        )
