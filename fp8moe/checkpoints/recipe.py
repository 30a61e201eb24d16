"""What becomes of the tensors of a checkpoint that is quantized."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8moe.checkpoints.files import DTYPES, FP8, CheckpointError, TensorInfo
from fp8moe.checkpoints.names import GATE_UP, parse_fused, scale_name, scale_shape
from fp8moe.checkpoints.write import Layout
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_128x128


@dataclass(frozen=True)
class Recipe:
    """What becomes of each tensor. quantized: the weights that become FP8, and the names that they have then."""

    quantized: Mapping[str, str]
    scale_format: str
    device: torch.device
    allow_nonfinite: bool

    @property
    def scale_dtype(self) -> str:
        return "F8_E8M0" if self.scale_format == "ue8m0" else "F32"

    def layout(self, tensors: Mapping[str, TensorInfo]) -> Layout:
        """What a shard with these tensors becomes."""
        layout: Layout = {}
        for name, info in tensors.items():
            stored = self.quantized.get(name)
            if stored is None:
                layout[name] = (info.dtype, info.shape)
            else:
                layout[stored] = (FP8, info.shape)
                layout[scale_name(stored)] = (self.scale_dtype, scale_shape(stored, info.shape))
        return layout

    def apply(self, name: str, info: TensorInfo, value: Tensor) -> dict[str, Tensor]:
        """All of a tensor, or one of its experts, as stored. CheckpointError for a NaN or an infinity."""
        stored = self.quantized.get(name)
        if stored is None:
            return {name: value}
        data, scale = _quantize(stored, info, value.to(self.device), self.scale_format)
        if not self.allow_nonfinite and not scale.isfinite().all():  # as is the scale of a block with such a value
            count = value.numel() - int(value.isfinite().sum())
            raise CheckpointError(
                f"cannot quantize {info.file}",
                [
                    f"{name}: {count} values are NaN or infinite, expected finite weights; allow_nonfinite=True "
                    "(--allow-nonfinite) goes on with them"
                ],
            )
        return {stored: data, scale_name(stored): scale.cpu().to(DTYPES[self.scale_dtype])}


def _quantize(name: str, info: TensorInfo, value: Tensor, scale_format: str) -> FP8Tensor:
    """One matrix (rows, columns); of fused gate and up, each by itself."""
    fused = parse_fused(name, info.shape)
    matrices = 2 if fused and fused[1] == GATE_UP else 1
    data, scale = quantize_128x128(value.unflatten(0, (matrices, -1)), scale_format=scale_format)
    return FP8Tensor(data.flatten(0, 1), scale.flatten(0, 1))
