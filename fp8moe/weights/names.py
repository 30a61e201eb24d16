"""Names of tensors in checkpoints, taken apart once: the module, what the tensor is to it, and which experts it is of.

Experts are stored one by one, ``experts.7.gate_proj.weight``, or fused, ``experts.gate_up_proj`` (E, 2I, H). A weight's
scale is called X.weight_scale_inv, X.weight_scale or X.scale; a fused weight Y has Y_scale_inv.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP = "gate_up_proj"

W_NAMES = {GATE: "w1", UP: "w3", DOWN: "w2"}
"""Names of an expert's projections in the checkpoints of Mixtral and some others."""

W_BLOCK, BLOCK_IN_MODEL = ".block_sparse_moe.", ".mlp."
"""Names of the module around the experts: in such checkpoints, and in transformers' models."""

WEIGHT, SCALE_ROLE, BIAS, OTHER = "weight", "scale", "bias", "other"

SCALE = "_scale_inv"
CHANNEL_SCALE = "_scale"
"""The end of the names of scales of output channels, as compressed-tensors has them."""
GROUPS = "_blocks"
"""The end of the names of MXFP4 codes of fused experts Y, (E, N, K/32, 16), whose scales Y_scales are (E, N, K/32)."""

_PROJECTIONS = {name: name for name in W_NAMES} | {short: name for name, short in W_NAMES.items()}
_NUMBER = "0|[1-9][0-9]{0,17}"  # as checkpoints write it, and no larger than a size can be
_NAME = re.compile(
    rf"(?P<experts>.*\bexperts)\.(?:(?P<expert>{_NUMBER})\.(?P<one>{'|'.join(_PROJECTIONS)})\.(?P<of_one>weight|weight_scale_inv|weight_scale|scale)"
    rf"|(?P<fused>{GATE_UP}|{UP}|{DOWN})(?P<of_fused>{SCALE}|_bias)?)"
)
_ROLES = {None: WEIGHT, "weight": WEIGHT, "_bias": BIAS}
_OF_VLLM = re.compile(rf"(?<=\.)(w13|w2)_weight(?=$|{SCALE}$)")
_FUSED_BY_VLLM = {"w13": GATE_UP, "w2": DOWN}
_UNUSED = re.compile(
    r"(.*\.)?(input_scale|activation_scale|output_scale|input_scale_ub|k_scale|v_scale|q_scale|kv_scale"
    r"|prob_output_scale|\w*_input_scale|\w*_activation_scale)"
)
"""Names of static scales of activations, of keys and of values, which are quantized here as they come."""


class Name(NamedTuple):
    """A tensor's name taken apart.

    text: the name. module: the module that the tensor belongs to; of experts the module of all of them. role: WEIGHT,
    SCALE_ROLE, BIAS or OTHER. projection: GATE_UP, GATE, UP or DOWN of experts, otherwise None. expert: which one, None
    for all experts together and for other tensors.
    """

    text: str
    module: str
    role: str
    projection: str | None = None
    expert: int | None = None

    @property
    def weight(self) -> str:
        """The name of the weight: of a scale the one that it scales, otherwise this name."""
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
        """Count the matrices of a weight, one below the other, with blocks of their own: gate and up are two."""
        return 2 if self.projection == GATE_UP else 1

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules that a pattern may match: a weight's own, and for a single expert also all experts."""
        own = self.text.removesuffix(".weight")
        return (own, self.module) if self.role == WEIGHT else (own,)


class Location(NamedTuple):
    """Where a model puts a tensor of a checkpoint.

    name: what the model calls the tensor; one expert's with its number: mlp.experts.7.gate_proj.weight.
    key: in the state dict, of what it becomes, or a part of. converter, pattern: transformers' WeightConverter where it
    takes more than a name, or the place in a fused parameter, and which of the converter's sources this is.
    """

    name: Name
    key: str
    converter: Any = None
    pattern: str | None = None

    @property
    def steps(self) -> str:
        """The converter's operations, for a message."""
        return ", ".join(type(step).__name__ for step in self.converter.operations)


def parse(text: str, rank: int | None = None) -> Name:
    """Take a tensor's name apart. rank: of the tensor: weights of fused experts have three dimensions."""
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
    """The name of the weight whose packed codes this tensor holds, None where the name says nothing of that."""
    if text.endswith(".weight_packed"):
        return text.removesuffix("_packed")
    if text.endswith(".qweight"):
        return text.removesuffix("qweight") + "weight"
    if text.endswith(GROUPS) and f"{text.removesuffix(GROUPS)}_scales" in names:
        return text.removesuffix(GROUPS)
    return None


def is_scale_beside(text: str, names: Mapping[str, object]) -> bool:
    """Return whether this is the scale of another of these tensors, in a spelling that FP8 values may have."""
    of = next((text.removesuffix(suffix) for suffix in (SCALE, CHANNEL_SCALE) if text.endswith(suffix)), None)
    return of is not None and (of in names or f"{of}_packed" in names)


def scale_spellings(weight: Name, codes: str) -> Iterator[str]:
    """The names that the scale of a weight may have, the likeliest first; last those of the scale of all experts."""
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
    """Return whether a scale is of this weight alone, and not of all experts."""
    return scale.startswith(weight.text.removesuffix("weight"))


def is_unused_scale(text: str) -> bool:
    return _UNUSED.fullmatch(text) is not None


def from_vllm(text: str) -> str:
    """fp8moe's name of a fused tensor of experts that vLLM calls w13_weight or w2_weight; other names as they are."""
    return _OF_VLLM.sub(lambda match: _FUSED_BY_VLLM[match[1]], text)


@dataclass(frozen=True)
class ExpertNames:
    """Names that the checkpoints of a model give the tensors of experts that they store one by one.

    projections: their names for those of ours that they call otherwise. w_block: whether they have `W_BLOCK` where the
    model has `BLOCK_IN_MODEL`.
    """

    projections: Mapping[str, str] = field(default_factory=dict)
    w_block: bool = False

    def stored(self, name: Name) -> Name:
        """Return the checkpoint's name of a tensor of the model."""
        if not self.w_block:
            return name
        module = f"{name.module}.".replace(BLOCK_IN_MODEL, W_BLOCK).removesuffix(".")
        return name._replace(text=name.text.replace(BLOCK_IN_MODEL, W_BLOCK), module=module)

    def of_expert(self, name: Name, expert: int, projection: str) -> Name:
        """Return the checkpoint's name of one matrix of fused experts."""
        module = self.stored(name).module
        text = f"{module}.{expert}.{self.projections.get(projection, projection)}.weight"
        return Name(text, module, WEIGHT, projection, expert)


FindExpertNames = Callable[[nn.Module], ExpertNames | None]
"""Finds the names of a model's experts in its checkpoints; None where these store them fused."""
