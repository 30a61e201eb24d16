"""Finds out, before anything is quantized, which weights of a checkpoint transformers can load in FP8.

transformers' from_pretrained is rehearsed with tensors on the meta device; its report tells which weights would lack
modules or scales. Importing this file imports transformers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import FineGrainedFP8Config

from fp8moe.hf.architecture import construction_lock, empty_model, locate, read_config, reason_of
from fp8moe.hf.experts import refusal
from fp8moe.hf.versions import Rehearsal
from fp8moe.layers.replaced import casts_to_weight
from fp8moe.quant.formats import BLOCK
from fp8moe.weights.names import GATE_UP, SCALE, parse
from fp8moe.weights.place import state_of
from fp8moe.weights.quantize import OutputPlan
from fp8moe.weights.source import DTYPES, CheckpointError
from fp8moe.weights.stored import StoredWeight

_EXPERTS = ".experts"  # suffix of the names of modules that transformers replaces with its FP8 experts


def fit_to_transformers(plan: OutputPlan, wanted: Mapping[str, StoredWeight]) -> None:
    """Limit a plan to weights that transformers can load in FP8, and add the fused experts in ``wanted``.

    wanted: tensors that may become FP8, by name. Fused experts that transformers renames when loading, such as
    Granite's, are written under their names in transformers' model: transformers loads these names too, whereas it
    would not rename the scales.

    If transformers cannot make the model, nothing is checked, and a note in the plan says so.

    Raises CheckpointError if transformers could not load what would be written.
    """
    try:
        fitting = _Fitting(plan)
    except ValueError as error:
        plan.notes.append(f"not checked against transformers: {error}")
        return
    fitting.add_renamed_experts(wanted)
    fitting.keep_what_has_no_fp8_form()
    fitting.keep_what_would_not_load()


class _Fitting:
    def __init__(self, plan: OutputPlan):
        self.plan = plan
        checkpoint = plan.weights.checkpoint
        self.directory = checkpoint.directory
        self.model = empty_model(read_config(checkpoint))
        self.modules = dict(self.model.named_modules())
        self.locations = locate(self.model, (weight.name for weight in plan.weights.stored))
        self.biased: set[str] = set()  # experts modules with biases, which transformers' FP8 experts lack
        try:
            self.known = _rehearse(self.model, plan.weights.stored, None)
        except Exception as error:
            raise ValueError(f"it cannot load {self.directory} ({reason_of(error)})") from error

    def add_renamed_experts(self, wanted: Mapping[str, StoredWeight]) -> None:
        taken = {*self.locations, *(name.text for name in self.plan.quantized.values())}
        for text in sorted(wanted.keys() - self.plan.quantized.keys()):
            location = self.locations[text]
            fused = location.name.projection is not None and location.name.expert is None
            if fused and location.converter is None and len(wanted[text].shape) == 3 and location.key not in taken:
                self.plan.quantized[text] = location.name

    def keep_what_has_no_fp8_form(self) -> None:
        """Keep weights unquantized unless the checkpoint stores them in the layout of a linear or fused experts."""
        state = state_of(self.model)
        uses = Counter(id(value) for value in state.values())
        in_float32 = self.model._get_dtype_plan(torch.float16)
        for text in sorted(self.plan.quantized):
            name, key, *_ = location = self.locations[text]
            if key not in state:
                continue  # transformers does not read this tensor
            module, _, parameter = key.rpartition(".")
            linear = type(self.modules[module]) is nn.Linear and parameter == "weight"
            experts = module.endswith(_EXPERTS) and name.projection is not None and state[key].dim() == 3
            if location.converter is not None:
                why = f"transformers converts it when it loads it ({location.steps}), but not its scales"
                self._keep(module, why)
            elif uses[id(state[key])] > 1:
                self._keep(module, "tied to another weight")
            elif any(f".{pattern}." in f".{key}." for pattern in in_float32):
                self._keep(module, "transformers keeps it in float32")
            elif not linear and not experts:
                self._keep(module, f"of class {type(self.modules[module]).__name__}, without an FP8 form")
            elif casts_to_weight(self.model, module):
                self._keep(module, "the model casts its input to the dtype of its weight")
            elif experts and f"{key}_bias" in state:
                reason = refusal(self.modules[module])
                if reason is not None:
                    self._keep(module, reason)
                else:
                    self.biased.add(module)
        if self.biased:
            self.plan.notes.append(
                f"{len(self.biased)} experts modules have biases: load_model loads them, transformers' from_pretrained "
                "has no FP8 experts with biases, nor has vLLM"
            )

    def keep_what_would_not_load(self) -> None:
        """Keep more modules unquantized until transformers would report no missing, unexpected or misshapen tensors."""
        while new := self._complaints():
            before = len(self.plan.unconverted)
            for key, kind in sorted(new.items()):
                module = self._module_of(key)
                if module is not None:
                    self._keep(module, f"transformers would call its {key.rpartition('.')[2]} {kind}")
            if len(self.plan.unconverted) == before:
                self._refuse(f"{key}: {kind} when transformers loads the result" for key, kind in sorted(new.items()))

    def _complaints(self) -> dict[str, str]:
        """Return the problems that transformers would report for the output but not for the source.

        The result maps the key of a tensor to the kind of problem.
        """
        without_biases = {
            text: name for text, name in self.plan.quantized.items() if self._module(text) not in self.biased
        }
        plan = replace(self.plan, quantized=without_biases, unconverted=self.plan.unconverted | self.biased)
        outputs = plan.outputs()
        try:
            report = _rehearse(self.model, outputs, plan.quantization_config(outputs))
        except Exception as error:
            experts = {name for name in self.modules if name.endswith(_EXPERTS)} - plan.unconverted
            if not experts:
                self._refuse([f"transformers cannot load this model with FP8 weights ({reason_of(error)})"])
            for module in experts:
                self._keep(module, f"transformers cannot make FP8 experts of it ({reason_of(error)})")
            return self._complaints()
        new = {key: kind for key, kind in report.items() if key not in self.known and _weight(key) not in self.known}
        without_room = {key for key, kind in new.items() if kind == "mismatched" and self._has_half_blocks(key)}
        if without_room == new.keys() != set():
            self.plan.notes.append(
                f"{len(without_room)} experts modules have an intermediate size that is no multiple of {BLOCK}: "
                "load_model loads them, transformers' from_pretrained has no room for their scales"
            )
        return {key: kind for key, kind in new.items() if key not in without_room}

    def _has_half_blocks(self, key: str) -> bool:
        """Return whether `key` is the scale of a gate_up_proj in which gate and up rows would share a scale block.

        transformers counts blocks over gate_up_proj as a whole.
        """
        weight = self.model.get_parameter(_weight(key)) if key.endswith(GATE_UP + SCALE) else None
        return weight is not None and weight.shape[1] // 2 % BLOCK != 0

    def _module(self, text: str) -> str:
        """Return the path of the module that a tensor of the source checkpoint goes into."""
        return self.locations[text].key.rpartition(".")[0]

    def _module_of(self, key: str) -> str | None:
        """Return the path of the linear or experts module that a key in transformers' report belongs to, or None.

        The key may be a name in the model or, if transformers has not renamed it, in the checkpoint.
        """
        if _weight(key) in self.locations:
            key = self.locations[_weight(key)].key
        while key:
            key = key.rpartition(".")[0]
            if key.endswith(_EXPERTS) or isinstance(self.modules.get(key), nn.Linear):
                return key
        return None

    def _keep(self, module: str, reason: str) -> None:
        names = {text for text in self.plan.quantized if self._module(text) == module}
        if names:
            self.plan.kept[module] = reason
        for text in names:
            del self.plan.quantized[text]
        self.plan.unconverted.add(module)

    def _refuse(self, problems: Iterable[str]) -> NoReturn:
        raise CheckpointError(f"cannot quantize {self.directory}", problems)


def _weight(key: str) -> str:
    """Return the name of the weight that a scale belongs to; return a key that names no scale unchanged.

    key: a key in transformers' report.
    """
    return parse(key).weight


_PLAIN, _FP8 = "fp8moe_rehearsal", "fp8moe_fp8_rehearsal"


@register_quantizer(_PLAIN)
class _PlainRehearsal(Rehearsal, HfQuantizer):
    """A quantizer that changes nothing, to rehearse loading an unquantized checkpoint."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


