"""Parse the names of checkpoint tensors: the module a tensor belongs to, its role there, and the expert.

Experts are stored one by one, ``experts.7.gate_proj.weight``, or fused, ``experts.gate_up_proj`` (E, 2I, H). The scale
of X.weight is called X.weight_scale_inv, X.weight_scale or X.scale; the scale of a fused weight Y, Y_scale_inv.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP = "gate_up_proj"

W_NAMES = {GATE: "w1", UP: "w3", DOWN: "w2"}
"""Names of an expert's projections in the checkpoints of Mixtral and some others."""

W_BLOCK, BLOCK_IN_MODEL = ".block_sparse_moe.", ".mlp."
"""Names of the module around the experts: in Mixtral's checkpoints, and in transformers' models."""

WEIGHT, SCALE_ROLE, BIAS, OTHER = "weight", "scale", "bias", "other"

SCALE = "_scale_inv"
CHANNEL_SCALE = "_scale"
"""Suffix that compressed-tensors gives the names of per-output-channel scales."""
GROUPS = "_blocks"
"""Suffix of the MXFP4 codes of fused experts: Y_blocks (E, N, K/32, 16) has its scales in Y_scales (E, N, K/32)."""
GLOBAL_SCALE = "_global_scale"
TENSOR_SCALES = ("_scale_2", GLOBAL_SCALE)
"""Suffixes of the tensor scale of NVFP4: ModelOpt's is a factor, compressed-tensors' a divisor."""

_PROJECTIONS = {name: name for name in W_NAMES} | {short: name for name, short in W_NAMES.items()}
_NUMBER = "0|[1-9][0-9]{0,17}"  # an index without leading zeros, as in checkpoints; 18 digits fit in int64
_NAME = re.compile(
    rf"(?P<experts>.*\bexperts)\.(?:(?P<expert>{_NUMBER})\.(?P<one>{'|'.join(_PROJECTIONS)})\.(?P<of_one>weight|weight_scale_inv|weight_scale|scale)"
    rf"|(?P<fused>{GATE_UP}|{UP}|{DOWN})(?P<of_fused>{SCALE}|_bias)?)"
)
_ROLES = {None: WEIGHT, "weight": WEIGHT, "_bias": BIAS}
_OF_VLLM = re.compile(rf"(?<=\.)(w13|w2)_weight(?=$|{SCALE}$)")
_FUSED_BY_VLLM = {"w13": GATE_UP, "w2": DOWN}
_UNUSED = re.compile(
    r"(.*\.)?(input_scale|input_global_scale|activation_scale|output_scale|input_scale_ub|k_scale|v_scale|q_scale|kv_scale"
    r"|prob_output_scale|\w*_input_scale|\w*_activation_scale)"
)
"""Names of static scales of activations, keys and values. fp8moe does not use them: it quantizes dynamically."""


class Name(NamedTuple):
    """A parsed tensor name.

    text: the full name. module: the module that the tensor belongs to; for experts, the module that holds all of them.
    role: WEIGHT, SCALE_ROLE, BIAS or OTHER. projection: GATE_UP, GATE, UP or DOWN for tensors of experts, otherwise
    None. expert: the expert's index; None for fused experts and for other tensors.
    """

    text: str
    module: str
    role: str
    projection: str | None = None
    expert: int | None = None

    @property
    def weight(self) -> str:
        """For a scale, the name of the weight that it belongs to; for any other tensor, the tensor's own name."""
        if self.role != SCALE_ROLE:
            return self.text
        end = next(end for end in (SCALE, CHANNEL_SCALE, ".scale") if self.text.endswith(end))
        return self.text.removesuffix(end) + ".weight" * (end == ".scale")

    @property
    def scale(self) -> str:
        """The name that fp8moe gives the scale of this weight."""
        return self.text + SCALE

    @property
    def bias(self) -> str:
        """The name of the bias of a weight of fused experts."""
        return f"{self.text}_bias"

    @property
    def matrices(self) -> int:
        """The number of matrices stacked in the weight, each with separate blocks: 2 for gate_up_proj, otherwise 1."""
        return 2 if self.projection == GATE_UP else 1

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names that a module pattern may match: the tensor's own module and the module of all experts."""
        own = self.text.removesuffix(".weight")
        return (own, self.module) if self.role == WEIGHT else (own,)


