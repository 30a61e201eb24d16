"""Match stored weights to a model's tensors, sharded or not: check everything, then copy values piece by piece."""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe.layers.parameters import is_sharded, local
from fp8moe.layers.wrapped import names_inside
from fp8moe.quant.formats import PACKED_FORMATS, FP8Tensor, as_float
from fp8moe.weights.formats import SCALE_DTYPES, fits_scale
from fp8moe.weights.names import BLOCK_IN_MODEL, CHANNEL_SCALE, GATE, GATE_UP, SCALE, SCALE_ROLE, UP, W_BLOCK, Name
from fp8moe.weights.source import (
    DTYPES,
    FLOATS,
    FP8,
    Checkpoint,
    Reader,
    TensorInfo,
    TensorSpec,
    printable,
    unmappable,
)
from fp8moe.weights.stored import PACKED, StoredWeight, Weights

TIED = "but the model ties the two"  # ends the problem line of tied tensors that differ
EXTRA = "extra, the model has no such tensor"  # ends the problem line of a tensor without a place in the model

_FORMER_BUFFERS = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
"""Buffers that old checkpoints store and that models now compute.

Maps the end of a buffer's name in a model to a regex for the names that old checkpoints give the buffer.
"""

_SCALES = {torch.float8_e4m3fn: SCALE, torch.uint8: CHANNEL_SCALE}
"""How the name of a quantized weight's scale ends in a model, by the weight's dtype."""

_ALLOWED = {
    torch.float32: SCALE_DTYPES,
    torch.uint8: ("U8",),
    torch.bfloat16: ("BF16",),
    torch.float8_e4m3fn: (FP8,),
}
"""The dtypes in which scales of quantized weights may be stored, by their dtype in the model."""

Part = tuple[int | None, int | None]
"""Where a tensor starts in a fused parameter: (expert, row of that expert's matrix), or WHOLE for a whole parameter."""
WHOLE: Part = (None, None)

Box = tuple[range, ...]
"""A part of a tensor: a range of indices for each dimension. It has no elements unless ``all(box)``."""


def whole(shape: Iterable[int]) -> Box:
    return tuple(map(range, shape))


