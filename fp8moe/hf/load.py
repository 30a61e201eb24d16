"""load_model: loads a checkpoint into a transformers model and keeps the weights in FP8, also on a CPU.

Checkpoint and model are matched by the headers of the safetensors files; a tensor is read when transformers asks for
it.
"""

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from types import EllipsisType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fp8moe.hf.architecture import (
    construction_lock,
    convert,
    empty_model,
    locate,
    parts_of,
    predicted_layers,
    read_config,
    read_generation_config,
)
from fp8moe.hf.versions import conversions_to_save
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.layers.replaced import as_patterns, casts_to_weight
from fp8moe.quant.formats import PACKED_FORMATS
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.settings import standard_device
from fp8moe.weights.formats import quantization_config
from fp8moe.weights.names import CHANNEL_SCALE, SCALE, SCALE_ROLE, Location, Name, parse
from fp8moe.weights.place import TIED, Move, Target, copy_weight, ignored_names, match, state_of, warn_of_unused
from fp8moe.weights.source import (
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    FP8,
    Checkpoint,
    CheckpointError,
    Reader,
    TensorSpec,
    printable,
)
from fp8moe.weights.stored import StoredWeight, Weights, open_weights
from fp8moe.weights.views import dequantized, in_blocks, inexact_problems

EXPERTS = ("stored", "fp8")


