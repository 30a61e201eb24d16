"""The format of FP8 checkpoints: dtypes, names and shapes of weights and their scales, and what config.json says of it.

Every weight has one scale for each 128x128 of its values: X.weight in X.weight_scale_inv, or X.scale in newer
checkpoints; a fused weight Y in Y_scale_inv.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.weights.expert_names import DOWN, GATE_UP, matrices_of, module_of, parse_expert

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

SCALE = "_scale_inv"
CHANNEL_SCALE = "_scale"
"""The end of the names of scales of output channels, as compressed-tensors has them."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""What scales are stored as; all are exact in float32."""
GATE_UP_LAYOUT = "gate_up_layout"
CONCATENATED = "concatenated"
"""What quantization_config says of FP8 experts with biases where all rows of gate lie before those of up."""


class TensorSpec(NamedTuple):
    """What is stored of a tensor. dtype: its safetensors name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Layout = dict[str, TensorSpec]
"""What a file or a whole checkpoint holds, by name."""


def scale_dtype(scale_format: str) -> str:
    """What scales of this format are stored as."""
    return "F8_E8M0" if scale_format == "ue8m0" else "F32"


def scale_name(weight: str) -> str:
    return weight + SCALE


def weight_of(name: str) -> str | None:
    """The weight that a tensor of this name would be the scale of, or None where the name is not that of a scale."""
    if name.endswith(SCALE):
        return name.removesuffix(SCALE) or None
    return name.removesuffix("scale") + "weight" if name.endswith(".scale") else None


def scale_of(weight: str, names: Mapping[str, object]) -> str | None:
    """The name of this weight's scale among ``names``, in whatever spelling.

    The scale of one expert's weight may be part of a fused one: so transformers writes experts that it has quantized.
    """
    spellings = [scale_name(weight)]
    if weight.endswith(".weight"):
        spellings.append(weight.removesuffix("weight") + "scale")
    expert = parse_expert(weight)
    if expert is not None:
        spellings.append(scale_name(f"{expert.module}.{expert.projection}"))
        if expert.projection != DOWN:
            spellings.append(scale_name(f"{expert.module}.{GATE_UP}"))
    return next((name for name in spellings if name in names), None)


def scale_shape(weight: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scale: one for each 128x128, gate and up of fused experts each with blocks of its own."""
    *lead, rows, columns = shape
    matrices = matrices_of(weight, shape)
    return *lead, matrices * ceil_div(rows // matrices, BLOCK), ceil_div(columns, BLOCK)


def fits_scale(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a scale has this shape, or another rank and sizes of one besides: transformers 5.17 drops such sizes."""
    if len(shape) == len(expected) == 2:  # (N, 1) of channels is no (1, N) of blocks
        return tuple(shape) == tuple(expected)
    return [size for size in shape if size != 1] == [size for size in expected if size != 1]


def quantization_config(layout: Layout, scale_format: str, others: Iterable[str]) -> dict:
    """What config.json says about a checkpoint with this layout, of blocks or, like compressed-tensors, of channels.

    others: modules that are not in FP8 and do not show, or not under this name, in the layout. "lm_head" is always one,
    unless it is stored in FP8: it may be tied to the embedding.
    """
    kept, quantized = {"lm_head", *others}, set()
    for name, spec in layout.items():
        module = module_of(name)
        if module is not None and len(spec.shape) >= 2:
            (quantized if spec.dtype == FP8 else kept).add(module)
    fused = (name for name, spec in layout.items() if spec.dtype == FP8 and name.endswith(f".{GATE_UP}"))
    gate_up = {GATE_UP_LAYOUT: CONCATENATED} if any(f"{name}_bias" in layout for name in fused) else {}
    if any(spec.dtype == FP8 and name + CHANNEL_SCALE in layout for name, spec in layout.items()):
        channels = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        tokens = channels | {"strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": channels, "input_activations": tokens}
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


def as_float(scale: Tensor) -> Tensor:
    """Scales in float32, exact for all that are stored; bytes are exponents of two (E8M0)."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).float()
