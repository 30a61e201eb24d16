"""Makes from_pretrained refuse checkpoints whose scales it would lose, or which would not run on fp8moe's kernels."""

import functools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8moe.hf.architecture import parts_of, predicted_layers
from fp8moe.hf.experts import NAME
from fp8moe.hf.versions import Rehearsal
from fp8moe.weights.names import CHANNEL_SCALE, SCALE, is_unused_scale
from fp8moe.weights.place import EXTRA
from fp8moe.weights.source import CheckpointError, printable
from fp8moe.weights.stored import StoredWeight, open_weights

_DEQUANTIZED = {"compressed-tensors": ("fp8-tensor", "fp8-channel", "mxfp4", "int4")}  # NVFP4 would lose a scale
"""Maps quantization methods to the kinds of weights that transformers dequantizes correctly.

It does if experts are separate linears; fp8moe then runs the experts on an FP8 copy.
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

    transformers' FP8 quantizer takes scales with other names for unexpected keys, and leaves the scales of its own
    modules uninitialized. Its FP8 experts have no biases and no norms. transformers' MXFP4 quantizer makes experts that
    run on Triton kernels.
    """

    @functools.wraps(preprocess)
    def preprocess_model(self, model, *args, **kwargs):
        if kwargs.get("checkpoint_files"):
            _check(model, kwargs["checkpoint_files"], self)
        return preprocess(self, model, *args, **kwargs)

    return preprocess_model


def check_loaded(finalize):
    """Wrap the end of loading: refuse a model for fp8moe if its tensors and the checkpoint's do not match."""

    @functools.wraps(finalize)
    def _finalize_model_loading(model, load_config, loading_info, *args, **kwargs):
        try:
            finalize(model, load_config, loading_info, *args, **kwargs)
        except RuntimeError:  # the error names no tensors: shapes are wrong, or FP8 weights cannot be initialized
            loading_info.missing_keys -= getattr(model, "all_tied_weights_keys", {}).keys()
            model._adjust_missing_and_unexpected_keys(loading_info)
            _check_loaded(model, load_config, loading_info)
            raise
        _check_loaded(model, load_config, loading_info)
        return loading_info

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
        return  # fp8moe cannot read the files: transformers loads them, or reports what is wrong
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


def _check_loaded(model: Any, load_config: Any, report: Any) -> None:
    """Raise CheckpointError, naming the tensors, if tensors are missing, are extra or have another shape.

    If the experts do not run on fp8moe, only transformers' FP8 modules are checked, as their linears run on fp8moe.
    transformers does not initialize missing tensors of FP8 modules: they would have arbitrary values.
    """
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    quantizer = load_config.hf_quantizer
    if isinstance(quantizer, Rehearsal):  # the caller of the rehearsal checks the report
        return
    # If transformers quantizes the weights during this load, its report lists the new scales as "missing".
    made = quantizer is not None and not quantizer.pre_quantized
    missing = {name for name in report.missing_keys if not (made and name.endswith(SCALE))}
    if not _runs_experts(model.config):
        missing = {name for name in missing if isinstance(_owner(model, name), FP8Experts | FP8Linear)}
        problems = [f"{name}: missing" for name in sorted(missing)]
    else:
        if isinstance(quantizer, FineGrainedFP8HfQuantizer):
            _check_scales(model, missing, set(report.unexpected_keys))
        problems = [*_problems(model, load_config, report, missing)]
    if problems:
        raise CheckpointError(f"cannot load {model.name_or_path} for fp8moe", problems)


def _problems(model: Any, load_config: Any, report: Any, missing: set[str]) -> Iterator[str]:
    """Yield a line for each tensor that is missing or extra in the checkpoint, or has another shape there.

    For a model without a head, the head's tensors in the checkpoint do not count as extra.
    """
    left_out, prefix = predicted_layers(model.config), f"{model.base_model_prefix}."
    headless = model.base_model is model
    for name, why in sorted(report.conversion_errors.items()):
        yield f"{name}: transformers cannot make it of the checkpoint's tensors ({why.strip().splitlines()[-1]})"
    yield from (f"{name}: missing" for name in sorted(missing - report.conversion_errors.keys()))
    if not load_config.ignore_mismatched_sizes:
        for name, shape, expected in sorted(report.mismatched_keys):
            yield f"{name}: shape {tuple(shape)}, expected {tuple(expected)}"
    for name in sorted(report.unexpected_keys):
        known = is_unused_scale(name) or any(fnmatchcase(name, pattern) for pattern in left_out)
        if not known and not (headless and not name.startswith(prefix)):
            yield f"{name}: {EXTRA}"


def _check_scales(model: Any, missing: set[str], unexpected: set[str]) -> None:
    """Raise ValueError if FP8 weights were loaded without their scales, or if FP8 experts did not get all tensors."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    scales = [name for name in missing if name.endswith(SCALE) and name.removesuffix(SCALE) not in missing]
    without = [f"{name}, which is missing" for name in scales]
    for name in unexpected:
        of_codes = name.endswith(SCALE) and name.removesuffix(SCALE) not in unexpected
        if of_codes or isinstance(_owner(model, name), FP8Experts):
            without.append(f"{name}, which has no place in its FP8 modules")
    if without:
        why = f"from_pretrained would compute without {min(without)}; {_LOADS}, or says why not"
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
    return any(getattr(part, "_experts_implementation", None) == NAME for part in parts_of(config))


def _is_lost(weight: StoredWeight) -> bool:
    """Return whether transformers' FP8 quantizer would not find the weight's scale, or would read E5M2 as E4M3."""
    if weight.scale is None or weight.kind == "fp8-e5m2":
        return True
    return not weight.shared and weight.scale.name.endswith(CHANNEL_SCALE)