@torch.inference_mode(False)
def load_model(
    directory: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    experts: str = "stored",
    ignore: Iterable[str] = (),
) -> Any:
    """Load a checkpoint into a transformers model, with its weights in FP8, on any device.

    transformers itself turns FP8 weights back into bfloat16 where there is no GPU. Here every linear and every experts
    module whose weights are FP8 in the checkpoint becomes an `FP8Linear` or a `GroupedExperts`. transformers makes the
    rest of the model. The checkpoint may have any names and layouts that transformers converts. Nothing is allocated
    twice: parameters get memory when their tensors are read.

    directory: has config.json and safetensors files, in any format that `find_format` says loads; or a model's name on
        the Hugging Face Hub. Weights in other formats are converted to 128x128 blocks while they are read, if the
        conversion is exact, or NVFP4, of which blocks hold what kernels multiply; otherwise they are refused. Some
        linears are loaded in bfloat16: linears of a special class (wo_a of DeepSeek-V4); linears whose input the model
        casts to the weight's dtype (wo of Switch); and linears whose weight transformers joins from several tensors
        (MiniMax-M3's shared experts) or cuts from a larger tensor.
    dtype: the dtype of activations and of everything that is not FP8. "auto" or None: the dtype in config.json or, if
        it has none, the dtype of the first unquantized tensor.
    device: the model's device.
    experts: "stored": experts in MXFP4, NVFP4 or INT4 keep their four bits; "fp8": those in MXFP4 and NVFP4 become FP8
        in 128x128 blocks, as all other weights do, which takes 1.8 to 1.9 times the memory and multiplies the same
        values, and INT4 is refused. Four bits are faster for few tokens, as in decoding, and slower than FP8 for many,
        as in prompts.
    ignore: fnmatch patterns of tensors in the checkpoint to leave out.
    Returns the model in eval mode. Its quantization_config describes the FP8 weights, and save_pretrained writes it.
    save_pretrained raises ValueError for a model with a scale for each output channel or with experts in four bits;
    save_fp8_checkpoint stores such models. Warns (UserWarning) if nothing in the model is FP8. transformers' Trainer
    raises ValueError for the model unless it gets adapters or masters.

    During the call, transformers changes PyTorch's default dtype, and how transformers' models tie weights, for all
    threads. Modules that other threads make meanwhile are not affected in any other way.

    Raises CheckpointError (a ValueError), before any weight is read, listing what is missing, extra or misshapen, or
    why transformers cannot make a model from config.json; ImportError without transformers.
    """
    from fp8moe.hf.patches import check_training
    from fp8moe.hf.quantizer import ReplaceModules

    check_training()
    if experts not in EXPERTS:
        raise ValueError(f"experts: expected one of {EXPERTS}, got {experts!r}")
    device, patterns, weights = torch.device(device), as_patterns("ignore", ignore), open_weights(directory)
    stored, what = weights.checkpoint, f"cannot load {directory}"
    if not stored.config:
        damaged = any(problem.startswith("config.json:") for problem in stored.problems)
        raise CheckpointError(what, [*stored.problems, *([] if damaged else ["config.json: missing or empty"])])
    weights.check(what)
    if experts == "fp8" and any(weight.kind == "int4" and weight.is_expert for weight in weights.stored):
        way_out = "'stored' keeps INT4, which blocks cannot hold; fp8moe convert --requantize rounds it"
        raise CheckpointError(what, [f"experts: expected 'stored', got {experts!r}: {way_out}"])
    try:
        config, generation_config = read_config(stored), read_generation_config(stored)
        dtype = _dtype(dtype, config, stored)
        quantization = _without_quantization(config)  # else transformers would quantize the model
        patterns += predicted_layers(config)
        model = empty_model(config)
        forms, moves, conversions, problems = _match(weights, model, patterns, experts)
        if any(problem.endswith(TIED) for problem in problems):  # tied weights differ in the checkpoint: untie them
            config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False
            model = empty_model(config)
            forms, moves, conversions, problems = _match(weights, model, patterns, experts)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(what, [*stored.problems, str(error)]) from error
    problems += _cast_by_transformers(model, dtype)
    problems += inexact_problems(weights) if not problems else ()
    if problems:
        raise CheckpointError(what, problems)
    if not forms:
        warnings.warn(printable(f"{directory}: {weights.format.reason}; nothing of it runs on fp8moe"), stacklevel=2)
    warn_of_unused(weights, moves)
    reader = Reader(stored.directory)
    with construction_lock, standard_device():
        model, report = type(model).from_pretrained(
            None,
            config=model.config,
            dtype=dtype,
            state_dict=_tensors(model, moves, conversions, reader, device),
            quantization_config=ReplaceModules(forms, device),
            output_loading_info=True,
        )
    reader.close()
    left = [f"{key}: {kind}" for kind, keys in report.items() for key in sorted(map(str, keys))]
    if left:
        raise CheckpointError(f"{what}, transformers reports", left)
    channels = [name for name, form in forms.items() if form == "channel"]
    packed = [name for name, form in forms.items() if form not in ("channel", "block")]
    if channels or packed:  # transformers has other names for them
        what = "a scale for each output channel" if channels else "experts in four bits"
        model.save_pretrained = partial(_refuse_to_save, what)
    if forms:
        as_stored = quantization is not None and all(
            weight.kind == "fp8-block" and not weight.transposed and not weight.scale.name.endswith(CHANNEL_SCALE)
            for weight in weights.quantized
        )
        model.config.quantization_config = quantization if as_stored else _quantization_of(model, bool(channels))
        for part in parts_of(model.config):
            if hasattr(part, "expert_dtype") and not packed:  # DeepSeek-V4's config.json says "fp4"
                part.expert_dtype = "fp8"
    if generation_config is not None:
        model.generation_config = generation_config
    model._weight_conversions = conversions_to_save(model)
    return model


def _quantization_of(model: nn.Module, channels: bool) -> dict[str, Any]:
    """Make a quantization_config from the model's tensors, for a checkpoint that was stored in another format."""
    tensors = (
        (parse(key, value.dim()), TensorSpec(DTYPE_NAMES[value.dtype], tuple(value.shape)))
        for key, value in state_of(model).items()
    )
    return quantization_config(tensors, "float32", (), channels=channels)


