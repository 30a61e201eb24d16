"""What FP8 checkpoints are made of: dtypes, shapes of weights and their scales, and what config.json says of them."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.weights.names import GATE_UP, WEIGHT, Name

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of safetensors files that are understood, by the names that they have there."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP8 = "F8_E4M3"
FLOATS = ("BF16", "F16", "F32", "F64")

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""What scales are stored as; all are exact in float32."""
GATE_UP_LAYOUT = "gate_up_layout"
CONCATENATED = "concatenated"
"""What quantization_config says of FP8 experts with biases where all rows of gate lie before those of up."""


class TensorSpec(NamedTuple):
    """The dtype, by its safetensors name, and the shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Layout = dict[str, TensorSpec]
"""The tensors of a file or of a whole checkpoint, by name."""


def scale_dtype(scale_format: str) -> str:
    """Return the safetensors dtype of scales of this format."""
    return "F8_E8M0" if scale_format == "ue8m0" else "F32"


def scale_grid(matrices: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a scale for each 128x128 values, where each of the matrices has blocks of its own."""
    *lead, rows, columns = shape
    return *lead, matrices * ceil_div(rows // matrices, BLOCK), ceil_div(columns, BLOCK)


def fits_scale(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether a scale has this shape but for sizes of one, which transformers 5.17 drops."""
    if len(shape) == len(expected) == 2:  # (N, 1) of channels is no (1, N) of blocks
        return tuple(shape) == tuple(expected)
    return [size for size in shape if size != 1] == [size for size in expected if size != 1]


def as_float(scale: Tensor) -> Tensor:
    """Return scales in float32, exact for all that are stored; bytes are exponents of two (E8M0)."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).float()


def quantization_config(
    tensors: Iterable[tuple[Name, TensorSpec]], scale_format: str, others: Iterable[str], *, channels: bool = False
) -> dict:
    """Make the quantization_config of a checkpoint with these tensors.

    others: modules that are not in FP8 and do not show, or not under this name, among the tensors. "lm_head" is always
    one, unless it is stored in FP8: it may be tied to the embedding. channels: whether scales are of output channels,
    which compressed-tensors describes.
    """
    kept, quantized, fused, biases = {"lm_head", *others}, set(), set(), set()
    for name, spec in tensors:
        if name.role == WEIGHT and len(spec.shape) >= 2:
            (quantized if spec.dtype == FP8 else kept).add(name.module)
        if name.projection == GATE_UP and name.role != WEIGHT:
            biases.add(name.text)
        elif name.projection == GATE_UP and spec.dtype == FP8:
            fused.add(name.bias)
    gate_up = {GATE_UP_LAYOUT: CONCATENATED} if fused & biases else {}
    if channels:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        tokens = weights | {"strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": sorted(kept - quantized),
            "config_groups": {"group_0": group},
            **gate_up,
        }
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {}),
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(kept - quantized),
        **gate_up,
    }
