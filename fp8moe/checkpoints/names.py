"""Names of the tensors of FP8 checkpoints: which scale belongs to which weight, and how experts are spelled.

Experts are stored one by one, ``experts.7.gate_proj.weight``, or fused, ``experts.gate_up_proj`` (E, 2I, H). A weight
X.weight has its scale in X.weight_scale_inv, or X.scale in newer checkpoints; a fused weight Y in Y_scale_inv.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fp8moe.checkpoints.files import FP8
from fp8moe.checkpoints.untrusted import shown
from fp8moe.quant.formats import BLOCK, ceil_div

SCALE = "_scale_inv"
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
"""What scales are stored as; all are exact in float32."""

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP = "gate_up_proj"

W_NAMES = {GATE: "w1", UP: "w3", DOWN: "w2"}
"""How the checkpoints of Mixtral and some others call the projections of an expert."""

W_BLOCK, BLOCK_IN_MODEL = ".block_sparse_moe.", ".mlp."
"""What such checkpoints may call the module around the experts, and what transformers' models call it."""

_PROJECTIONS = {name: name for name in W_NAMES} | {short: name for name, short in W_NAMES.items()}
_NUMBER = "0|[1-9][0-9]{0,17}"  # as checkpoints write it, and no larger than a size can be
_ONE_EXPERT = re.compile(rf"(.*\bexperts)\.({_NUMBER})\.({'|'.join(_PROJECTIONS)})\.(weight|weight{SCALE}|scale)")
_FUSED_EXPERTS = re.compile(rf"(.*\bexperts)\.({GATE_UP}|{UP}|{DOWN})")


@dataclass(frozen=True)
class ExpertTensor:
    """``experts.7.gate_proj.weight`` taken apart."""

    experts: str  # name of the module of all experts
    expert: int
    projection: str  # GATE, UP or DOWN
    is_scale: bool


def parse_expert(name: str) -> ExpertTensor | None:
    """The weight or scale of one projection of one expert, or None for any other tensor."""
    match = _ONE_EXPERT.fullmatch(name)
    if match is None:
        return None
    experts, expert, projection, suffix = match.groups()
    return ExpertTensor(experts, int(expert), _PROJECTIONS[projection], suffix != "weight")


def parse_fused(name: str, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """(experts module, projection) of fused experts' weights (E, rows, columns), or None for any other tensor."""
    match = _FUSED_EXPERTS.fullmatch(name)
    return match.group(1, 2) if match and len(shape) == 3 else None


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
        spellings.append(scale_name(f"{expert.experts}.{expert.projection}"))
        if expert.projection != DOWN:
            spellings.append(scale_name(f"{expert.experts}.{GATE_UP}"))
    return next((name for name in spellings if name in names), None)


def scale_shape(weight: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scale: one for each 128x128, gate and up of fused experts each with blocks of its own."""
    *lead, rows, columns = shape
    fused = parse_fused(weight, shape)
    matrices = 2 if fused and fused[1] == GATE_UP else 1
    return *lead, matrices * ceil_div(rows // matrices, BLOCK), ceil_div(columns, BLOCK)


def fits_scale(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a scale has this shape, sizes of one aside: transformers 5.17 drops those of single experts' scales."""
    return [size for size in shape if size != 1] == [size for size in expected if size != 1]


def module_of(name: str) -> str | None:
    """The module that a weight belongs to (all experts together), as configurations list it; None for other tensors."""
    expert = parse_expert(name)
    if expert is not None:
        return None if expert.is_scale else expert.experts
    fused = _FUSED_EXPERTS.fullmatch(name)
    if fused is not None:
        return fused.group(1)
    return name.removesuffix(".weight") if name.endswith(".weight") else None


def quantization_config(tensors: Mapping[str, tuple[str, tuple[int, ...]]], ue8m0: bool, others: Iterable[str]) -> dict:
    """What config.json says about a checkpoint with these tensors: name -> (safetensors dtype, shape).

    others: modules that are not in FP8 and do not show, or not under this name, among the tensors. "lm_head" is always
    one, unless it is stored in FP8: it may be tied to the embedding.
    """
    kept, quantized = {"lm_head", *others}, set()
    for name, (dtype, shape) in tensors.items():
        module = module_of(name)
        if module is not None and len(shape) >= 2:
            (quantized if dtype == FP8 else kept).add(module)
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **({"scale_fmt": "ue8m0"} if ue8m0 else {}),
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(kept - quantized),
    }


def config_problems(quantization: Mapping) -> list[str]:
    """What in a quantization_config these layers cannot follow."""
    problems = []
    for name, expected in (
        ("quant_method", "fp8"),
        ("weight_block_size", [BLOCK, BLOCK]),
        ("activation_scheme", "dynamic"),
    ):
        value = quantization.get(name, expected)
        if value != expected:
            problems.append(f"config.json: {name} is {shown(value)}, expected {expected!r}")
    kept = quantization.get("modules_to_not_convert")
    if kept is not None and not (isinstance(kept, list) and all(isinstance(module, str) for module in kept)):
        problems.append(f"config.json: modules_to_not_convert is {shown(kept)}, expected a list of strings")
    return problems
