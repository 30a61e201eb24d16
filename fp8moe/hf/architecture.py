"""Makes transformers' model for a checkpoint, and maps tensors of a checkpoint to tensors of the model.

`fp8moe.weights` calls expert_patterns, stored_names, locator, convert, ignored_layers and refresh through
`fp8moe.weights.place.provider`.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.hf import experts, linears
from fp8moe.hf.fused import latent_attention
from fp8moe.hf.versions import conversions_to_save
from fp8moe.weights.names import DOWN, GATE, GATE_UP, SCALE, UP, Location, Name, one_by_one, parse
from fp8moe.weights.place import class_of, state_of
from fp8moe.weights.source import GENERATION_CONFIG, Checkpoint, count_problems, read_json, shown

# While transformers makes a model, it changes PyTorch's default dtype and the tying of weights, for all threads.
# Without this lock, a model that another thread makes meanwhile would get the wrong dtype, or untied weights.
construction_lock = threading.RLock()


_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def read_config(checkpoint: Checkpoint) -> Any:
    """Read a checkpoint's config.json with transformers' AutoConfig.

    Raises ValueError, with transformers' reason, if the file cannot be read, and if its numbers of layers or experts do
    not fit the checkpoint's tensors.
    """
    from transformers import AutoConfig

    for problem in count_problems(checkpoint):
        raise ValueError(problem)
    try:
        return AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken config.json makes transformers raise errors of any type
        raise ValueError(f"config.json: transformers cannot read it ({reason_of(error)})") from error


def read_generation_config(checkpoint: Checkpoint) -> Any:
    """Read a checkpoint's generation config with transformers; return None if there is no such file.

    Raises ValueError if the file cannot be read.
    """
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


def empty_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Make transformers' model for a configuration, in this dtype, on the meta device.

    ``architectures`` names the model's class, for any task. AutoModelForCausalLM or AutoModelForImageTextToText chooses
    the class if ``architectures`` names no class, or names a language model that transformers does not have.

    Raises ValueError, with the reason, if transformers cannot make the model, if ``architectures`` names a model of
    another kind that transformers does not have, or if transformers would download code for the attention.
    """
    import transformers

    fusions = getattr(config, "fusion_config", None)
    if not isinstance(fusions, dict | None):
        raise ValueError(f"config.json: fusion_config is {shown(fusions)}, expected an object")
    for part in parts_of(config):
        attention = getattr(part, "_attn_implementation", None)
        if isinstance(attention, str) and "/" in attention:
            raise ValueError(f"config.json: attn_implementation is {shown(attention)}, code of another repository")
    names = config.architectures
    name = names[0] if isinstance(names, list) and names else names
    named = getattr(transformers, name, None) if isinstance(name, str) else None
    known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if name and not known and not f"{name}".endswith(_LANGUAGE_MODELS):
        raise ValueError(f"config.json: transformers cannot make the model (it has no class {shown(name)})")
    try:
        if known:
            make = named._from_config
        elif type(config) in transformers.AutoModelForCausalLM._model_mapping:
            make = transformers.AutoModelForCausalLM.from_config
        else:
            make = transformers.AutoModelForImageTextToText.from_config
        with construction_lock, torch.device("meta"):
            return make(config, dtype=dtype).eval()
    except Exception as error:
        raise ValueError(f"config.json: transformers cannot make the model ({reason_of(error)})") from error


def locator(model: Any) -> Callable[[Name], Location]:
    """Return a function that maps the name of a checkpoint tensor to its `Location` in the model.

    In a model of transformers, the location is where `from_pretrained` puts the tensor. In any other model, a tensor
    keeps its name.
    """
    if not is_of_transformers(model):
        return lambda name: Location(name, name.text)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(model)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    renamings = [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)]
    judged = [(each, _stacked(each)) for each in converters]
    by_pattern = {pattern: pair for pair in judged for pattern in pair[0].source_patterns}
    state, prefix = state_of(model), model.base_model_prefix

    def located(name: Name) -> Location:
        key, pattern = rename_source_key(name.text, renamings, converters, prefix, state)
        if key not in state and name.text in state:
            return Location(name, name.text)
        if pattern is None:
            return Location(name if key == name.text else parse(key), key)
        converter, stacked = by_pattern[pattern]
        if stacked is not None and (stacked == GATE_UP) == key.endswith(f".{GATE_UP}"):
            renamed = rename_source_key(name.text, renamings, [])[0]
            renamed = name if renamed == name.text else parse(renamed)
            if renamed.expert is not None:
                module = key.rpartition(".")[0]
                text = f"{module}.{renamed.expert}.{renamed.projection}.weight"
                return Location(renamed._replace(text=text, module=module), key)
        return Location(parse(key), key, converter, pattern)

    return located


def locate(model: Any, names: Iterable[Name]) -> dict[str, Location]:
    """Return the `Location` in the model of each tensor of a checkpoint, by its name."""
    from transformers.core_model_loading import dot_natural_key

    located, names = locator(model), sorted(names, key=lambda name: dot_natural_key(name.text))
    return {name.text: located(name) for name in names}  # in sorted order, as a location may depend on earlier names


