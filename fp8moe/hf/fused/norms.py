"""RMSNorm modules on one kernel, with the addition before and the quantization behind them."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.hf.fused.known_forwards import RMS_NORM, form_of, is_cast, runs_as_written
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.experts.operands import Norm
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


class Handover:
    """What lies between two modules of a model that run one after the other, a layer and the one behind it.

    norm: the module that normalizes the layer's result. quantized: whether the result is read in FP8.

    It holds one result and its norm, until that is taken or the result is gone. It gives the norm only to who asks for
    that of this very tensor, unchanged since; all others get None, and normalize by themselves. So it does not matter
    whether hooks exchange or change what a layer returns, whether layers are left out, and how many threads there are.
    """

    def __init__(self, norm: nn.Module, quantized: bool):
        self.norm = norm
        self.quantized = quantized
        self._held: tuple[weakref.ref[Tensor], int, Normed] | None = None

    def wanted(self, dtype: torch.dtype) -> Norm | None:
        """What is to be computed beside a result of this dtype; None: nothing."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not serves(self.norm, dtype):
            return None
        return Norm(self.norm.weight, self.norm.variance_epsilon, self.quantized)

    def put(self, result: Tensor, normed: Normed) -> None:
        """Hold the norm of a result."""
        self._held = weakref.ref(result, self._drop), result._version, normed

    def take(self, result: Tensor, norm: nn.Module, *, quantized: bool) -> Normed | None:
        """The norm of a result by this module, if it is held, in FP8 or as values."""
        held, self._held = self._held, None
        if held is None or norm is not self.norm or quantized is not self.quantized:
            return None
        reference, version, normed = held
        return normed if reference() is result and result._version == version else None

    def _drop(self, reference: weakref.ref[Tensor]) -> None:
        held = self._held
        if held is not None and held[0] is reference:
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_held": None}  # of copies, which hold nothing
