"""Names of the tensors of experts in a checkpoint: one by one or fused, and how a model's checkpoints call them.

Experts are stored one by one, ``experts.7.gate_proj.weight``, or fused, ``experts.gate_up_proj`` (E, 2I, H).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP = "gate_up_proj"

W_NAMES = {GATE: "w1", UP: "w3", DOWN: "w2"}
"""How the checkpoints of Mixtral and some others call the projections of an expert."""

W_BLOCK, BLOCK_IN_MODEL = ".block_sparse_moe.", ".mlp."
"""What such checkpoints may call the module around the experts, and what transformers' models call it."""

_PROJECTIONS = {name: name for name in W_NAMES} | {short: name for name, short in W_NAMES.items()}
_NUMBER = "0|[1-9][0-9]{0,17}"  # as checkpoints write it, and no larger than a size can be
_ONE_EXPERT = re.compile(rf"(.*\bexperts)\.({_NUMBER})\.({'|'.join(_PROJECTIONS)})\.(weight|weight_scale_inv|scale)")
_FUSED_EXPERTS = re.compile(rf"(.*\bexperts)\.({GATE_UP}|{UP}|{DOWN})")


class ExpertTensor(NamedTuple):
    """``experts.7.gate_proj.weight`` taken apart."""

    module: str  # of all experts
    expert: int
    projection: str  # GATE, UP or DOWN
    is_scale: bool


class FusedExperts(NamedTuple):
    """``experts.gate_up_proj`` taken apart."""

    module: str
    projection: str  # GATE_UP, UP or DOWN


def parse_expert(name: str) -> ExpertTensor | None:
    """The weight or scale of one projection of one expert, or None for any other tensor."""
    match = _ONE_EXPERT.fullmatch(name)
    if match is None:
        return None
    module, expert, projection, suffix = match.groups()
    return ExpertTensor(module, int(expert), _PROJECTIONS[projection], suffix != "weight")


def parse_fused(name: str, shape: tuple[int, ...]) -> FusedExperts | None:
    """The weights (E, rows, columns) of one projection of all experts, or None for any other tensor."""
    match = _FUSED_EXPERTS.fullmatch(name)
    return FusedExperts(*match.groups()) if match and len(shape) == 3 else None


def matrices_of(weight: str, shape: tuple[int, ...]) -> int:
    """How many matrices, each quantized in blocks of its own, a weight has one below the other: gate and up are two."""
    fused = parse_fused(weight, shape)
    return 2 if fused and fused.projection == GATE_UP else 1


def module_of(name: str) -> str | None:
    """The module that a weight belongs to (all experts together), as configurations list it; None for other tensors."""
    expert = parse_expert(name)
    if expert is not None:
        return None if expert.is_scale else expert.module
    fused = _FUSED_EXPERTS.fullmatch(name)
    if fused is not None:
        return fused.group(1)
    return name.removesuffix(".weight") if name.endswith(".weight") else None


@dataclass(frozen=True)
class ExpertNames:
    """How the checkpoints of a model name the tensors of experts that they store one by one.

    projections: their names for those of ours that they call otherwise. w_block: whether they have `W_BLOCK` where the
    model has `BLOCK_IN_MODEL`.
    """

    projections: Mapping[str, str] = field(default_factory=dict)
    w_block: bool = False

    def stored(self, own_name: str) -> str:
        """The checkpoint's name of a tensor."""
        name = own_name.replace(BLOCK_IN_MODEL, W_BLOCK) if self.w_block else own_name
        expert = parse_expert(name)
        if expert is None or expert.projection not in self.projections:
            return name
        return name.replace(f".{expert.projection}.", f".{self.projections[expert.projection]}.")


FindExpertNames = Callable[[nn.Module], ExpertNames | None]
"""Finds the names of a model's experts in its checkpoints; None where these store them fused."""
