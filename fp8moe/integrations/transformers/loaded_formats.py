"""Checkpoints that transformers would load without their scales: refused before it reads their weights."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8moe.checkpoints.find_format import Found, QuantizedWeight, examine, is_expert
from fp8moe.checkpoints.read import CheckpointError, open_checkpoint
from fp8moe.checkpoints.untrusted import printable
from fp8moe.integrations import NAME

_DEQUANTIZED = {
    "compressed-tensors": ("fp8-tensor", "fp8-channel", "mxfp4", "int4"),  # of NVFP4 it loses the scale of a tensor
    "mxfp4": ("mxfp4",),
}
"""What transformers makes floating-point experts of, by quantization method: fp8moe runs them on an FP8 copy."""
_LOADS = "fp8moe.integrations.transformers.load_model loads it"
_CONVERTS = "`fp8moe convert` makes FP8 blocks of it"


def check_formats() -> None:
    """Have from_pretrained refuse quantized checkpoints whose scales would be lost on the way to fp8moe.

    transformers skips a quantization method that it does not know, and casts FP8 codes to bfloat16 as if they were
    values. Its FP8 quantizer reports scales of other names as unexpected, and leaves its own as the memory was.
    """
    from transformers import PreTrainedModel

    load = PreTrainedModel._load_pretrained_model
    if hasattr(load, "_fp8moe"):
        return

    @functools.wraps(load)
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        if checkpoint_files:
            _check(model, checkpoint_files, load_config.hf_quantizer)
        return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    _load_pretrained_model._fp8moe = True
    PreTrainedModel._load_pretrained_model = staticmethod(_load_pretrained_model)


def _check(model: Any, files: Sequence[str], quantizer: Any) -> None:
    """ValueError, with the format's name, for weights that would get to fp8moe without their scales."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    asked = _runs_experts(model.config)
    fine_grained = isinstance(quantizer, FineGrainedFP8HfQuantizer)
    if not fine_grained and not asked:
        return
    try:
        stored = open_checkpoint(Path(files[0]).parent)
        found = examine(stored)
    except CheckpointError:
        return  # not safetensors: no format of ours, and transformers says what is wrong
    if quantizer is None:
        refused = found.weights[:1]
    elif fine_grained:
        refused = [weight for weight in found.weights if _is_lost(weight) or (asked and weight.kind != "fp8-block")][:1]
        refused = refused or (found.weights[:1] if asked and not found.format.loads else [])
    else:
        known = _DEQUANTIZED.get(quantizer.quantization_config.quant_method, ())
        refused = [weight for weight in found.weights if weight.kind not in known and is_expert(weight, stored)][:1]
    if refused:
        raise ValueError(printable(_sentence(found, refused[0])))


def _runs_experts(config: Any) -> bool:
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return any(getattr(part, "_experts_implementation", None) == NAME for part in parts)


def _is_lost(weight: QuantizedWeight) -> bool:
    """Whether transformers' FP8 quantizer would not find the scale under this name."""
    return weight.scale is None or (weight.has_own_scale and weight.scale.endswith("_scale"))


def _sentence(found: Found, weight: QuantizedWeight) -> str:
    says = f"{found.checkpoint.directory}: {found.format.reason}"
    if not found.format.loads:
        return f"{says}; from_pretrained would not run {weight.weight} on fp8moe"
    ways = f"{_LOADS}, and {_CONVERTS}" if found.format.exact else _LOADS
    return f"{says}, where from_pretrained would not run {weight.weight} on fp8moe with its scale; {ways}"
