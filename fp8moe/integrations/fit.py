"""Which weights of a checkpoint transformers can have in FP8, found out before anything is quantized."""

import importlib.util
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import NoReturn

import torch
from torch import nn

from fp8moe.checkpoints.expert_names import GATE_UP, parse_fused
from fp8moe.checkpoints.formats import SCALE, Layout, weight_of
from fp8moe.checkpoints.match import state_of
from fp8moe.checkpoints.quantize import Fit, OutputPlan
from fp8moe.checkpoints.read import CheckpointError
from fp8moe.integrations.architecture import empty_model, locate, read_config, reason_of
from fp8moe.quant.formats import BLOCK

_EXPERTS = ".experts"  # the end of the names of modules that transformers makes its FP8 experts of


def fit_to_transformers(plan: OutputPlan, wanted: Set[str]) -> Fit:
    """The part of a plan that transformers can have in FP8, and what of ``wanted`` it has as fused experts.

    wanted: tensors that may become FP8. Fused experts that transformers renames, such as Granite's, get the names of
    its model, which it reads, too: it would not rename their scales.

    Where transformers is missing, or cannot make the model, nothing is checked, and a note says so.

    Raises CheckpointError if transformers could not load what would be written.
    """
    if importlib.util.find_spec("transformers") is None:
        return Fit(dict(plan.quantized), notes=["not checked against transformers, which is not installed"])
    if "model_type" not in plan.source.config:
        return Fit(dict(plan.quantized), notes=["not checked against transformers: config.json has no model_type"])
    try:
        fitting = _Fitting(plan)
    except ValueError as error:
        return Fit(dict(plan.quantized), notes=[f"not checked against transformers: {error}"])
    fitting.add_renamed_experts(wanted)
    fitting.keep_what_has_no_fp8_form()
    fitting.keep_what_would_not_load()
    return fitting.fit


class _Fitting:
    def __init__(self, plan: OutputPlan):
        self.plan = plan
        self.source = plan.source
        self.fit = Fit(dict(plan.quantized))
        self.model = empty_model(read_config(plan.source))
        self.modules = dict(self.model.named_modules())
        self.locations = locate(self.model, plan.source.tensors)
        unquantized = {name: info.spec for name, info in plan.source.tensors.items()}
        try:
            self.known = self._report(unquantized, None)
        except Exception as error:
            raise ValueError(f"it cannot load {plan.source.directory} ({reason_of(error)})") from error

    def add_renamed_experts(self, wanted: Set[str]) -> None:
        for name in sorted(wanted - self.fit.quantized.keys()):
            location = self.locations[name]
            fused = location.converter is None and parse_fused(location.key, self.source.tensors[name].shape)
            if fused and location.key not in {*self.source.tensors, *self.fit.quantized.values()}:
                self.fit.quantized[name] = location.key

    def keep_what_has_no_fp8_form(self) -> None:
        """Keep weights unquantized that are not, as they are in the checkpoint, those of a linear or of experts."""
        state = state_of(self.model)
        uses = Counter(id(value) for value in state.values())
        in_float32 = self.model._get_dtype_plan(torch.float16)
        for name in sorted(self.fit.quantized):
            key, converter = self.locations[name].key, self.locations[name].converter
            if key not in state:
                continue  # transformers does not read it
            module, _, parameter = key.rpartition(".")
            linear = type(self.modules[module]) is nn.Linear and parameter == "weight"
            experts = module.endswith(_EXPERTS) and parse_fused(key, tuple(state[key].shape)) is not None
            if converter is not None:
                steps = ", ".join(type(step).__name__ for step in converter.operations)
                self._keep(module, f"transformers converts it when it loads it ({steps}), but not its scales")
            elif uses[id(state[key])] > 1:
                self._keep(module, "tied to another weight")
            elif any(f".{pattern}." in f".{key}." for pattern in in_float32):
                self._keep(module, "transformers keeps it in float32")
            elif not linear and not experts:
                self._keep(module, f"of class {type(self.modules[module]).__name__}, without an FP8 form")

    def keep_what_would_not_load(self) -> None:
        """Keep modules unquantized as long as transformers would find anything missing, left over or misshapen."""
        while new := self._complaints():
            before = len(self.fit.unconverted)
            for key, kind in sorted(new.items()):
                module = self._module_of(key)
                if module is not None:
                    self._keep(module, f"transformers would call its {key.rpartition('.')[2]} {kind}")
            if len(self.fit.unconverted) == before:
                self._refuse(f"{key}: {kind} when transformers loads the result" for key, kind in sorted(new.items()))

    def _complaints(self) -> dict[str, str]:
        """What transformers would say of the result that it does not say of the source."""
        plan = replace(self.plan, quantized=self.fit.quantized, unconverted=self.fit.unconverted)
        try:
            report = self._report(plan.layout, plan.quantization_config)
        except Exception as error:
            experts = {name for name in self.modules if name.endswith(_EXPERTS)} - self.fit.unconverted
            if not experts:
                self._refuse([f"transformers cannot load this model with FP8 weights ({reason_of(error)})"])
            for module in experts:
                self._keep(module, f"transformers cannot make FP8 experts of it ({reason_of(error)})")
            return self._complaints()
        new = {key: kind for key, kind in report.items() if key not in self.known and weight_of(key) not in self.known}
        without_room = {key for key, kind in new.items() if kind == "mismatched" and self._has_half_blocks(key)}
        if without_room == new.keys() != set():
            self.fit.notes.append(
                f"{len(without_room)} experts modules have an intermediate size that is no multiple of {BLOCK}: "
                "load_model loads them, transformers' from_pretrained has no room for their scales"
            )
        return {key: kind for key, kind in new.items() if key not in without_room}

    def _report(self, layout: Layout, quantization: dict | None) -> dict[str, str]:
        from fp8moe.integrations.rehearsal import rehearse

        return rehearse(self.model, layout, quantization)

    def _has_half_blocks(self, key: str) -> bool:
        """Whether this is the scale of gate and up, with a block of transformers' that would have rows of both."""
        weight = self.model.get_parameter(key.removesuffix(SCALE)) if key.endswith(GATE_UP + SCALE) else None
        return weight is not None and weight.shape[1] // 2 % BLOCK != 0

    def _module_of(self, key: str) -> str | None:
        """The linear or experts module that a key of transformers' report is about, also one that it did not rename."""
        name = weight_of(key)
        if name in self.locations:
            key = self.locations[name].key
        while key:
            key = key.rpartition(".")[0]
            if key.endswith(_EXPERTS) or isinstance(self.modules.get(key), nn.Linear):
                return key
        return None

    def _keep(self, module: str, reason: str) -> None:
        names = {name for name in self.fit.quantized if self.locations[name].key.rpartition(".")[0] == module}
        if names:
            self.fit.kept[module] = reason
        self.fit.quantized = {name: stored for name, stored in self.fit.quantized.items() if name not in names}
        self.fit.unconverted.add(module)

    def _refuse(self, problems: Iterable[str]) -> NoReturn:
        raise CheckpointError(f"cannot quantize {self.source.directory}", problems)
