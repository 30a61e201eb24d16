"""Activations between the two GEMMs of an expert: SwiGLU, clamped variants of SwiGLU, and plain activations."""

import math
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

# Name of an activation in transformers' configurations -> function.
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

    name: a key of `FUNCTIONS`; f, below, is its value.
    gated: the up projection yields gate and up, and the result is ``f(gate) * up``; otherwise it is ``f(up)``.
    limit: only if gated: first clamp, ``gate = min(gate, limit)`` and ``up = clamp(up, -limit, limit)``.
    alpha: only for gated silu with a limit: the result is then ``gate * sigmoid(alpha * gate) * (up + 1)``.
    key: the activation as text, such as "silu limit=7.0": operators take this form, and exported programs store it.

    SwiGLU: "GLU Variants Improve Transformer", arXiv:2002.05202, section 2. Squared ReLU: "Primer", arXiv:2109.08668,
    section 4.1.

    Raises ValueError for an unknown name or a meaningless combination.
    """

    limit: float | None = None
    alpha: float | None = None
    name: str = "silu"
    gated: bool = True
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.name not in FUNCTIONS:
            raise ValueError(f"activation: expected one of {', '.join(FUNCTIONS)}, got {self.name!r}")
        if self.limit is not None and not (self.gated and self.limit > 0):
            raise ValueError(f"swiglu_limit: expected a positive limit of gated experts, got {self.limit}")
        if self.alpha is not None and not (self.is_swiglu and self.limit is not None):
            raise ValueError(
                f"swiglu_alpha: expected with gated experts, activation='silu' and a swiglu_limit, got {self.alpha}"
            )
        options = {"limit": self.limit, "alpha": self.alpha}
        words = [f"{name}={float(value)!r}" for name, value in options.items() if value is not None]
        object.__setattr__(self, "key", " ".join([self.name, *([] if self.gated else ["no_gate"]), *words]))

    @staticmethod
    @lru_cache(maxsize=256)
    def from_key(key: str) -> "Activation":
        """Return the activation with this key. Raises ValueError for any other text."""
        name, *words = key.split(" ")
        gated = "no_gate" not in words
        try:
            options = dict(word.split("=") for word in words if word != "no_gate")
            return Activation(name=name, gated=gated, **{option: float(value) for option, value in options.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"activation: expected the key of an Activation, got {key!r}: {error}") from error

    @property
    def is_swiglu(self) -> bool:
        """Whether this is a variant of SwiGLU, which `grouped_gemm_swiglu` can compute."""
        return self.gated and self.name in ("silu", "swish")

    @property
    def form(self) -> int:
        """The number of this SwiGLU variant in cuda/common/swiglu.cuh: 1 plain, 2 clamped, 3 clamped with an alpha."""
        return 1 if self.limit is None else 2 if self.alpha is None else 3

    def __call__(self, projected: Tensor) -> Tensor:
        """Apply the activation to `projected` (..., 2I), gate then up, or (..., I) if not gated. Returns (..., I)."""
        if not self.gated:
            return FUNCTIONS[self.name](projected)
        gate, up = projected.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = _limited(gate, -math.inf, self.limit), _limited(up, -self.limit, self.limit)
        if self.alpha is not None:
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return FUNCTIONS[self.name](gate) * up


def _limited(x: Tensor, low: float, high: float) -> Tensor:
    """Return ``x.clamp(low, high)``. Its derivative at a limit is 1; that of PyTorch's own is 0 from 2.14 on."""
    return torch.where((x < low) | (x > high), x.detach().clamp(low, high), x)


# ---- derivatives ----


def _silu(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.ops.aten.gelu_backward.default(torch.ones_like(x), x, approximate=approximate)


def _sigmoid(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 - sigmoid)


# Name of an activation -> derivative of the function with that name in `FUNCTIONS`.
_DERIVATIVES = {
    "silu": _silu,
    "swish": _silu,
    "gelu": _gelu,
    "gelu_new": partial(_gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(_gelu, approximate="tanh"),
    "relu": lambda x: torch.where(x.isnan(), x, (x > 0).to(x.dtype)),
    "relu2": lambda x: 2 * F.relu(x),
    "sigmoid": _sigmoid,
    "tanh": lambda x: 1 - torch.tanh(x).square(),
    "linear": torch.ones_like,
}


def activation_backward(projected: Tensor, grad: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``projected``, and the value ``activation(projected)``.

    projected: (..., 2I), gate then up, or (..., I) without a gate. grad: (..., I), the gradient of the value.
    Values of gate or up that the limit clamps get a gradient of zero.
    """
    function, derivative = FUNCTIONS[activation.name], _DERIVATIVES[activation.name]
    if not activation.gated:
        return grad * derivative(projected), function(projected)
    gate, up = projected.chunk(2, dim=-1)
    limit, clamped, linear = activation.limit, gate, up
    if limit is not None:
        clamped, linear = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation.is_swiglu:  # use the kernels' formula for the derivative of a SwiGLU
        slope = 1.0
        if activation.alpha is not None:
            slope, linear = activation.alpha, linear + 1
        sigmoid = torch.sigmoid(slope * clamped)
        value = clamped * sigmoid
        d_gate = grad * linear * sigmoid * (1 + slope * clamped * (1 - sigmoid))
    else:
        value = function(clamped)
        d_gate = grad * linear * derivative(clamped)
    d_up = grad * value
    if limit is not None:
        # A NaN of gate or up does not exceed the limit, so its gradient stays NaN.
        d_gate = torch.where(gate > limit, 0, d_gate)
        d_up = torch.where(up.abs() > limit, 0, d_up)
    return torch.cat([d_gate, d_up], dim=-1), value * linear


def weighted_backward(
    projected: Tensor, d_h: Tensor, row_weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `activation_backward` in float32 for rows weighted by row_weights (R,).

    d_h: (R, I), the gradient of ``row_weights[:, None] * activation(projected)``. Returns the gradient of `projected`,
    the unweighted values ``activation(projected)``, and the gradient of the weights (R,).
    """
    d_h = d_h.float()
    d_projected, values = activation_backward(projected.float(), row_weights[:, None] * d_h, activation)
    return d_projected, values, (values * d_h).sum(-1)
