"""What an expert computes between its two GEMMs: SwiGLU and its clamped forms, and the plain activations.

SwiGLU: "GLU Variants Improve Transformer", arXiv:2002.05202, section 2. Squared ReLU: "Primer", arXiv:2109.08668,
section 4.1.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

# The names are those of transformers' configurations.
FUNCTIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


@dataclass(frozen=True)
class Activation:
    """The function between the up projection and the down projection of an expert.

    name: a key of `FUNCTIONS`, f below.
    gated: the up projection yields gate and up, and the result is ``f(gate) * up``; otherwise it is ``f(up)``.
    limit: of gated experts; first ``gate = min(gate, limit)`` and ``up = clamp(up, -limit, limit)``.
    alpha: of gated silu experts with a limit; then ``gate * sigmoid(alpha * gate) * (up + 1)``, the form of GPT-OSS.

    Raises ValueError for a name that is not known or a combination that means nothing.
    """

    limit: float | None = None
    alpha: float | None = None
    name: str = "silu"
    gated: bool = True

    def __post_init__(self) -> None:
        if self.name not in FUNCTIONS:
            raise ValueError(f"activation: expected one of {', '.join(FUNCTIONS)}, got {self.name!r}")
        if self.limit is not None and not (self.gated and self.limit > 0):
            raise ValueError(f"swiglu_limit: expected a positive limit of gated experts, got {self.limit}")
        if self.alpha is not None and not (self.is_swiglu and self.limit is not None):
            raise ValueError(
                f"swiglu_alpha: expected with gated experts, activation='silu' and a swiglu_limit, got {self.alpha}"
            )

    @property
    def is_swiglu(self) -> bool:
        """Whether it is a form of SwiGLU, what `grouped_gemm_swiglu` computes."""
        return self.gated and self.name in ("silu", "swish")

    @property
    def form(self) -> int:
        """The form of a SwiGLU, as cuda/swiglu.cuh numbers them: 1 plain, 2 clamped, 3 clamped with an alpha."""
        return 1 if self.limit is None else 2 if self.alpha is None else 3

    def __call__(self, projected: Tensor) -> Tensor:
        """projected (..., 2I), gate then up, or (..., I) without a gate -> (..., I) in the same dtype."""
        if not self.gated:
            return FUNCTIONS[self.name](projected)
        gate, up = projected.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.alpha is not None:
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return FUNCTIONS[self.name](gate) * up
