"""Makes from_pretrained refuse checkpoints that it would load without their scales, or not onto fp8moe's kernels."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8moe.hf.experts import NAME
from fp8moe.weights.names import CHANNEL_SCALE, SCALE
from fp8moe.weights.source import CheckpointError, printable
from fp8moe.weights.stored import StoredWeight, open_weights

_DEQUANTIZED = {"compressed-tensors": ("fp8-tensor", "fp8-channel", "mxfp4", "int4")}  # not NVFP4: it loses a scale
"""Quantization method -> kinds of weights that transformers dequantizes correctly, if experts have separate linears.

fp8moe then runs the experts on an FP8 copy.
"""
_LOADS = "fp8moe.hf.load_model loads it"
_CONVERTS = "`fp8moe convert` makes FP8 blocks of it"
_WITHOUT_SCALES = f"from_pretrained would not run {{}} on fp8moe with its scale; {_LOADS}"
_WITH_BIASES = f"transformers' FP8 experts have no biases, as {{}} has; {_LOADS}"
_ON_TRITON = (
    f"from_pretrained would run {{}} on Triton kernels; {_LOADS}, and with "
    "quantization_config=Mxfp4Config(dequantize=True) from_pretrained makes bfloat16 of it, and fp8moe FP8 of that"
)


def check_unquantized(load):
    """Wrap the loading of weights: refuse quantized checkpoints for which transformers has no quantizer.

    transformers ignores a quantization method that it does not know, and casts FP8 weights to bfloat16 without their
    scales.
    """

    @functools.wraps(load)
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        if checkpoint_files and load_config.hf_quantizer is None:
            _check(model, checkpoint_files, None)
        return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    return _load_pretrained_model


def check_quantized(preprocess):
    """Wrap a quantizer's preparation of a model: refuse checkpoints whose weights would not reach fp8moe intact.

    transformers' FP8 quantizer reports scales under other names as unexpected, and leaves its own scales uninitialized;
    its FP8 experts have no biases and no norms. Its MXFP4 quantizer makes experts that run on Triton kernels.
    """

    @functools.wraps(preprocess)
    def preprocess_model(self, model, *args, **kwargs):
        if kwargs.get("checkpoint_files"):
            _check(model, kwargs["checkpoint_files"], self)
        return preprocess(self, model, *args, **kwargs)

    return preprocess_model


def check_loaded(finalize):
    """Wrap the end of loading: refuse a model with FP8 modules whose weights were loaded without scales."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    @functools.wraps(finalize)
    def _finalize_model_loading(model, load_config, loading_info, *args, **kwargs):
        report = finalize(model, load_config, loading_info, *args, **kwargs)
        quantizer = load_config.hf_quantizer
        if isinstance(quantizer, FineGrainedFP8HfQuantizer) and _runs_experts(model.config):
            _check_loaded(model, report, quantizer.pre_quantized)
        return report

    return _finalize_model_loading


def _check(model: Any, files: Sequence[str], quantizer: Any) -> None:
    """Raise ValueError, naming the format, if weights of the checkpoint would not reach fp8moe with their scales."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    asked = _runs_experts(model.config)
    fine_grained = isinstance(quantizer, FineGrainedFP8HfQuantizer)
    if not fine_grained and not asked:
        return
    try:
        found = open_weights(Path(files[0]).parent)
    except CheckpointError:
        return  # not safetensors: fp8moe has no format for it, and transformers reports what is wrong
    method = None if quantizer is None else quantizer.quantization_config.quant_method
    weights = found.quantized
    refused, why = weights, f"{_WITHOUT_SCALES}, and {_CONVERTS}" if found.format.exact else _WITHOUT_SCALES
    if fine_grained:
        runs = not asked or found.format.loads
        refused = [
            weight for weight in weights if _is_lost(weight) or not runs or (asked and weight.kind != "fp8-block")
        ]
        if not refused:
            tensors = found.checkpoint.tensors
            refused, why = [weight for weight in weights if weight.name.bias in tensors], _WITH_BIASES
    elif method == "mxfp4" and any(weight.interleaved for weight in weights):
        dequantized = quantizer.quantization_config.dequantize and found.format.loads
        refused, why = [] if dequantized else weights, _ON_TRITON
    elif quantizer is not None:
        known = _DEQUANTIZED.get(method, ())
        refused = [
            weight for weight in weights if weight.is_expert and (weight.kind not in known or len(weight.shape) == 3)
        ]
    if not refused:
        return
    says, weight = f"{found.checkpoint.directory}: {found.format.reason}", refused[0].name.text
    if not found.format.loads:
        raise ValueError(printable(f"{says}; from_pretrained would not run {weight} on fp8moe"))
    raise ValueError(printable(f"{says}, where {why.format(weight)}"))


def _check_loaded(model: Any, report: Any, pre_quantized: bool) -> None:
    """Raise ValueError if FP8 modules of transformers were loaded without scales, or FP8 experts without some tensor.

    report: transformers' loading report. pre_quantized: whether the checkpoint is in FP8; otherwise transformers makes
    the scales itself, and its report calls them missing.
    """
    from transformers.integrations.finegrained_fp8 import FP8Experts

    unexpected = set(report.unexpected_keys)
    scales = [name for name in report.missing_keys if name.endswith(SCALE) and pre_quantized]
    missing = [f"{name}, which is missing" for name in scales]
    for name in unexpected:
        of_codes = name.endswith(SCALE) and name.removesuffix(SCALE) not in unexpected
        if of_codes or isinstance(_owner(model, name), FP8Experts):
            missing.append(f"{name}, which has no place in its FP8 modules")
    if missing:
        why = f"from_pretrained would compute without {min(missing)}; {_LOADS}, or says why not"
        raise ValueError(printable(f"{model.name_or_path}: {why}"))


def _owner(model: Any, name: str) -> Any:
    """Return the innermost existing module on the path of a tensor's name."""
    module = model
    for part in name.split("."):
        if part not in module._modules:
            return module
        module = module._modules[part]
    return module


def _runs_experts(config: Any) -> bool:
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return any(getattr(part, "_experts_implementation", None) == NAME for part in parts)


def _is_lost(weight: StoredWeight) -> bool:
    """Return whether transformers' FP8 quantizer would not find the weight's scale, or would read E5M2 as E4M3."""
    if weight.scale is None or weight.kind == "fp8-e5m2":
        return True
    return not weight.shared and weight.scale.name.endswith(CHANNEL_SCALE)
