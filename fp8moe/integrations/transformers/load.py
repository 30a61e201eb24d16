"""load_model: a transformers model with its FP8 weights as they are, on a CPU too.

Checkpoint and model are matched by the headers of the files; tensors are read when transformers asks for them.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.checkpoints.formats import DTYPES, FLOATS, FP8, SCALE, scale_name, weight_of
from fp8moe.checkpoints.load import copy_tensor, ignored_names
from fp8moe.checkpoints.match import LoadPlan, find_destination, plan_load, state_of, ties
from fp8moe.checkpoints.read import Checkpoint, CheckpointError, TensorReader, open_checkpoint
from fp8moe.integrations.architecture import (
    Location,
    construction_lock,
    convert,
    empty_model,
    locate,
    read_config,
    read_generation_config,
)


def load_model(
    directory: str | os.PathLike, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Any:
    """The causal language model of a checkpoint, with its FP8 weights as they are: on a CPU too.

    transformers itself turns FP8 weights back into bfloat16 where there is no GPU. Here every linear and every experts
    module whose weights are FP8 in the checkpoint becomes an `FP8Linear` or a `GroupedExperts`, and the rest stays
    transformers' own, which also makes the model: checkpoints may have any names and layouts that it converts. Nothing
    is allocated twice: parameters get memory when their tensors are read.

    directory: config.json and safetensors files, as transformers or fp8moe write them (see
        fp8moe.integrations.checkpoints for the names); read without a network.
    dtype: of everything that is not FP8, and of the activations.
    device: where the model is to be.
    Returns the model in eval mode.

    For a moment transformers changes PyTorch's default dtype, for all threads, and the way in which models of its own
    tie weights. Modules that other threads make then are otherwise what they always are.

    Raises CheckpointError (a ValueError), before any weight is read, listing what is missing, extra or misshapen, or
    why transformers cannot make a model of config.json; ImportError without transformers.
    """
    from fp8moe.integrations.transformers.quantizer import ReplaceModules

    directory, device = Path(directory), torch.device(device)
    checkpoint = open_checkpoint(directory)
    if not checkpoint.config:
        raise CheckpointError(f"cannot load {directory}", [*checkpoint.problems, "config.json: missing or empty"])
    try:
        config, generation_config = read_config(checkpoint), read_generation_config(checkpoint)
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None:
            del config.quantization_config  # or transformers would quantize by itself
        matched = _match(checkpoint, empty_model(config))
    except ValueError as error:
        raise CheckpointError(f"cannot load {directory}", [*checkpoint.problems, str(error)]) from error
    problems = matched.problems + matched.cast_by_transformers(dtype)
    if problems:
        raise CheckpointError(f"cannot load {directory}", problems)
    with checkpoint.reader() as reader, construction_lock:
        model, report = type(matched.model).from_pretrained(
            None,
            config=matched.model.config,
            dtype=dtype,
            state_dict=matched.tensors(reader, device),
            quantization_config=ReplaceModules(matched.replaced, device),
            output_loading_info=True,
        )
    left = [f"{key}: {kind}" for kind, keys in report.items() for key in sorted(map(str, keys))]
    if left:
        raise CheckpointError(f"cannot load {directory}, transformers reports", left)
    if quantization is not None:
        model.config.quantization_config = quantization
    if generation_config is not None:
        model.generation_config = generation_config
    return model


class _LazyTensor:
    """A tensor that is made when it is read, which transformers does as with the tensors of safetensors files."""

    def __init__(self, make: Callable[[], Tensor]):
        self._make = make

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self._make()


@dataclass
class _Match:
    """A checkpoint and the model that it is for.

    model: on the meta device, with fp8moe's modules in it. replaced: their names. plan: of the tensors that go into the
    model as they are. conversions: of the others, the sources of each of transformers' and the keys of what it makes.
    problems: all that does not fit.
    """

    checkpoint: Checkpoint
    model: nn.Module
    replaced: list[str]
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


def _match(checkpoint: Checkpoint, model: nn.Module) -> _Match:
    """Put fp8moe's modules into a model on the meta device where the checkpoint has FP8 weights, and match the two."""
    from fp8moe.integrations.transformers.quantizer import replace_modules

    state = state_of(model)
    weights = {name: _weight_of(name, checkpoint) for name in checkpoint.tensors}
    locations = locate(model, {weight or name for name, weight in weights.items()})

    def model_name(name: str) -> str:
        weight = weights[name]
        return locations[name].name if weight is None else scale_name(locations[weight].name)

    problems: list[str] = []
    replaced: list[str] = []
    modules = _fp8_modules(checkpoint, state, model_name)
    tied = {key: keys for keys in ties(state) for key in keys}
    for module, name in sorted(modules.items()):
        others = [key for key in tied.get(f"{module}.weight", ()) if key.rpartition(".")[0] not in modules]
        if others:
            problems.append(f"{name}: {FP8}, but the model ties it to {others[0]}, which is not")
            continue
        try:
            replace_modules(model, [module])
            replaced.append(module)
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
        ignored_names(model),
        model_name,
    )
    return _Match(checkpoint, model, replaced, plan, conversions, problems + plan.problems)


def _weight_of(name: str, checkpoint: Checkpoint) -> str | None:
    """The weight that this tensor is the scale of; None if it is no scale."""
    weight = weight_of(name)
    return weight if weight is not None and (weight in checkpoint.tensors or name.endswith(SCALE)) else None


def _fp8_modules(
    checkpoint: Checkpoint, state: Mapping[str, Tensor], model_name: Callable[[str], str]
) -> dict[str, str]:
    """The modules that FP8 weights go into, each with one of them, where it has a form that fp8moe knows."""
    modules = {}
    for name, info in checkpoint.tensors.items():
        destination = find_destination(model_name(name), state) if info.dtype == FP8 else None
        if destination is not None:
            modules.setdefault(destination.key.rpartition(".")[0], name)
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
