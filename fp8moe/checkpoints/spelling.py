"""How the checkpoints of a model spell its experts: transformers' registry of conversions knows."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fp8moe.checkpoints.names import BLOCK_IN_MODEL, W_BLOCK, W_NAMES, parse_expert
from fp8moe.checkpoints.sharding import class_of

_ONE_EXPERT = "experts.*."


@dataclass(frozen=True)
class Spelling:
    """How a checkpoint names the tensors of experts.

    projections: its names for those of ours that it calls otherwise. w_block: whether it has `W_BLOCK` where the model
    has `BLOCK_IN_MODEL`.
    """

    projections: Mapping[str, str] = field(default_factory=dict)
    w_block: bool = False

    def name(self, own_name: str) -> str:
        """The checkpoint's name of a tensor."""
        name = own_name.replace(BLOCK_IN_MODEL, W_BLOCK) if self.w_block else own_name
        expert = parse_expert(name)
        if expert is None or expert.projection not in self.projections:
            return name
        return name.replace(f".{expert.projection}.", f".{self.projections[expert.projection]}.")


def spelling_of(model: nn.Module) -> Spelling | None:
    """DeepSeek's spelling, or for transformers' own models what its registry says; None if it says fused experts."""
    transformers = sys.modules.get("transformers")
    own = transformers is not None and isinstance(model, transformers.PreTrainedModel)
    if not own or not class_of(model).__module__.startswith("transformers."):
        return Spelling()
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    patterns = [pattern.replace("\\.", ".") for conversion in conversions for pattern in conversion.source_patterns]
    projections = {
        pattern.partition(_ONE_EXPERT)[2].removesuffix(".weight") for pattern in patterns if _ONE_EXPERT in pattern
    }
    if projections and projections <= W_NAMES.keys():
        return Spelling()
    if projections and projections <= set(W_NAMES.values()):
        return Spelling(W_NAMES, w_block=W_BLOCK in patterns)
    return None