def _stacked(converter: Any) -> str | None:
    """Return which projection of fused experts a converter makes; None if it does more than stack the matrices."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    sources = [parse(pattern.replace("\\", "").replace("*", "0")) for pattern in converter.source_patterns]
    projections = [source.projection if source.expert is not None else None for source in sources]
    steps = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if projections == [GATE, UP] and steps == [(MergeModulelist, 0), (Concatenate, 1)]:
        return GATE_UP
    return projections[0] if projections in ([UP], [DOWN]) and steps == [(MergeModulelist, 0)] else None


def convert(model: Any, sources: Mapping[str, Location], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply a WeightConverter to all of its source tensors; return the resulting entries of the model's state dict."""
    from transformers.core_model_loading import dot_natural_key

    first = next(iter(sources.values()))
    converter = deepcopy(first.converter)
    for name in sorted(sources, key=dot_natural_key):
        converter.add_tensor(first.key, name, sources[name].pattern, values[name])
    made = converter.convert(first.key, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def parts_of(config: Any) -> list[Any]:
    """List a configuration and its sub-configurations."""
    found = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(part for part in found if part is not None)]


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether this is a model of transformers, without importing transformers if nothing else has."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def expert_patterns(model: nn.Module) -> Callable[[Name], tuple[str, ...]]:
    """Return a function that names the matrices of a fused weight of experts as the model's checkpoints hold them.

    The function returns the matrices' names in order, with * for the expert, before `stored_names` renames them; no
    names if the checkpoints hold the weight fused. The names are those in transformers' conversion mapping; for models
    of other libraries, DeepSeek's.
    """
    if not is_of_transformers(model) or not class_of(model).__module__.startswith("transformers."):
        return one_by_one
    from transformers.core_model_loading import WeightConverter

    converters = [each for each in conversions_to_save(model) if isinstance(each, WeightConverter)]
    pairs = [(each.reverse_transform(), _stacked(each)) for each in reversed(converters)]

    def patterns(name: Name) -> tuple[str, ...]:
        for converter, stacked in pairs:
            first, matched = converter.rename_source_key(name.text)
            if matched is not None:
                targets = converter.target_patterns if stacked is not None else ()
                return tuple(first.replace(targets[0], target, 1) for target in targets)
        return ()

    return patterns


def stored_names(model: nn.Module, names: Mapping[str, Iterable[Name]]) -> dict[str, str]:
    """Return the names in the model's checkpoints by names in the model, with transformers' renamings undone.

    names: maps each key of the state dict to the names of what it is stored as: its own, or those of single experts. A
    name stays as it is if it would not be read back otherwise, as of fused experts whose scales are not renamed.

    Raises ValueError for a tensor that would not be read back into its place.
    """
    if not is_of_transformers(model):
        return {name.text: name.text for of_key in names.values() for name in of_key}
    from transformers.core_model_loading import WeightRenaming, dot_natural_key

    renamings = [each.reverse_transform() for each in reversed(conversions_to_save(model))]
    renamings = [each for each in renamings if isinstance(each, WeightRenaming)]
    wanted = {name.text: (name, key) for key, of_key in names.items() for name in of_key}
    stored = {}
    for text in sorted(wanted, key=dot_natural_key):  # a renaming may depend on earlier names
        stored[text] = text
        for renaming in renamings:
            stored[text] = renaming.rename_source_key(stored[text])[0]
    stored |= {text: text for text in _misread(model, wanted, stored)}
    if lost := _misread(model, wanted, stored):
        raise ValueError(f"model: {lost[0]} cannot be stored: no name is known that is read back as this tensor")
    return stored


def _misread(model: nn.Module, wanted: Mapping[str, tuple[Name, str]], stored: Mapping[str, str]) -> list[str]:
    """List the names in the model whose tensors would not be read back from the names in ``stored``.

    wanted: maps names in the model to the parsed names and the keys of the state dict.
    """
    state = state_of(model)
    ends = {
        text: ("", SCALE) if name.expert is None and key + SCALE in state else ("",)
        for text, (name, key) in wanted.items()
    }
    found = locate(model, [parse(stored[text] + end) for text in wanted for end in ends[text]])
    wrong = []
    for text, (name, key) in wanted.items():
        own = found[stored[text]]
        if name.expert is None or text == key:
            right = all(found[stored[text] + end].key == key + end for end in ends[text])
        else:
            part = own.name.module, own.name.projection, own.name.expert
            right = part == (key.rpartition(".")[0], name.projection, name.expert)
        # A converter whose pattern is the model's own name leaves a tensor of the model's shape as it is.
        if not right or (own.converter is not None and stored[text] != text):
            wrong.append(text)
    return wrong


def reason_of(error: Exception) -> str:
    """Return an error's type and the first line of its message; transformers' messages may have many lines.

    A line that ends with a colon goes on with the next line.
    """
    first, *more = [line.strip() for line in str(error).strip().splitlines()] or [""]
    while first.endswith(":") and more:
        first = f"{first} {more.pop(0)}"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def ignored_layers(model: nn.Module) -> tuple[str, ...]:
    """Return name patterns of the multi-token prediction layers in a model's checkpoint, which transformers ignores."""
    return predicted_layers(model.config) if is_of_transformers(model) else ()


def predicted_layers(config: Any) -> tuple[str, ...]:
    """Return name patterns of the multi-token prediction layers, whose numbers follow those of all other layers.

    Raises ValueError if the configuration's number of these layers is not an integer.
    """
    config = config.get_text_config(decoder=True)
    count, first = getattr(config, "num_nextn_predict_layers", None) or 0, getattr(config, "num_hidden_layers", 0)
    if not isinstance(count, int):
        raise ValueError(f"config.json: num_nextn_predict_layers is {shown(count)}, expected an integer")
    return tuple(f"model.layers.{first + index}.*" for index in range(count))


def refresh(module: nn.Module) -> None:
    """Update all cached tensors that were computed from a module's weights."""
    for kind in (linears, latent_attention, experts):
        kind.refresh(module)