def held(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return the part of a tensor that is in this process's memory, and its box within the full tensor."""
    if not is_sharded(tensor):
        return tensor, whole(tensor.shape)
    chunks = tensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    box = tuple(range(first, first + size) for first, size in zip(chunks[0].offsets, chunks[0].sizes, strict=True))
    with torch.no_grad():
        return local(tensor), box


def overlap(box: Box, other: Box) -> Box:
    """Return the intersection of two boxes."""
    starts = (max(a.start, b.start) for a, b in zip(box, other, strict=True))
    stops = (min(a.stop, b.stop) for a, b in zip(box, other, strict=True))
    return tuple(range(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select ``box`` from a tensor that holds the larger box ``outer``."""
    return tuple(slice(own.start - base.start, own.stop - base.start) for own, base in zip(box, outer, strict=True))


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return a model's class as it was before fully_shard made it a subclass of FSDPModule."""
    if not torch.distributed.is_available():
        return type(model)
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


class Ranks:
    """The processes that work together: the default group if any of the tensors is sharded, else this process alone.

    group: the process group for CPU tensors; None for this process alone.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._agreement, self.group, self.rank = None, None, 0
        if any(map(is_sharded, tensors)):
            from fp8moe.distributed.agreement import Agreement

            self._agreement = Agreement.of(dist.group.WORLD)
            self.group, self.rank = self._agreement.group, dist.get_rank()

    @property
    def first(self) -> bool:
        """Return whether this process has rank 0, the rank that writes files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all processes passed, in the order of ranks."""
        return [value] if self._agreement is None else self._agreement.gather(value)

    def check_same(self, expected: str, value: Any) -> None:
        """Raise ValueError on all processes unless all pass the same value. expected: the start of the error's text."""
        if self._agreement is not None:
            from fp8moe.distributed.agreement import check_same

            check_same(expected, self.gather(value))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the body on every process; if it fails on any of several processes, raise the same ValueError on all."""
        if self._agreement is None:
            yield
            return
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        self._agreement.raise_together(error)


class Place(NamedTuple):
    """Where a tensor goes in a model: the whole parameter ``state[key]``, or rows of one of its experts.

    shape: the tensor's shape.
    """

    key: str
    shape: tuple[int, ...]
    part: Part = WHOLE

    @property
    def box(self) -> Box:
        """The box of ``state[key]`` that this place covers."""
        if self.part == WHOLE:
            return whole(self.shape)
        (expert, row), (rows, columns) = self.part, self.shape
        return range(expert, expert + 1), range(row, row + rows), range(columns)

    def held_by(self, target: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
        """Return a view of this process's part of the place, and the slices that select that part of the tensor.

        target: ``state[key]``.
        """
        if not is_sharded(target):  # the fast path: a model may have tens of thousands of expert matrices
            expert, row = self.part
            local = target if self.part == WHOLE else target[expert, row : row + self.shape[0]]
            return local, tuple(slice(0, size) for size in self.shape)
        local, box = held(target)
        part = overlap(self.box, box)
        local, index = local[inside(part, box)], inside(part, self.box)
        return (local, index) if self.part == WHOLE else (local.flatten(0, 1), index[1:])


class Target:
    """The state dict that weights are written to. state: parameters and persistent buffers under all their names.

    scales: the keys of FP8 weights' scales. ties: for each tensor, the list of its names.
    """

    def __init__(self, state: Mapping[str, Tensor]):
        self.state = state
        self.scales = {key + suffix for key, value in state.items() if (suffix := _SCALES.get(value.dtype))}
        self.scales &= state.keys()
        names = defaultdict(list)
        for key, value in state.items():
            names[id(value)].append(key)
        self.ties = list(names.values())

    def find(self, name: Name) -> Place | None:
        """Return where a tensor goes, or None if the model has no place for it."""
        for other in (name, name._replace(text=name.text.replace(W_BLOCK, BLOCK_IN_MODEL))):
            for key in (other.text, other.weight + SCALE) if other.role == SCALE_ROLE else (other.text,):
                if key in self.state:
                    return Place(key, tuple(self.state[key].shape))
            if name.expert is not None:
                module = name.module if other is name else name.module.replace(W_BLOCK, BLOCK_IN_MODEL)
                place = self._of_expert(name, module)
                if place is not None:
                    return place
        return None

    def packed(self, weights: Iterable[StoredWeight], locate: Callable[[Name], Name] = lambda name: name) -> list[str]:
        """Return the names of the weights in four bits that go into modules that keep four bits.

        locate: maps names in the checkpoint to those in the model.
        """
        stored = (weight.name for weight in weights if weight.kind in PACKED_FORMATS)
        places = {name.text: self.find(locate(name)) for name in stored}
        return [name for name, place in places.items() if place and self.state[place.key].dtype == torch.uint8]

    def _of_expert(self, name: Name, module: str) -> Place | None:
        fused = name.projection in (GATE, UP) and f"{module}.{GATE_UP}" in self.state
        key = f"{module}.{GATE_UP if fused else name.projection}{SCALE if name.role == SCALE_ROLE else ''}"
        target = self.state.get(key)
        if target is None or target.dim() != 3 or name.expert >= target.shape[0]:
            return None
        size = target.shape[1] // 2 if fused else target.shape[1]
        row = size if fused and name.projection == UP else 0
        return Place(key, (size, target.shape[2]), (name.expert, row))

    def scale_of(self, place: Place) -> Place | None:
        """Return the place of the scale of the weight at ``place``; None if the weight there is not quantized."""
        suffix = _SCALES.get(self.state[place.key].dtype)
        key = f"{place.key}{suffix}"
        if suffix is None or key not in self.scales:
            return None
        scale = self.state[key]
        if place.part == WHOLE:
            return Place(key, tuple(scale.shape))
        expert, row = place.part
        size = scale.shape[1] * place.shape[0] // self.state[place.key].shape[1]
        return Place(key, (size, scale.shape[2]), (expert, size if row else 0))

    def mismatch(self, spec: TensorSpec, place: Place) -> str | None:
        """Return why a tensor of this dtype and shape does not fit ``place``, or None if it fits."""
        target = self.state[place.key].dtype
        if target == torch.float8_e4m3fn and place.key not in self.scales:
            if spec.dtype in FLOATS:
                return f"{spec.dtype}, but the model's module is FP8; {_way_out(place.key)}"
            if spec.dtype != FP8:
                return f"dtype {spec.dtype}, expected {FP8}"
        elif target == torch.uint8 and spec.dtype != PACKED:
            return f"dtype {spec.dtype}, but the model's module has weights in four bits"
        elif place.key in self.scales:
            allowed = _ALLOWED.get(target, ("F8_E8M0",))
            if spec.dtype not in allowed:
                return f"dtype {spec.dtype}, expected a scale in {' or '.join(allowed)}"
            if fits_scale(spec.shape, place.shape):
                return None
            if len(spec.shape) == len(place.shape) and 1 in (spec.shape[-1], place.shape[-1]):
                wanted = "channel" if spec.shape[-1] == 1 else "block"
                return f"shape {spec.shape}, expected {place.shape}; make the module with weight_scales={wanted!r}"
        elif spec.dtype == FP8:
            return (
                f"{FP8}, but the model's module is not FP8; put FP8Linear (replace_linears) or GroupedExperts there "
                "first"
            )
        elif not (target.is_floating_point and spec.dtype in FLOATS) and DTYPES.get(spec.dtype) != target:
            return f"dtype {spec.dtype}, expected {target}"
        return None if spec.shape == place.shape else f"shape {spec.shape}, expected {place.shape}"

    def missing(self, sources: Mapping[str, Mapping[Part, str]], wrong: Iterable[str] = ()) -> list[str]:
        """Return a line for each tensor of the model that gets no values.

        sources: names of the tensors to load, by state-dict key and part. wrong: keys with a problem line already.
        """
        problems = []
        for keys in self.ties:
            found = next((key for key in keys if sources.get(key)), None)
            if found is not None:
                problems += self._missing_parts(found, sources[found])
            elif keys[0] not in wrong:
                also = f" (also called {', '.join(keys[1:])})" if keys[1:] else ""
                problems.append(f"{keys[0]}: missing{also}")
        return problems

    def _missing_parts(self, key: str, parts: Mapping[Part, str]) -> list[str]:
        """Return a line for each expert matrix of a fused parameter that gets no values, or gets values twice."""
        if WHOLE in parts:
            return [
                f"{name}: the checkpoint has it also in {parts[WHOLE]}" for part, name in parts.items() if part != WHOLE
            ]
        experts, rows = self.state[key].shape[:2]
        module, _, parameter = key.rpartition(".")
        suffix = "weight" + SCALE * (key in self.scales)
        projection = parameter.removesuffix(SCALE).removesuffix(CHANNEL_SCALE)
        projections = {GATE: 0, UP: rows // 2} if projection == GATE_UP else {projection: 0}
        if len(parts) == experts * len(projections):
            return []
        return [
            f"{module}.{expert}.{projection}.{suffix}: missing"
            for expert in range(experts)
            for projection, start in projections.items()
            if (expert, start) not in parts
        ]


Move = tuple[StoredWeight, Place, Place | None]
"""A stored weight, the place of its values in the model, and the place of its scale, if it has one."""


def warn_of_unused(weights: Weights, moves: Iterable[Move]) -> None:
    """Issue one warning if a checkpoint holds static scales that the model has no place for."""
    if weights.unused - {weight.name.text for weight, *_ in moves}:
        text = "has static scales of activations, keys or values, which are not used: all are quantized as they come"
        warnings.warn(printable(f"{weights.checkpoint.directory} {text}"), stacklevel=3)


def ignored_names(model: nn.Module, patterns: tuple[str, ...], unused: Collection[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a checkpoint tensor of a given name may stay unused.

    patterns: fnmatch patterns of names that may stay unused. unused: names of the checkpoint's static scales, which may
    stay unused, too.
    """
    buffers = [name for name, _ in model.named_buffers()]
    former = [regex for end, regex in _FORMER_BUFFERS.items() if any(name.endswith(end) for name in buffers)]
    of_model = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    regexes = [re.compile(pattern) for pattern in (*of_model, *former)]

    def ignored(name: str) -> bool:
        if name in unused or any(fnmatchcase(name, pattern) for pattern in patterns):
            return True
        return any(regex.search(name) for regex in regexes)

    return ignored


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers, the objects themselves, under all of their names.

    The names are those of the model without wrappers; peft's adapters are left out.
    """
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    own = names_inside(model, state)
    return {own[name]: value for name, value in state.items() if own[name] is not None}


def check_writable(state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor was made in inference mode: PyTorch forbids writing to it outside of that mode."""
    name = next((name for name, value in state.items() if value.is_inference()), None)
    if name is not None:
        raise ValueError(
            f"model: {name} was made under torch.inference_mode, and fp8moe cannot write to it; make the model outside "
            "of inference mode, or with load_model"
        )


def match(
    checkpoint: Checkpoint,
    weights: Iterable[StoredWeight],
    target: Target,
    ignored: Callable[[str], bool],
    located: Callable[[StoredWeight], Name] = lambda weight: weight.name,
) -> tuple[list[Move], list[str]]:
    """Find the place of each weight in a model; return the moves, and a line for each problem.

    ignored: tells whether a tensor of a given name may stay unused. located: maps a weight to its name in the model.
    Once all names, shapes and dtypes fit, the values of two kinds of tensors are checked: scales that this process
    holds a part of, and tensors that the model ties together.
    """
    moves, problems, extra = [], [*checkpoint.problems, *unmappable(checkpoint)], []
    sources: dict[str, dict[Part, str]] = defaultdict(dict)  # tensor names, by state-dict key and part
    wrong: set[str] = set()  # state-dict keys whose tensor does not fit, and their scales' keys

    def claim(place: Place, text: str, spec: TensorSpec) -> bool:
        """Record which tensor goes to a place; add a problem if the tensor does not fit. Return whether it fits."""
        other = sources[place.key].setdefault(place.part, text)
        problem = target.mismatch(spec, place) if other == text else f"the checkpoint has it also as {other}"
        if problem:
            problems.append(f"{text}: {problem}")
            wrong.update((place.key, place.key + SCALE))
        return problem is None

    for weight in weights:
        place = target.find(located(weight))
        if place is None:
            extra += [weight.name.text, weight.scale_name][: 1 + weight.has_scale]
            continue
        fits = claim(place, weight.name.text, TensorSpec(weight.dtype, weight.shape))
        scale_place = target.scale_of(place) if weight.has_scale else None
        if scale_place is not None:
            claim(scale_place, weight.scale_name, TensorSpec(weight.scale_dtype, weight.grid or weight.scale.shape))
        elif weight.has_scale and fits:
            extra.append(weight.scale_name)
        moves.append((weight, place, scale_place))
    problems += [f"{name}: {EXTRA}" for name in extra if not ignored(name)]
    if not problems:
        problems += _tied_problems(checkpoint, moves, target.ties)
        judged = chain.from_iterable(_scales_to_judge(move, target.state) for move in moves)
        problems += scale_problems(checkpoint, judged)
    if not checkpoint.incomplete:
        problems += target.missing(sources, wrong)
    return moves, problems


def copy_weights(moves: Iterable[Move], directory: Path, state: Mapping[str, Tensor]) -> None:
    """Copy every weight into its place, with one shard mapped at a time if scales are in the same shards as codes."""
    reader, file = Reader(directory), None
    for weight, place, scale_place in moves:
        if weight.codes.file != file:
            reader.close()
            file = weight.codes.file
        copy_weight(reader, weight, place, state[place.key], scale_place, scale_place and state[scale_place.key])
    reader.close()


def _scales_to_judge(move: Move, state: Mapping[str, Tensor]) -> list[TensorInfo]:
    """Return the stored scales of a move, whose values are to be checked, if this process loads a part of them."""
    weight, place, scale_place = move
    infos = weight.scales if scale_place is not None else [weight.codes]
    scale_place = scale_place or (place if weight.name.role == SCALE_ROLE else None)
    here = scale_place is not None and all(overlap(scale_place.box, held(state[scale_place.key])[1]))
    return infos if here else []


def _way_out(key: str) -> str:
    """Return advice for the error that a checkpoint holds an unquantized tensor where the model has an FP8 module."""
    way_out = "quantize the checkpoint first (fp8moe quantize)"
    module, _, parameter = key.rpartition(".")
    if module and parameter == "weight":
        way_out += f", or leave the module out with replace_linears(skip=[..., {module.rpartition('.')[2]!r}])"
    return way_out


def scale_problems(checkpoint: Checkpoint, scales: Iterable[TensorInfo]) -> list[str]:
    """List the stored scales that hold a NaN, an infinity, zero or a negative value.

    scales: tensors of dtypes in `SCALE_DTYPES`, U8 or F64; or F8_E4M3 of NVFP4, in which groups of zeros may have a
    scale of zero. Other scales of zeros must be positive, too. Memory holds one scale tensor at a time.
    """
    problems = []
    for info, stored in checkpoint.read_unmapped(dict.fromkeys(scales)):
        values, may_be_zero = as_float(stored), info.dtype == FP8
        if (((values >= 0) if may_be_zero else (values > 0)) & (values < torch.inf)).all():
            continue
        counts = {
            "NaN": values.isnan(),
            "infinite": values.isinf(),
            "zero": (values == 0) & (not may_be_zero),
            "negative": (values < 0) & values.isfinite(),
        }
        numbers = [f"{count} {kind}" for kind, where in counts.items() if (count := int(where.sum()))]
        found = f"{', '.join(numbers)} of {values.numel()} values"
        problems.append(f"{info.name}: has {found}, expected scales that are finite and positive")
    return sorted(problems)


def _tied_problems(checkpoint: Checkpoint, moves: Iterable[Move], ties: Iterable[list[str]]) -> list[str]:
    """List stored tensors that differ from each other although the model ties them together."""
    by_key = {place.key: weight for weight, place, _ in moves if place.part == WHOLE}
    problems = []
    for keys in ties:
        first, *others = [by_key[key] for key in keys if key in by_key] or [None]
        problems += [
            f"{other.name.text}: differs from {first.name.text}, {TIED}"
            for other in others
            if not _equal(checkpoint, first, other)
        ]
    return problems


def _equal(checkpoint: Checkpoint, *weights: StoredWeight) -> bool:
    reader = Reader(checkpoint.directory)
    pairs = [[value for _, value in weight.pieces(reader)] for weight in weights]
    equal = all(
        torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors))
        for pieces in zip(*pairs, strict=True)
        for tensors in (zip(*pieces, strict=True) if isinstance(pieces[0], FP8Tensor) else [pieces])
    )
    reader.close()
    return equal


@torch.no_grad()
def copy_weight(
    reader: Reader,
    weight: StoredWeight,
    place: Place,
    target: Tensor | None,
    scale_place: Place | None = None,
    scale_target: Tensor | None = None,
) -> None:
    """Copy a stored weight into its place in ``target`` and, given a scale_place, its scale into ``scale_target``.

    If the target is a DTensor, each process reads the part that it holds.
    """
    local, part = place.held_by(target)
    scale, scale_part = (None, ()) if scale_place is None else scale_place.held_by(scale_target)
    if not local.numel() and (scale is None or not scale.numel()):
        return
    if weight.shape != place.shape:  # ``weight`` is itself a scale, with other dimensions of size 1
        local.copy_(as_float(reader.read(weight.codes)).view(place.shape)[part].to(local.dtype))
        return
    for expert, value in weight.pieces(reader, part):
        data = value.data if isinstance(value, FP8Tensor) else value
        into = local if expert is None else local[expert]
        into.copy_(data.to(into.dtype))
        if scale is not None:
            into = scale if expert is None else scale[expert]
            into.copy_(value.scale[scale_part[-2:]].to(into.dtype))


def provider(name: str = "architecture") -> Any:
    """Import a module of `fp8moe.hf`, which knows the models of transformers, only when it is needed."""
    return import_module(f"fp8moe.hf.{name}")
