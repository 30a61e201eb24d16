"""Low-rank additions merged into weights as layers store them, FP8 in blocks of 128x128 or unquantized."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_128x128


class MergeError(NamedTuple):
    """How far stored weights are from the sums that were merged, in Frobenius norms of all weights of a module.

    weight: relative to the sums W + BA. adapter: relative to BA; at 1 rounding has taken as much as the
    adapter has added.
    """

    weight: float
    adapter: float


@dataclass(frozen=True)
class Stored:
    """Weights of a module, of all experts: data (E, matrices * N, K), scale with blocks of each matrix, or None.

    add: (e) -> (matrices * N, K) float32, what is to be added to those of expert e.
    """

    data: Tensor
    scale: Tensor | None
    matrices: int
    add: Callable[[int], Tensor]

    def sums(self, expert: int) -> tuple[Tensor, Tensor]:
        """W + BA and BA of an expert, (matrices, N, K) float32."""
        added = self.add(expert).unflatten(0, (self.matrices, -1))
        data = self.data[expert].unflatten(0, (self.matrices, -1))
        if self.scale is None:
            return data.float() + added, added
        scale = self.scale[expert].float().unflatten(0, (self.matrices, -1))
        return dequantize(FP8Tensor(data, scale)) + added, added

    def write(self, expert: int, sums: Tensor, scale_format: str) -> Tensor:
        """Store them; returns what is stored, in float32."""
        if self.scale is None:
            self.data[expert].copy_(sums.flatten(0, 1))
            return self.data[expert].float().view_as(sums)
        quantized = quantize_128x128(sums, scale_format=scale_format)
        self.data[expert].copy_(quantized.data.flatten(0, 1))
        self.scale[expert].copy_(quantized.scale.flatten(0, 1))
        return dequantize(quantized)

    @property
    def scale_format(self) -> str:
        """ "ue8m0" if all scales are powers of two, which they then stay."""
        if self.scale is None:
            return "float32"
        mantissa, _ = torch.frexp(self.scale.float())
        return "ue8m0" if bool((mantissa == 0.5).all()) else "float32"

    def clone(self) -> tuple[Tensor, Tensor | None]:
        return self.data.clone(), None if self.scale is None else self.scale.clone()

    def restore(self, data: Tensor, scale: Tensor | None) -> None:
        self.data.copy_(data)
        if scale is not None:
            self.scale.copy_(scale)


@torch.no_grad()
def check_finite(name: str, weights: Sequence[Stored]) -> None:
    """ValueError if a sum is not finite."""
    for stored in weights:
        for expert in range(len(stored.data)):
            if not bool(stored.sums(expert)[0].isfinite().all()):
                raise ValueError(f"{name}: safe_merge: expected finite W + BA, got NaN or infinity (matrix {expert})")


@torch.no_grad()
def merge(weights: Sequence[Stored]) -> MergeError:
    """Write W + BA in place of W, one expert at a time; every FP8 block gets a new scale."""
    squares = torch.zeros(3, dtype=torch.float64, device=weights[0].data.device)
    for stored in weights:
        scale_format = stored.scale_format
        for expert in range(len(stored.data)):
            sums, added = stored.sums(expert)
            kept = stored.write(expert, sums, scale_format)
            squares += torch.stack([value.double().square().sum() for value in (kept - sums, sums, added)])
    error, whole, added = squares.sqrt().tolist()
    return MergeError(error / whole if whole else error, error / added if added else float(error > 0) * float("inf"))