class Location(NamedTuple):
    """Where a model puts a tensor of a checkpoint.

    name: the tensor's name in the model; a single expert keeps its index, as in mlp.experts.7.gate_proj.weight.
    key: the state-dict key of the parameter that the tensor becomes or becomes a part of. converter: transformers'
    WeightConverter for the tensor; None if the tensor is only renamed or placed in a fused parameter. pattern: the
    source pattern of the converter that the tensor's name matches.
    """

    name: Name
    key: str
    converter: Any = None
    pattern: str | None = None

    @property
    def steps(self) -> str:
        """Return the names of the converter's operations, for an error message."""
        return ", ".join(type(step).__name__ for step in self.converter.operations)


def parse(text: str, rank: int | None = None) -> Name:
    """Parse a tensor's name. rank: its number of dimensions, if known; weights of fused experts have three."""
    match = _NAME.fullmatch(text)
    if match is not None:
        if match["expert"] is not None:
            role = _ROLES.get(match["of_one"], SCALE_ROLE)
            return Name(text, match["experts"], role, _PROJECTIONS[match["one"]], int(match["expert"]))
        role = _ROLES.get(match["of_fused"], SCALE_ROLE)
        if role != WEIGHT or rank in (None, 3):
            return Name(text, match["experts"], role, match["fused"])
        return Name(text, match["experts"], OTHER)
    module, _, parameter = text.rpartition(".")
    if parameter == "weight":
        return Name(text, module, WEIGHT)
    if text.endswith(SCALE) or parameter in ("scale", "weight_scale") and module:
        return Name(text, module, SCALE_ROLE)
    return Name(text, module, BIAS if parameter == "bias" else OTHER)


def weight_of_codes(text: str, names: Mapping[str, object]) -> str | None:
    """Return the name of the weight to which a tensor of packed codes belongs; None if the tensor holds no codes.

    text: the tensor's name. names: the names of all tensors.
    """
    if text.endswith(".weight_packed"):
        return text.removesuffix("_packed")
    if text.endswith(".qweight"):
        return text.removesuffix("qweight") + "weight"
    if text.endswith(GROUPS) and f"{text.removesuffix(GROUPS)}_scales" in names:
        return text.removesuffix(GROUPS)
    return None


def is_scale_beside(text: str, names: Mapping[str, object]) -> bool:
    """Return whether a tensor of this name is the scale of a weight in ``names``.

    Considers only the names of scales that can themselves be stored in an FP8 dtype.
    """
    of = next((text.removesuffix(suffix) for suffix in (SCALE, CHANNEL_SCALE) if text.endswith(suffix)), None)
    return of is not None and (of in names or f"{of}_packed" in names)


def scale_spellings(weight: Name, codes: str) -> Iterator[str]:
    """Yield the names that a weight's scale may have, likeliest first; names of a scale shared by all experts are last.

    codes: the name of the tensor that holds the weight's codes.
    """
    text = weight.text
    yield text + SCALE
    yield text + CHANNEL_SCALE
    if codes.endswith(GROUPS):
        yield f"{text}_scales"
    if not text.endswith(".weight"):
        yield f"{text}_weight_scale"
        return
    if codes.endswith(".qweight"):
        yield f"{text.removesuffix('weight')}scales"
    yield f"{text.removesuffix('weight')}scale"
    if weight.expert is not None:
        yield f"{weight.module}.{weight.projection}{SCALE}"
        if weight.projection != DOWN:
            yield f"{weight.module}.{GATE_UP}{SCALE}"


def is_own_scale(weight: Name, scale: str) -> bool:
    """Return whether a scale belongs to this weight alone, rather than to all experts."""
    return scale.startswith(weight.text.removesuffix("weight"))


def is_unused_scale(text: str) -> bool:
    return _UNUSED.fullmatch(text) is not None


def from_vllm(text: str) -> str:
    """Rename vLLM's w13_weight and w2_weight of fused experts as fp8moe calls them; return other names unchanged."""
    return _OF_VLLM.sub(lambda match: _FUSED_BY_VLLM[match[1]], text)


def one_by_one(name: Name) -> tuple[str, ...]:
    """Return the names, with * for the expert, that DeepSeek's checkpoints give the matrices of a fused weight."""
    projections = (GATE, UP) if name.projection == GATE_UP else (name.projection,)
    return tuple(f"{name.module}.*.{projection}.weight" for projection in projections)
