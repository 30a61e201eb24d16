"""transformers' from_pretrained of a checkpoint that does not exist yet, without data.

It tells which weights transformers would not find their modules or scales for. Importing it imports transformers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import FineGrainedFP8Config

from fp8moe.checkpoints.formats import DTYPES, Layout
from fp8moe.integrations.architecture import construction_lock

_PLAIN, _FP8 = "fp8moe_rehearsal", "fp8moe_fp8_rehearsal"


class _OnMeta:
    """Lets a quantizer work without a GPU and without memory, and tells which shapes do not fit.

    shapes: those of the model's state dict before tensors are loaded. Some versions of transformers check none.
    """

    shapes: dict[str, torch.Size]

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        super()._process_model_before_weight_loading(model, **options)
        self.shapes = {name: value.shape for name, value in model.state_dict().items()}

    def validate_environment(self, *arguments: Any, **options: Any) -> None:
        pass

    def update_device_map(self, device_map: Any) -> dict[str, str]:
        return {"": "meta"}


@register_quantizer(_PLAIN)
class _PlainRehearsal(_OnMeta, HfQuantizer):
    """Changes nothing."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


@register_quantizer(_FP8)
class _FP8Rehearsal(_OnMeta, FineGrainedFP8HfQuantizer):
    """Makes the FP8 modules of transformers."""

    def __init__(self, quantization_config: FineGrainedFP8Config, **options: Any):
        super().__init__(quantization_config, **options | {"pre_quantized": True})


for _method in (_PLAIN, _FP8):
    register_quantization_config(_method)(FineGrainedFP8Config)


def rehearse(model: Any, layout: Layout, quantization: Mapping[str, Any] | None) -> dict[str, str]:
    """What transformers says of a checkpoint with these tensors: "missing", "unexpected" or "mismatched", by name.

    model: of the same class and configuration; the names are those of its state dict. quantization: what config.json
    has of it, None for an unquantized checkpoint. Raises what transformers raises.
    """
    tensors = {name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta") for name, spec in layout.items()}
    method = {"quant_method": _PLAIN if quantization is None else _FP8}
    with construction_lock, _quiet():
        loaded, report = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=tensors,
            dtype=torch.get_default_dtype(),
            quantization_config=FineGrainedFP8Config(**(quantization or {}) | method),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    shapes = loaded.hf_quantizer.shapes
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    mismatched |= {name for name, value in loaded.state_dict().items() if value.shape != shapes[name]}
    found = {"missing": report["missing_keys"], "unexpected": report["unexpected_keys"], "mismatched": mismatched}
    return {name: kind for kind, names in found.items() for name in names}


@contextmanager
def _quiet() -> Iterator[None]:
    """Work without transformers' load report, which is about tensors without data, and its progress bar."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