def _refuse_to_save(what: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(f"save_pretrained: the model has {what}; save_fp8_checkpoint stores it")


def _dtype(dtype: torch.dtype | str | None, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """Resolve the `dtype` argument of `load_model`: a dtype, its name, "auto" or None. Raises ValueError for others."""
    found = dtype
    if dtype in ("auto", None):
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
        stored = (DTYPES[info.dtype] for info in checkpoint.tensors.values() if info.dtype in FLOATS)
        found = own if isinstance(own, torch.dtype) else next(stored, torch.bfloat16)
    elif isinstance(dtype, str):
        found = getattr(torch, dtype, None)
    if found not in FLOATING:
        got = repr(dtype) if found is dtype or found is None else f"{dtype!r}, which is {found}"
        raise ValueError(f"dtype: expected bfloat16, float16, float32, or 'auto' for one of these, got {got}")
    return found


def _without_quantization(config: Any) -> Any:
    """Remove quantization_config from a configuration and its parts; return the first one found, or None."""
    taken = [vars(part).pop("quantization_config", None) for part in parts_of(config)]
    return next((quantization for quantization in taken if quantization is not None), None)


class _LazyTensor:
    """A tensor that is made when transformers reads it by `[...]`, as it reads slices of safetensors files."""

    def __init__(self, make: Callable[[], Tensor]):
        self._make = make

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self._make()


Conversion = tuple[dict[str, Location], dict[str, StoredWeight], list[str]]
"""A conversion by transformers: locations of the source weights, the source weights, and the keys of its results."""


def _tensors(
    model: nn.Module, moves: Iterable[Move], conversions: Iterable[Conversion], reader: Reader, device: torch.device
) -> dict[str, _LazyTensor]:
    """Make the state dict for from_pretrained. Its tensors are lazy; of tied tensors, it has only the first key."""
    state = state_of(model)
    first = {id(value): key for key, value in reversed(state.items())}
    by_key = defaultdict(list)
    for move in moves:
        by_key[move[1].key].append(move)
    tensors = {}
    for of_key in by_key.values():
        made: dict[str, Tensor] = {}
        targets = {place.key: state[place.key] for _, *places in of_key for place in places if place is not None}
        read = partial(_read, targets, of_key, reader, device)
        for name, target in targets.items():
            tensors[first[id(target)]] = _LazyTensor(partial(_made, made, name, read))
    for locations, sources, keys in conversions:
        made = {}
        read = partial(_convert, model, locations, sources, reader)
        tensors |= {key: _LazyTensor(partial(_made, made, key, read)) for key in keys}
    return tensors


def _cast_by_transformers(model: Any, dtype: torch.dtype) -> list[str]:
    """Return error lines for the FP8 weights that transformers would cast to float32 if it loaded in this dtype.

    transformers would cast them without their scales.
    """
    from transformers.core_model_loading import build_glob_alternation

    kept = list(model._get_dtype_plan(dtype))
    cast = build_glob_alternation(kept)[0].search if kept else lambda key: None
    return [
        f"{key}: {FP8}, but transformers keeps it in float32 with dtype={dtype}"
        for key, value in state_of(model).items()
        if value.dtype == torch.float8_e4m3fn and cast(key)
    ]


def _made(made: dict[str, Tensor], key: str, make: Callable[[], dict[str, Tensor]]) -> Tensor:
    """Return tensor ``key``. ``make`` computes several tensors at once; ``made`` keeps the others until requested."""
    if key not in made:
        made.update(make())
    return made.pop(key)


def _read(targets: Mapping[str, Tensor], moves: list[tuple], reader: Reader, device: torch.device) -> dict[str, Tensor]:
    """Read tensors of the state dict onto the device. Unquantized tensors keep their stored dtype."""
    values = {}
    for key, target in targets.items():
        dtype = target.dtype
        if dtype != torch.float8_e4m3fn and not key.endswith((SCALE, CHANNEL_SCALE)):
            dtype = reduce(torch.promote_types, (DTYPES[weight.dtype] for weight, *_ in moves))
        values[key] = torch.empty(target.shape, dtype=dtype, device=device)
    for weight, place, scale_place in moves:
        copy_weight(reader, weight, place, values[place.key], scale_place, scale_place and values[scale_place.key])
    return {
        key: nn.Parameter(value, requires_grad=targets[key].requires_grad)
        if isinstance(targets[key], nn.Parameter)
        else value
        for key, value in values.items()
    }


def _convert(
    model: nn.Module, locations: dict[str, Location], sources: dict[str, StoredWeight], reader: Reader
) -> dict[str, Tensor]:
    """Read the source weights of a conversion by transformers, and return its results by key."""
    return convert(model, locations, {name: weight.whole(reader) for name, weight in sources.items()})


def _match(
    weights: Weights, model: nn.Module, ignore: tuple[str, ...], experts: str
) -> tuple[dict[str, str], list[Move], list[Conversion], list[str]]:
    """Put fp8moe's modules into a meta model where the checkpoint has FP8 weights, and match their tensors.

    ignore: name patterns of tensors that may be left over. experts: see `load_model`.
    Returns how fp8moe's modules keep their weights (`replace_modules`); a `Move` for each weight to copy into the
    model; the conversions that transformers makes; and an error line for each misfit.
    """
    from fp8moe.hf.quantizer import replace_modules

    kinds = PACKED_FORMATS if experts == "stored" else ()
    packed = {weight.name.text for weight in weights.stored if weight.kind in kinds and weight.is_expert}
    target, blocks = Target(state_of(model)), in_blocks(weights, packed=packed)
    names = {weight.name.text: _name_to_locate(weight, weights) for weight in blocks}
    locations = locate(model, names.values())
    for weight in blocks:
        location = locations[names[weight.name.text].text]
        if _is_only_transposed(location, weight, target.state):
            locations[weight.name.text] = Location(parse(location.key), location.key)

    def located(weight: StoredWeight) -> Name:
        name = locations[names[weight.name.text].text].name
        if names[weight.name.text] is weight.name:
            return name
        return name._replace(text=name.scale, role=SCALE_ROLE)

    modules = defaultdict(list)  # by the name of a module: the FP8 weights that go into it
    for weight in blocks:
        place = target.find(located(weight)) if weight.dtype == FP8 or weight.name.text in packed else None
        if place is not None:
            modules[place.key.rpartition(".")[0]].append(weight)
    plain = {module for module, parts in modules.items() if not _can_be_fp8(model, module, parts, locations)}
    in_bfloat16 = {weight.name.text for module in plain for weight in modules.pop(module) if weight.grid is not None}
    blocks = [dequantized(weight) if weight.name.text in in_bfloat16 else weight for weight in blocks]
    problems, forms = [], {}
    tied = {key: keys for keys in target.ties for key in keys}
    for module, (weight, *_) in sorted(modules.items()):
        text = weight.name.text
        others = [key for key in tied.get(f"{module}.weight", ()) if key.rpartition(".")[0] not in modules]
        kind = type(model.get_submodule(module))
        if others:
            problems.append(f"{text}: {FP8}, but the model ties it to {others[0]}, which is not")
        elif locations[text].key == f"{module}.weight" and kind is not nn.Linear:
            problems.append(f"{text}: {FP8}, but of {kind.__name__}: fp8moe runs linears and experts in FP8")
        else:
            try:
                form = "channel" if weight.kind == "fp8-channel" else "block"
                form = _packed_form(weight) if text in packed else form
                replace_modules(model, {module: form})
                forms[module] = form
            except (TypeError, ValueError) as error:
                problems.append(f"{text}: {error}")
    groups: dict[str, dict[str, StoredWeight]] = defaultdict(dict)
    for weight in blocks:
        location = locations[names[weight.name.text].text]
        if names[weight.name.text] is weight.name and location.converter is not None and location.key in target.state:
            groups[location.key][weight.name.text] = weight
    conversions, converted = [], set()
    for sources in groups.values():
        of_sources = {text: locations[text] for text in sources}
        keys, wrong = _conversion(sources, model, target.state, of_sources)
        problems += wrong
        conversions.append((of_sources, sources, keys))
        converted |= {*keys}
    # Names of tensors that the model computes itself if a checkpoint lacks them, as its class declares.
    made = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ["(?!)"])).search
    stored = {location.key for location in locations.values()}
    moves, unfit = match(
        weights.checkpoint,
        [weight for weight in blocks if not any(weight.name.text in sources for sources in groups.values())],
        Target(
            {k: value for k, value in state_of(model).items() if k not in converted and (k in stored or not made(k))}
        ),
        ignored_names(model, ignore, weights.unused),
        located,
    )
    return forms, moves, conversions, problems + unfit


