"""load_model: a transformers model with its FP8 weights as they are, on a CPU too.

Checkpoint and model are matched by the headers of the files; tensors are read when transformers asks for them.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from types import EllipsisType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fp8moe.hf.architecture import (
    Location,
    construction_lock,
    convert,
    empty_model,
    locate,
    read_config,
    read_generation_config,
)
from fp8moe.hf.versions import conversions_to_save
from fp8moe.layers.replaced import as_patterns, casts_to_weight
from fp8moe.weights.as_blocks import as_blocks, dequantized, inexact_weights
from fp8moe.weights.find_format import QuantizedWeight
from fp8moe.weights.formats import (
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    FP8,
    SCALE,
    TensorSpec,
    quantization_config,
    scale_name,
    scale_of,
    weight_of,
)
from fp8moe.weights.load import copy_tensor, ignored_names, warn_of_unused
from fp8moe.weights.match import TIED, LoadPlan, find_destination, plan_load, state_of, ties
from fp8moe.weights.read import Checkpoint, CheckpointError, TensorInfo, TensorReader, open_checkpoint
from fp8moe.weights.untrusted import printable


def load_model(
    directory: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    ignore: Iterable[str] = (),
) -> Any:
    """The language model of a checkpoint of any format that `find_format` says loads, with its weights in FP8.

    transformers itself turns FP8 weights back into bfloat16 where there is no GPU. Here every linear and every experts
    module whose weights are FP8 in the checkpoint becomes an `FP8Linear` or a `GroupedExperts`, and the rest stays
    transformers' own, which also makes the model: checkpoints may have any names and layouts that it converts. Nothing
    is allocated twice: parameters get memory when their tensors are read.

    directory: config.json and safetensors files; read without a network. What is not in blocks of 128x128 becomes so
        while it is read, exactly or not at all. Linears of a class of their own (DeepSeek-V4's wo_a), those to whose
        weight's dtype the model casts their input (Switch's wo), and those whose weight transformers puts together of
        several (MiniMax-M3's shared experts) or takes from a larger one, get bfloat16.
    dtype: of everything that is not FP8, and of the activations; "auto" or None for what config.json says, else what
        the first unquantized tensor has.
    device: where the model is to be.
    ignore: fnmatch patterns of tensors in the checkpoint that are not wanted.
    Returns the model in eval mode. Its quantization_config says what it holds, and so does what save_pretrained writes;
    with a scale for each output channel save_pretrained raises ValueError: save_fp8_checkpoint stores it. Warns
    (UserWarning) where nothing in the model is FP8.

    For a moment transformers changes PyTorch's default dtype, for all threads, and the way in which models of its own
    tie weights. Modules that other threads make then are otherwise what they always are.

    Raises CheckpointError (a ValueError), before any weight is read, listing what is missing, extra or misshapen, or
    why transformers cannot make a model of config.json; ImportError without transformers.
    """
    from fp8moe.hf.quantizer import ReplaceModules

    directory, device = Path(directory), torch.device(device)
    patterns = as_patterns("ignore", ignore)
    stored = open_checkpoint(directory)
    if not stored.config:
        raise CheckpointError(f"cannot load {directory}", [*stored.problems, "config.json: missing or empty"])
    blocks, found = as_blocks(stored)
    try:
        config, generation_config = read_config(stored), read_generation_config(stored)
        dtype = _dtype(dtype, config, stored)
        quantization = _without_quantization(config)  # or transformers would quantize by itself
        patterns += predicted_layers(config)
        matched = _match(blocks, empty_model(config), patterns, found.unused)
        if any(problem.endswith(TIED) for problem in matched.problems):  # then transformers does not tie them
            config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False
            matched = _match(blocks, empty_model(config), patterns, found.unused)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"cannot load {directory}", [*stored.problems, str(error)]) from error
    problems = matched.problems + matched.cast_by_transformers(dtype)
    problems += inexact_weights(found) if not problems else ()
    if problems:
        raise CheckpointError(f"cannot load {directory}", problems)
    if not matched.replaced:
        warnings.warn(printable(f"{directory}: {found.format.reason}; nothing of it runs on fp8moe"), stacklevel=2)
    if found.unused - matched.plan.destinations.keys():
        warn_of_unused(directory)
    with matched.checkpoint.reader() as reader, construction_lock:
        model, report = type(matched.model).from_pretrained(
            None,
            config=matched.model.config,
            dtype=dtype,
            state_dict=matched.tensors(reader, device),
            quantization_config=ReplaceModules(matched.replaced, matched.channels, device),
            output_loading_info=True,
        )
    left = [f"{key}: {kind}" for kind, keys in report.items() for key in sorted(map(str, keys))]
    if left:
        raise CheckpointError(f"cannot load {directory}, transformers reports", left)
    if matched.channels:
        model.save_pretrained = _refuse_to_save  # its names are not those that transformers gives such scales
    if matched.replaced:
        as_stored = quantization is not None and all(map(_is_as_in_the_model, found.weights))
        model.config.quantization_config = quantization if as_stored else _quantization_of(model)
        for part in _parts(model.config):
            if hasattr(part, "expert_dtype"):  # of DeepSeek-V4: "fp4"
                part.expert_dtype = "fp8"
    if generation_config is not None:
        model.generation_config = generation_config
    model._weight_conversions = conversions_to_save(model)
    return model


def _is_as_in_the_model(weight: QuantizedWeight) -> bool:
    """Whether a checkpoint's weight is stored in blocks, under names that its configuration tells transformers of."""
    return weight.kind == "fp8-block" and not weight.transposed and not str(weight.scale).endswith("_scale")


def _quantization_of(model: nn.Module) -> dict[str, Any]:
    """What config.json is to say of what the model holds, for a checkpoint in another format."""
    layout = {name: TensorSpec(DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in state_of(model).items()}
    return quantization_config(layout, "float32", ())


def _refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError("save_pretrained: the model has a scale for each output channel; save_fp8_checkpoint stores it")


def _dtype(dtype: torch.dtype | str | None, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that a caller asks for: a dtype, its name, or "auto"."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in ("auto", None):
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
        stored = (DTYPES[info.dtype] for info in checkpoint.tensors.values() if info.dtype in FLOATS)
        return own if isinstance(own, torch.dtype) else next(stored, torch.bfloat16)
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(named, torch.dtype):
        raise ValueError(f"dtype: expected a torch.dtype, its name or 'auto', got {dtype!r}")
    return named


def _without_quantization(config: Any) -> Any:
    """Take quantization_config from a configuration and its parts. Returns the first."""
    taken = [vars(part).pop("quantization_config", None) for part in _parts(config)]
    return next((quantization for quantization in taken if quantization is not None), None)


def _parts(config: Any) -> list[Any]:
    """A configuration, and those in it."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(part for part in parts if part is not None)]


def predicted_layers(config: Any) -> tuple[str, ...]:
    """Patterns of the layers for multi-token prediction, behind the others, which transformers' models do not have."""
    config = config.get_text_config(decoder=True)
    count, first = getattr(config, "num_nextn_predict_layers", None) or 0, getattr(config, "num_hidden_layers", 0)
    return tuple(f"model.layers.{first + index}.*" for index in range(count))


class _LazyTensor:
    """A tensor that is made when it is read, which transformers does as with the tensors of safetensors files."""

    def __init__(self, make: Callable[[], Tensor]):
        self._make = make

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self._make()


@dataclass
class _Match:
    """A checkpoint, in blocks, and the model that it is for.

    model: on the meta device, with fp8moe's modules in it. replaced: their names; channels: of those with a scale for
    each output channel. plan: of the tensors that go into the
    model as they are. conversions: of the others, the sources of each of transformers' and the keys of what it makes.
    problems: all that does not fit.
    """

    checkpoint: Checkpoint
    model: nn.Module
    replaced: list[str]
    channels: set[str]
    plan: LoadPlan
    conversions: list[tuple[dict[str, Location], list[str]]]
    problems: list[str]

    def tensors(self, reader: TensorReader, device: torch.device) -> dict[str, _LazyTensor]:
        """The model's state dict, of tied tensors the first."""
        state = state_of(self.model)
        first = {id(value): key for key, value in reversed(state.items())}
        tensors = {}
        for key, parts in self.plan.sources.items():
            target = state[key]
            read = partial(self._read, key, target, list(parts.values()), reader, device)
            tensors[first[id(target)]] = _LazyTensor(read)
        for sources, keys in self.conversions:
            made: dict[str, Tensor] = {}
            for key in keys:
                tensors[key] = _LazyTensor(partial(self._convert, key, sources, made, reader))
        return tensors

    def cast_by_transformers(self, dtype: torch.dtype) -> list[str]:
        """FP8 weights that transformers would make float32, without their scales, in a model of this dtype."""
        from transformers.core_model_loading import build_glob_alternation

        kept = list(self.model._get_dtype_plan(dtype))
        cast = build_glob_alternation(kept)[0].search if kept else lambda key: None
        return [
            f"{key}: {FP8}, but transformers keeps it in float32 with dtype={dtype}"
            for key, value in state_of(self.model).items()
            if value.dtype == torch.float8_e4m3fn and cast(key)
        ]

    def _read(self, key: str, target: Tensor, names: list[str], reader: TensorReader, device: torch.device) -> Tensor:
        """The value on the device of `target`, a tensor of the state dict. What is not FP8 keeps its dtype."""
        dtypes = [DTYPES[self.checkpoint.tensors[name].dtype] for name in names]
        in_fp8 = target.dtype == torch.float8_e4m3fn or key.endswith(SCALE)
        stored = reduce(torch.promote_types, dtypes) if not in_fp8 else None
        value = torch.empty(target.shape, dtype=stored or target.dtype, device=device)
        for name in names:
            copy_tensor(reader, name, self.plan.destinations[name], value)
        is_parameter = isinstance(target, nn.Parameter)
        return nn.Parameter(value, requires_grad=target.requires_grad) if is_parameter else value

    def _convert(self, key: str, sources: dict[str, Location], made: dict[str, Tensor], reader: TensorReader) -> Tensor:
        """One of the tensors that a conversion makes; ``made`` holds the others until they are asked for."""
        if key not in made:
            made.update(convert(self.model, sources, {name: reader.read(name) for name in sources}))
        return made.pop(key)


def _match(checkpoint: Checkpoint, model: nn.Module, ignore: tuple[str, ...], unused: Collection[str]) -> _Match:
    """Put fp8moe's modules into a model on the meta device where the checkpoint has FP8 weights, and match the two.

    checkpoint: in blocks. ignore, unused: patterns and names of tensors that may be left over.
    """
    from fp8moe.hf.quantizer import replace_modules, use_channel_scales

    state = state_of(model)
    weights = {name: _weight_of(name, checkpoint) for name in checkpoint.tensors}
    locations = locate(model, {weight or name for name, weight in weights.items()})
    for name, location in locations.items():
        if _is_only_transposed(location, checkpoint.tensors.get(name), state):
            locations[name] = Location(location.key, location.key)

    def model_name(name: str) -> str:
        weight = weights[name]
        return locations[name].name if weight is None else scale_name(locations[weight].name)

    problems: list[str] = []
    replaced: list[str] = []
    channels: set[str] = set()
    modules = {}
    for module, names in _fp8_modules(checkpoint, state, model_name).items():
        if _can_be_fp8(model, module, [locations[name] for name in names]):
            modules[module] = names[0]
        else:
            checkpoint = dequantized(checkpoint, names)
    tied = {key: keys for keys in ties(state) for key in keys}
    for module, name in sorted(modules.items()):
        others = [key for key in tied.get(f"{module}.weight", ()) if key.rpartition(".")[0] not in modules]
        if others:
            problems.append(f"{name}: {FP8}, but the model ties it to {others[0]}, which is not")
            continue
        kind = type(model.get_submodule(module))
        if locations[name].key == f"{module}.weight" and kind is not nn.Linear:
            problems.append(f"{name}: {FP8}, but of {kind.__name__}: fp8moe runs linears and experts in FP8")
            continue
        try:
            replace_modules(model, [module])
            replaced.append(module)
            if _has_channels(name, checkpoint):
                channels.add(module)
                use_channel_scales(model, [module])
        except (TypeError, ValueError) as error:
            problems.append(f"{name}: {error}")

    groups: dict[str, dict[str, Location]] = defaultdict(dict)
    for name in checkpoint.tensors:
        if weights[name] is None and locations[name].converter is not None and locations[name].key in state:
            groups[locations[name].key][name] = locations[name]
    conversions = []
    for group in groups.values():
        keys, wrong = _conversion(checkpoint, model, state, group)
        problems += wrong
        conversions.append((group, keys))
    converted = {key for _, keys in conversions for key in keys}
    sources = set().union(*groups.values())
    rest = {name: info for name, info in checkpoint.tensors.items() if name not in sources}
    plan = plan_load(
        replace(checkpoint, tensors=rest),
        {key: value for key, value in state_of(model).items() if key not in converted},
        ignored_names(model, ignore, unused),
        model_name,
    )
    return _Match(checkpoint, model, replaced, channels, plan, conversions, problems + plan.problems)


def _weight_of(name: str, checkpoint: Checkpoint) -> str | None:
    """The weight that this tensor is the scale of; None if it is no scale."""
    weight = weight_of(name)
    return weight if weight is not None and (weight in checkpoint.tensors or name.endswith(SCALE)) else None


def _has_channels(weight: str, checkpoint: Checkpoint) -> bool:
    """Whether the scale of an FP8 weight is one for each output channel."""
    scale, shape = scale_of(weight, checkpoint.tensors), checkpoint.tensors[weight].shape
    return scale is not None and shape[-2] > 1 and checkpoint.tensors[scale].shape == (*shape[:-1], 1)


def _is_only_transposed(location: Location, info: TensorInfo | None, state: Mapping[str, Tensor]) -> bool:
    """Whether transformers would only transpose an FP8 weight that has the model's shape already."""
    if location.converter is None or info is None or info.dtype != FP8 or location.key not in state:
        return False
    steps = {type(step).__name__ for step in location.converter.operations}
    return steps == {"Transpose"} and info.shape == tuple(state[location.key].shape)


def _can_be_fp8(model: nn.Module, name: str, weights: Iterable[Location]) -> bool:
    """False for a linear that computes something else, as DeepSeek-V4's by group, or whose weight's dtype is read.

    And for one whose weight transformers puts together of several, or takes from a larger one.
    """
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        return True
    converted = any(location.converter is not None for location in weights)
    return type(module) is nn.Linear and not converted and not casts_to_weight(model, name)


def _fp8_modules(
    checkpoint: Checkpoint, state: Mapping[str, Tensor], model_name: Callable[[str], str]
) -> dict[str, list[str]]:
    """The modules that FP8 weights go into, each with these, where it has a form that fp8moe knows."""
    modules = defaultdict(list)
    for name, info in checkpoint.tensors.items():
        destination = find_destination(model_name(name), state) if info.dtype == FP8 else None
        if destination is not None:
            modules[destination.key.rpartition(".")[0]].append(name)
    return modules


def _conversion(
    checkpoint: Checkpoint, model: nn.Module, state: Mapping[str, Tensor], sources: dict[str, Location]
) -> tuple[list[str], list[str]]:
    """The keys of what a conversion makes, and what is wrong with it, tried without data."""
    name, location = next(iter(sources.items()))
    steps = ", ".join(type(step).__name__ for step in location.converter.operations)
    quantized = [name for name in sources if checkpoint.tensors[name].dtype == FP8]
    if quantized:
        return [], [f"{quantized[0]}: {FP8}, but transformers makes {location.key} of it by {steps}, without its scale"]
    infos = {name: checkpoint.tensors[name] for name in sources}
    expected = state[location.key].dtype
    for name, info in infos.items():
        if not (expected.is_floating_point and info.dtype in FLOATS) and DTYPES.get(info.dtype) != expected:
            return [location.key], [f"{name}: dtype {info.dtype}, expected {expected}"]
    values = {name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta") for name, info in infos.items()}
    try:
        made = convert(model, sources, values)
    except Exception as error:  # of transformers' operations, given tensors that are too few or misshapen
        return [location.key], [f"{name}: transformers cannot make {location.key} of it by {steps} ({error})"]
    problems = [
        f"{key}: transformers makes {tuple(value.shape)} of {name}, expected "
        + (f"{tuple(state[key].shape)}" if key in state else "an entry of the model")
        for key, value in made.items()
        if key not in state or state[key].shape != value.shape
    ]
    return list(made), problems
