"""SwiGLU feed-forward modules in FP8: gate and up in one GEMM, whose result is activated and quantized inside it."""

import torch
from torch import Tensor, nn

from fp8moe.integrations.models import forms, linears
from fp8moe.integrations.models.hooks import runs_as_written
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu
from fp8moe.quant.formats import FP8Tensor


def prepare(module: nn.Module) -> bool:
    """Move the weights of gate and up together; returns whether `feed_forward` serves the module then."""
    return _is_known(module) and linears.pack([module.gate_proj, module.up_proj], blocks=False) and serves(module)


def serves(module: nn.Module) -> bool:
    """Whether `feed_forward` computes what the module does, of an input in FP8."""
    if not _is_known(module):
        return False
    gate, up, down = (linears.weights(part) for part in (module.gate_proj, module.up_proj, module.down_proj))
    if gate is None or up is None or down is None or gate.bias is not None or len(gate.data) % 16:
        return False
    return linears.joined([gate, up], blocks=False) is not None


def feed_forward(module: nn.Module, x: FP8Tensor, dtype: torch.dtype) -> Tensor:
    """The module's result (M, H) in `dtype`. x: data (M, H)."""
    gate_up = linears.joined([linears.weights(part) for part in (module.gate_proj, module.up_proj)], blocks=False)
    rows = len(x.data)
    hidden = grouped_gemm_swiglu(
        x,
        FP8Tensor(gate_up.data[None], gate_up.scale[None]),
        torch.arange(0, 2 * rows, max(rows, 1), dtype=torch.int32, device=x.data.device),
        activation=Activation(),
    )
    return linears.project(hidden, [module.down_proj], dtype)[0]


def _is_known(module: nn.Module) -> bool:
    return forms.form_of(module, forms.MLP) is not None and runs_as_written(module) and _is_silu(module.act_fn)


def _is_silu(function: nn.Module) -> bool:
    from transformers.activations import SiLUActivation

    return type(function) in (SiLUActivation, nn.SiLU)