@register_quantizer(_FP8)
class _FP8Rehearsal(Rehearsal, FineGrainedFP8HfQuantizer):
    """A quantizer that makes transformers' FP8 modules, to rehearse loading an FP8 checkpoint."""

    def __init__(self, quantization_config: FineGrainedFP8Config, **kwargs: Any):
        super().__init__(quantization_config, **kwargs | {"pre_quantized": True})


for _method in (_PLAIN, _FP8):
    register_quantization_config(_method)(FineGrainedFP8Config)


def _rehearse(model: Any, weights: Iterable[StoredWeight], quantization: Mapping[str, Any] | None) -> dict[str, str]:
    """Load weights without data; return transformers' report, which says what is wrong with tensors.

    The report maps the name of a tensor to "missing", "unexpected" or "mismatched".

    model: a model with the class, configuration and tensor names of the model to load. quantization: the
    quantization_config in config.json, None for an unquantized checkpoint. Errors of transformers are passed on.
    """
    tensors = {
        name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
        for weight in weights
        for name, spec in weight.specs().items()
    }
    method = {"quant_method": _PLAIN if quantization is None else _FP8}
    with construction_lock, _quiet():
        loaded, report = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=tensors,
            dtype=torch.float32,
            quantization_config=FineGrainedFP8Config(**(quantization or {}) | method),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = {name for name, *_ in report["mismatched_keys"]} | loaded.hf_quantizer.changed_shapes(loaded)
    kinds = {"missing": report["missing_keys"], "unexpected": report["unexpected_keys"], "mismatched": mismatched}
    return {name: kind for kind, names in kinds.items() for name in names}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' load report and progress bar, which would be about tensors without data."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
