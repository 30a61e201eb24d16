"""Layers whose forward `kernelize()` gives to marked modules. They run on the installed fp8moe and have no state."""

import torch
from torch import Tensor, nn

import fp8moe
from fp8moe.hf.experts import experts_forward
from fp8moe.hf.linears import float_scale, refusal


class FP8MoeExperts(nn.Module):
    """Experts modules of transformers, or of the same attributes: those that `GroupedExperts.from_experts` reads.

    Raises TypeError or ValueError, naming the module's class, for others. Frozen experts pass gradients on to their
    inputs. Weights get none: if one requires a gradient, the backward raises RuntimeError.
    """

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class FP8Linear(nn.Module):
    """Linears with an FP8 weight in blocks of 128x128, as transformers' FP8Linear.

    Raises TypeError or ValueError for others. Input and bias get gradients; weight and scales are constants.
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    weight_scale_inv: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return _fp8_linear(self, input)


def _fp8_linear(module: nn.Module, x: Tensor) -> Tensor:
    """Compute the forward of `FP8Linear`; a module without a block_size has blocks of 128x128."""
    block_size, activation_scale = getattr(module, "block_size", (128, 128)), getattr(module, "activation_scale", None)
    if (reason := refusal(module.weight, block_size, activation_scale)) is not None:
        raise ValueError(f"{type(module).__name__} cannot run on fp8moe's FP8Linear: {reason}")
    scale = module.weight_scale_inv.detach()
    if scale.dtype is torch.float8_e8m0fnu:
        scale = float_scale(module.weight_scale_inv)
    return fp8moe.linear(x, (module.weight.detach(), scale), module.bias)