def _packed_form(weight: StoredWeight) -> str:
    """Return how a module keeps a weight in four bits; see `replace_modules`."""
    if weight.kind != "int4":
        return weight.kind
    group = 2 * weight.shape[-1] // weight.grid[-1]
    form = next(form for form, (name, size) in PACKED_WEIGHTS.items() if (name, size) == ("int4", group))
    return form if weight.scale_dtype == "BF16" else f"{form}, float32"


def _name_to_locate(weight: StoredWeight, weights: Weights) -> Name:
    """Return the name by which to locate a tensor in the model: for a separate scale, the name of its weight."""
    name = weight.name
    if name.role != SCALE_ROLE or weight.coded:
        return name
    known = name.weight in weights.checkpoint.tensors or name.text.endswith(SCALE)
    return name._replace(text=name.weight, role="weight") if known else name


def _is_only_transposed(location: Location, weight: StoredWeight, state: Mapping[str, Tensor]) -> bool:
    """Return whether transformers would only transpose a weight that is FP8 and already has the model's shape."""
    if location.converter is None or weight.dtype != FP8 or location.key not in state:
        return False
    return location.steps == "Transpose" and weight.shape == tuple(state[location.key].shape)


def _can_be_fp8(
    model: nn.Module, name: str, weights: Iterable[StoredWeight], locations: Mapping[str, Location]
) -> bool:
    """Return whether a module can run in FP8; False for three kinds of linears.

    These are: a subclass of nn.Linear, which may compute something else, such as DeepSeek-V4's grouped linear; a linear
    whose input the model casts to the weight's dtype; a linear whose weight transformers joins from several tensors or
    cuts from a larger tensor.
    """
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        return True
    converted = any(locations[weight.name.text].converter is not None for weight in weights)
    return type(module) is nn.Linear and not converted and not casts_to_weight(model, name)


