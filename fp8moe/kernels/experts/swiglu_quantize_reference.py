"""SwiGLU and its backward with the quantizers behind them, in plain PyTorch, on any device.

They define what the CUDA kernel computes. Arguments are checked by the callers.
"""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.quant import reference, transpose_reference
from fp8moe.quant.transpose_reference import Results


def swiglu_quantize(gate_up: Tensor, group_offsets: Tensor, activation: Activation) -> Results:
    """gate_up (R, 2I) -> `swiglu_values` (R, I) quantized both ways."""
    h = swiglu_values(gate_up, activation)
    return transpose_reference.quantize(h, h, group_offsets)


def swiglu_quantize_rows(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up (R, 2I) -> data and scale of `swiglu_values` by rows, and these (R, I)."""
    h = swiglu_values(gate_up, activation)
    return *reference.quantize_1x128(h, False), h


def swiglu_values(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up (R, 2I) -> the activation (R, I) in float32, rounded to gate_up's dtype."""
    return activation(gate_up.float()).to(gate_up.dtype)


def swiglu_backward_quantize(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, group_offsets: Tensor, activation: Activation
) -> tuple[Results, Tensor]:
    """gate_up (R, 2I), grad (R, I), row_weights (R,) -> d_gate_up (R, 2I) quantized both ways, dots (R,)."""
    d_gate_up, _, dots = swiglu_gradients(gate_up, grad, row_weights, activation)
    return transpose_reference.quantize(d_gate_up, d_gate_up, group_offsets), dots


def swiglu_backward_quantize_rows(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same by rows: data, scale, dots (R,), d_gate_up (R, 2I), `swiglu_values` (R, I)."""
    d_gate_up, h, dots = swiglu_gradients(gate_up, grad, row_weights, activation)
    return *reference.quantize_1x128(d_gate_up, False), dots, d_gate_up, h


def swiglu_gradients(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """d_gate_up (R, 2I) and `swiglu_values` (R, I) in gate_up's dtype, and the dots (R,)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    grad = grad.float()
    weighted = grad * row_weights[:, None]
    d_gate, d_up, h = swiglu_backward(gate, up, weighted, activation)
    d_gate_up = torch.cat([d_gate, d_up], dim=-1).to(gate_up.dtype)
    return d_gate_up, h.to(gate_up.dtype), (h * grad).sum(-1)


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives with respect to gate and up for a `grad` with respect to the result, and the result itself."""
    limit, alpha = activation.limit, activation.alpha
    clamped, linear = gate, up
    if limit is not None:
        clamped, linear = gate.clamp(max=limit), up.clamp(-limit, limit)
    slope = 1.0
    if alpha is not None:
        linear, slope = linear + 1, alpha
    sigmoid = torch.sigmoid(slope * clamped)
    silu = clamped * sigmoid
    d_gate = grad * linear * sigmoid * (1 + slope * clamped * (1 - sigmoid))
    d_up = grad * silu
    if limit is not None:
        # A NaN is not beyond the limit: it stays.
        d_gate = torch.where(gate > limit, 0, d_gate)
        d_up = torch.where(up.abs() > limit, 0, d_up)
    return d_gate, d_up, silu * linear
