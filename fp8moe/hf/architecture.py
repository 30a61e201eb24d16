"""What transformers says of a checkpoint: its model, and how tensors of the one become those of the other."""

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.weights.expert_names import (
    DOWN,
    GATE,
    GATE_UP,
    UP,
    W_BLOCK,
    W_NAMES,
    ExpertNames,
    parse_expert,
)
from fp8moe.weights.match import state_of
from fp8moe.weights.read import GENERATION_CONFIG, Checkpoint, count_problems, read_json
from fp8moe.weights.sharded import class_of

# While transformers makes a model, it changes PyTorch's default dtype and how its models tie weights, for all threads.
# Without this lock, a model that is made meanwhile gets the other one's dtype, or weights that are not tied.
construction_lock = threading.RLock()


_ONE_EXPERT = "experts.*."  # in transformers' patterns of names


@dataclass(frozen=True)
class Location:
    """Where transformers puts a tensor.

    name: what the model calls the tensor; one expert's with its number: mlp.experts.7.gate_proj.weight.
    key: in the state dict, of what it becomes, or a part of. converter, pattern: transformers' WeightConverter where it
    takes more than a name, or the place in a fused parameter, and which of the converter's sources this is.
    """

    name: str
    key: str
    converter: Any = None
    pattern: str | None = None


def read_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration of a checkpoint.

    Raises ValueError, with transformers' reason, if there is none, and for more layers or experts than fit the tensors.
    """
    from transformers import AutoConfig

    for problem in count_problems(checkpoint):
        raise ValueError(problem)
    try:
        return AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken config.json makes transformers raise anything
        raise ValueError(f"config.json: transformers cannot read it ({reason_of(error)})") from error


def read_generation_config(checkpoint: Checkpoint) -> Any:
    """transformers' generation settings of a checkpoint, None without any. Raises ValueError if they cannot be read."""
    from transformers import GenerationConfig

    path = checkpoint.directory / GENERATION_CONFIG
    if not os.path.lexists(path):
        return None
    problems: list[str] = []
    read_json(path, problems)
    for problem in problems:
        raise ValueError(problem)
    try:
        return GenerationConfig.from_pretrained(checkpoint.directory, local_files_only=True)
    except Exception as error:
        raise ValueError(f"{GENERATION_CONFIG}: transformers cannot read it ({reason_of(error)})") from error


def empty_model(config: Any) -> Any:
    """transformers' language model of a configuration, on the meta device.

    Its class is the one that ``architectures`` names, if that generates; otherwise that of AutoModelForCausalLM or
    AutoModelForImageTextToText. Its dtype is PyTorch's default. Raises ValueError, with transformers' reason, if it
    cannot make one.
    """
    import transformers

    try:
        named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        if isinstance(named, type) and issubclass(named, transformers.GenerationMixin):
            make = named._from_config
        elif type(config) in transformers.AutoModelForCausalLM._model_mapping:
            make = transformers.AutoModelForCausalLM.from_config
        else:
            make = transformers.AutoModelForImageTextToText.from_config
        with construction_lock, torch.device("meta"):
            return make(config, dtype=torch.get_default_dtype()).eval()
    except Exception as error:
        raise ValueError(f"config.json: transformers cannot make the model ({reason_of(error)})") from error


class Locator:
    """Tells where a tensor of a checkpoint goes in a model of transformers, in the manner of its from_pretrained."""

    def __init__(self, model: Any):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        conversions = get_model_conversion_mapping(model)
        self._converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        self._renamings = [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._state = state_of(model)
        self._prefix = model.base_model_prefix

    def locate(self, name: str) -> Location:
        from transformers.core_model_loading import rename_source_key

        key, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        expert = parse_expert(rename_source_key(name, self._renamings, [])[0])
        if key not in self._state and name in self._state:
            return Location(name, name)
        if pattern is None:
            return Location(key, key)
        if expert is not None and _merges(self._by_pattern[pattern], key):
            own_name = f"{key.rpartition('.')[0]}.{expert.expert}.{expert.projection}.weight"
            return Location(own_name, key)
        return Location(key, key, self._by_pattern[pattern], pattern)


def locate(model: Any, names: Iterable[str]) -> dict[str, Location]:
    """Where each tensor of a checkpoint goes in this model."""
    from transformers.core_model_loading import dot_natural_key

    locator = Locator(model)
    return {name: locator.locate(name) for name in sorted(names, key=dot_natural_key)}  # some depend on those before


def _merges(converter: Any, key: str) -> bool:
    """Whether it only stacks the experts' matrices, those of gate above those of up."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    sources = [parse_expert(pattern.replace("\\", "").replace("*", "0")) for pattern in converter.source_patterns]
    projections = [source and source.projection for source in sources]
    steps = [(type(operation), operation.dim) for operation in converter.operations if hasattr(operation, "dim")]
    if len(steps) < len(converter.operations):
        return False
    if key.endswith(f".{GATE_UP}"):
        return projections == [GATE, UP] and steps == [(MergeModulelist, 0), (Concatenate, 1)]
    return projections in ([UP], [DOWN]) and steps == [(MergeModulelist, 0)]


def convert(model: Any, sources: Mapping[str, Location], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a WeightConverter makes of all of its sources: a part of the model's state dict."""
    from transformers.core_model_loading import dot_natural_key

    first = next(iter(sources.values()))
    converter = deepcopy(first.converter)
    for name in sorted(sources, key=dot_natural_key):
        converter.add_tensor(first.key, name, sources[name].pattern, values[name])
    made = converter.convert(first.key, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def is_of_transformers(model: nn.Module) -> bool:
    """Whether this is a model of transformers, which is imported where there is one."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def find_expert_names(model: nn.Module) -> ExpertNames | None:
    """DeepSeek's names, or for transformers' own models what its registry says; None if it says fused experts."""
    if not is_of_transformers(model) or not class_of(model).__module__.startswith("transformers."):
        return ExpertNames()
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    patterns = [pattern.replace("\\.", ".") for conversion in conversions for pattern in conversion.source_patterns]
    projections = {
        pattern.partition(_ONE_EXPERT)[2].removesuffix(".weight") for pattern in patterns if _ONE_EXPERT in pattern
    }
    if projections and projections <= W_NAMES.keys():
        return ExpertNames()
    if projections and projections <= set(W_NAMES.values()):
        return ExpertNames(W_NAMES, w_block=W_BLOCK in patterns)
    return None


def reason_of(error: Exception) -> str:
    """The first line of an error of transformers, which may have many."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