def _conversion(
    sources: Mapping[str, StoredWeight],
    model: nn.Module,
    state: Mapping[str, Tensor],
    locations: dict[str, Location],
) -> tuple[list[str], list[str]]:
    """Dry-run one of transformers' weight conversions on tensors without data; return result keys, and error lines."""
    name, location = next(iter(locations.items()))
    quantized = [text for text, weight in sources.items() if weight.dtype == FP8]
    if quantized:
        how = f"transformers makes {location.key} of it by {location.steps}, without its scale"
        return [], [f"{quantized[0]}: {FP8}, but {how}"]
    expected = state[location.key].dtype
    for text, weight in sources.items():
        if not (expected.is_floating_point and weight.dtype in FLOATS) and DTYPES.get(weight.dtype) != expected:
            return [location.key], [f"{text}: dtype {weight.dtype}, expected {expected}"]
    values = {
        text: torch.empty(weight.shape, dtype=DTYPES[weight.dtype], device="meta") for text, weight in sources.items()
    }
    try:
        made = convert(model, locations, values)
    except Exception as error:  # transformers' operations raise anything for missing or misshapen tensors
        return [location.key], [f"{name}: transformers cannot make {location.key} of it by {location.steps} ({error})"]
    problems = [
        f"{key}: transformers makes {tuple(value.shape)} of {name}, expected "
        + (f"{tuple(state[key].shape)}" if key in state else "an entry of the model")
        for key, value in made.items()
        if key not in state or state[key].shape != value.shape
    ]
    return list(made), problems
