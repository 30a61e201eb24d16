"""RMSNorm modules on one kernel, with the addition before and the quantization behind them."""

import torch
from torch import Tensor, nn

from fp8moe.integrations.models.known_forwards import RMS_NORM, form_of, is_cast, runs_as_written
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.runtime.checks import FLOATING


def serves(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether `norm` computes what the module does for an input of this dtype."""
    return (
        form_of(module, RMS_NORM) is not None
        and runs_as_written(module)
        and module.weight.dtype is dtype
        and dtype in FLOATING
        and not is_cast(module.weight)
    )


def norm(module: nn.Module, x: Tensor, residual: Tensor | None = None, *, values: bool, quantized: bool) -> Normed:
    """`rms_norm` of x (..., H) with the module's weight and eps; all that it returns as rows (M, H)."""
    rows = [None if part is None else part.reshape(-1, part.shape[-1]) for part in (x, residual)]
    return rms_norm(
        rows[0], module.weight, module.variance_epsilon, residual=rows[1], values=values, quantized=quantized
    )
