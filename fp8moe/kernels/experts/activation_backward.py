"""Derivatives of the activations that are no SwiGLU, as PyTorch operations. For SwiGLU see `swiglu_quantize`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.activation import FUNCTIONS, Activation

_gelu_backward = torch.ops.aten.gelu_backward.default


def _silu(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x: Tensor) -> Tensor:
    return _gelu_backward(torch.ones_like(x), x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return _gelu_backward(torch.ones_like(x), x, approximate="tanh")


def _relu(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x, (x > 0).to(x.dtype))


def _sigmoid(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 - sigmoid)


# Of the functions with the same names in `FUNCTIONS`.
_DERIVATIVES = {
    "silu": _silu,
    "swish": _silu,
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": lambda x: 2 * F.relu(x),
    "sigmoid": _sigmoid,
    "tanh": lambda x: 1 - torch.tanh(x).square(),
    "linear": torch.ones_like,
}


def activation_backward(projected: Tensor, grad: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The derivative with respect to ``projected`` and the value of ``activation(projected)``.

    projected: (..., 2I), gate then up, or (..., I) without a gate; grad: (..., I), with respect to the value.
    activation: without an alpha. Where its limit clamps gate or up, that gets no gradient.
    Returns tensors shaped as projected and as grad.
    """
    function, derivative = FUNCTIONS[activation.name], _DERIVATIVES[activation.name]
    if not activation.gated:
        return grad * derivative(projected), function(projected)
    gate, up = projected.chunk(2, dim=-1)
    limit, clamped, linear = activation.limit, gate, up
    if limit is not None:
        clamped, linear = gate.clamp(max=limit), up.clamp(-limit, limit)
    value = function(clamped)
    d_gate, d_up = grad * linear * derivative(clamped), grad * value
    if limit is not None:
        # A NaN is not beyond the limit: it stays.
        d_gate = torch.where(gate > limit, 0, d_gate)
        d_up = torch.where(up.abs() > limit, 0, d_up)
    return torch.cat([d_gate, d_up], dim=-1), value * linear


def weighted_backward(
    projected: Tensor, d_h: Tensor, row_weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """`activation_backward` of rows with a weight each (R,), in float32; and the gradient of the weights (R,).

    d_h: (R, I), without the weights.
    """
    d_h = d_h.float()
    d_projected, values = activation_backward(projected.float(), row_weights[:, None] * d_h, activation)
    return d_projected, values, (values * d_h).sum(-1)
