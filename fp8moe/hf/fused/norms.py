"""Runs RMSNorm modules in one kernel, together with the preceding residual add and the following FP8 quantization."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.hf.fused.known_forwards import RMS_NORM, form_of, is_cast, runs_as_written
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.experts.operands import Norm
from fp8moe.runtime.checks import FLOATING


def serves(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether `norm` computes the same as the module's own forward for an input of this dtype."""
    return (
        form_of(module, RMS_NORM) is not None
        and runs_as_written(module)
        and module.weight.dtype is dtype
        and dtype in FLOATING
        and not is_cast(module.weight)
    )


def norm(module: nn.Module, x: Tensor, residual: Tensor | None = None, *, values: bool, quantized: bool) -> Normed:
    """Run `rms_norm` on x (..., H) and the residual, with the module's weight and eps; return results (M, H)."""
    rows = [None if part is None else part.reshape(-1, part.shape[-1]) for part in (x, residual)]
    return rms_norm(
        rows[0], module.weight, module.variance_epsilon, residual=rows[1], values=values, quantized=quantized
    )


class Handover:
    """Passes the normalized rows of a layer's result, computed by that layer, to the layer or norm that follows.

    norm: the RMSNorm module that normalizes the result. quantized: whether the follower reads the rows in FP8.

    A handover holds one result and its normalized rows, until they are taken or the result is freed. `take` returns
    the rows only for the same tensor object, unmodified; for any other it returns None, and the caller normalizes. So
    hooks may replace or change what a layer returns, layers may be skipped, and several threads may run the model.
    """

    def __init__(self, norm: nn.Module, quantized: bool):
        self.norm = norm
        self.quantized = quantized
        self._held: tuple[weakref.ref[Tensor], int, Normed] | None = None

    def wanted(self, dtype: torch.dtype) -> Norm | None:
        """Return the norm that a layer should apply to its result of this dtype, or None."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not serves(self.norm, dtype):
            return None
        return Norm(self.norm.weight, self.norm.variance_epsilon, self.quantized)

    def put(self, result: Tensor, normed: Normed) -> None:
        """Store the normalized rows of a result until `take`."""
        self._held = weakref.ref(result, self._drop), result._version, normed

    def take(self, result: Tensor, norm: nn.Module, *, quantized: bool) -> Normed | None:
        """Return the stored rows if they are `result` normalized by `norm`, otherwise None.

        quantized: whether the rows must be in FP8. If they are in the other format, the result is None too.
        """
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
        return vars(self) | {"_held": None}  # copies and pickles hold no result
