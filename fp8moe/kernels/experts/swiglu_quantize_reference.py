"""SwiGLU and its backward with the transposing quantizer behind them, in plain PyTorch, on any device.

They define what the CUDA kernel computes. Arguments are checked by the callers.
"""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.quant import transpose_reference
from fp8moe.quant.transpose_reference import Results


def swiglu_quantize(gate_up: Tensor, group_offsets: Tensor, activation: Activation) -> Results:
    """gate_up (R, 2I) -> the activation (R, I) in float32, rounded to gate_up's dtype, and quantized both ways."""
    h = activation(gate_up.float()).to(gate_up.dtype)
    return transpose_reference.quantize(h, h, group_offsets)


def swiglu_backward_quantize(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, group_offsets: Tensor, activation: Activation
) -> tuple[Results, Tensor]:
    """gate_up (R, 2I), grad (R, I), row_weights (R,) -> d_gate_up (R, 2I) quantized both ways, dots (R,)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    grad = grad.float()
    weighted = grad * row_weights[:, None]
    d_gate, d_up, h = swiglu_backward(gate, up, weighted, activation)
    d_gate_up = torch.cat([d_gate, d_up], dim=-1).to(gate_up.dtype)
    return transpose_reference.quantize(d_gate_up, d_gate_up, group_offsets), (h * grad).sum(-1)


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
