"""Matches the tensors of a checkpoint with those of a model, and lists all that does not fit.

Names, shapes and dtypes come first; values are read only where they decide: of scales, and of tied tensors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8moe.layers.parameters import is_sharded
from fp8moe.weights.expert_names import BLOCK_IN_MODEL, GATE, GATE_UP, UP, W_BLOCK, parse_expert
from fp8moe.weights.formats import (
    DTYPES,
    FLOATS,
    FP8,
    SCALE,
    SCALE_DTYPES,
    TensorSpec,
    as_float,
    fits_scale,
    scale_name,
    weight_of,
)
from fp8moe.weights.read import Checkpoint, Derived, TensorInfo, unmappable
from fp8moe.weights.sharded import Box, held, inside, overlap, whole

TIED = "but the model ties the two"  # the end of the line about tensors that differ
EXTRA = "extra, the model has no such tensor"  # the end of the line about such a tensor


class Part(NamedTuple):
    """What a stored tensor is of an entry of the state dict: rows of one expert, from `row` on, or all of it."""

    expert: int | None
    row: int | None


WHOLE = Part(None, None)


@dataclass(frozen=True)
class Destination:
    """Where in the model a tensor of the checkpoint goes: all of ``state[key]``, or rows of one expert there."""

    key: str
    shape: tuple[int, ...]
    part: Part = WHOLE

    @property
    def box(self) -> Box:
        """The box of ``state[key]``."""
        if self.part == WHOLE:
            return whole(self.shape)
        (expert, row), (rows, columns) = self.part, self.shape
        return range(expert, expert + 1), range(row, row + rows), range(columns)

    def held_by(self, target: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
        """What this process has of the tensor in ``target``, which is ``state[key]``, and which part of it that is."""
        if not is_sharded(target):  # quickly: a model may have tens of thousands of such parts
            expert, row = self.part
            local = target if self.part == WHOLE else target[expert, row : row + self.shape[0]]
            return local, tuple(slice(0, size) for size in self.shape)
        local, box = held(target)
        part = overlap(self.box, box)
        local, index = local[inside(part, box)], inside(part, self.box)
        return (local, index) if self.part == WHOLE else (local.flatten(0, 1), index[1:])


@dataclass
class LoadPlan:
    """What will be copied where, and what stands in the way.

    destinations: of each tensor of the checkpoint. sources: of each entry of the state dict the tensors that it is made
    of. wrong: entries that a tensor does not fit.
    """

    problems: list[str]
    destinations: dict[str, Destination] = field(default_factory=dict)
    sources: dict[str, dict[Part, str]] = field(default_factory=lambda: defaultdict(dict))
    wrong: set[str] = field(default_factory=set)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, under all of their names."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def plan_load(
    checkpoint: Checkpoint,
    state: Mapping[str, Tensor],
    ignored: Callable[[str], bool],
    model_name: Callable[[str], str] = str,
) -> LoadPlan:
    """Match the checkpoint with a model's state dict, which has the parameters themselves under all of their names.

    ignored: whether a tensor of this name may be left over. model_name: from the checkpoint's name of a tensor to one
    that the model knows. Only scales that this process holds a part of, and tensors that the model ties together, are
    read, once all names, shapes and dtypes fit.
    """
    plan = LoadPlan(checkpoint.problems + unmappable(checkpoint))
    extra, wrong = [], set()
    for name, info in checkpoint.tensors.items():
        destination = find_destination(model_name(name), state)
        if destination is None:
            extra.append(name)
            continue
        other = plan.sources[destination.key].setdefault(destination.part, name)
        problem = mismatch(info, destination, state) if other == name else f"the checkpoint has it also as {other}"
        if problem:
            plan.problems.append(f"{name}: {problem}")
            plan.wrong.add(destination.key)
            wrong.add(name)
        plan.destinations[name] = destination
    for name in extra:
        # The scale of a weight that is wrong itself is not worth another line.
        if not ignored(name) and weight_of(name) not in wrong:
            plan.problems.append(f"{name}: {EXTRA}")
    if not plan.problems:
        _check_tied(checkpoint, plan, state)
        scales = [
            name
            for name, destination in plan.destinations.items()
            if _is_scale(destination.key, state) and all(overlap(destination.box, held(state[destination.key])[1]))
        ]
        plan.problems += scale_problems(checkpoint, scales)
    if not checkpoint.incomplete:
        plan.problems += missing(plan, state)
    return plan


def find_destination(name: str, state: Mapping[str, Tensor]) -> Destination | None:
    """Where a tensor goes, or None if the model has no place for it."""
    for candidate in (name, name.replace(W_BLOCK, BLOCK_IN_MODEL)):
        if candidate in state:
            return Destination(candidate, tuple(state[candidate].shape))
        weight = weight_of(candidate)
        if weight is not None and scale_name(weight) in state:
            return Destination(scale_name(weight), tuple(state[scale_name(weight)].shape))
        destination = _destination_of_expert(candidate, state)
        if destination is not None:
            return destination
    return None


def _destination_of_expert(name: str, state: Mapping[str, Tensor]) -> Destination | None:
    tensor = parse_expert(name)
    if tensor is None:
        return None
    fused = tensor.projection in (GATE, UP) and f"{tensor.module}.{GATE_UP}" in state
    key = f"{tensor.module}.{GATE_UP if fused else tensor.projection}" + (SCALE if tensor.is_scale else "")
    target = state.get(key)
    if target is None or target.dim() != 3 or tensor.expert >= target.shape[0]:
        return None
    rows = target.shape[1]
    first, size = 0, rows
    if fused:
        size = rows // 2
        first = size if tensor.projection == UP else 0
    return Destination(key, (size, target.shape[2]), Part(tensor.expert, first))


def mismatch(info: TensorInfo | TensorSpec, destination: Destination, state: Mapping[str, Tensor]) -> str | None:
    """What keeps this tensor from its place, or None."""
    target = state[destination.key].dtype
    if target == torch.float8_e4m3fn:
        if info.dtype in FLOATS:
            return f"{info.dtype}, but the model's module is FP8; {_way_out(destination)}"
        if info.dtype != FP8:
            return f"dtype {info.dtype}, expected {FP8}"
    elif _is_scale(destination.key, state):
        allowed = SCALE_DTYPES if target == torch.float32 else ("F8_E8M0",)
        if info.dtype not in allowed:
            return f"dtype {info.dtype}, expected a scale in {' or '.join(allowed)}"
        if fits_scale(info.shape, destination.shape):
            return None
        if len(info.shape) == len(destination.shape) and 1 in (info.shape[-1], destination.shape[-1]):
            wanted = "channel" if info.shape[-1] == 1 else "block"
            return f"shape {info.shape}, expected {destination.shape}; make the module with weight_scales={wanted!r}"
    elif info.dtype == FP8:
        return (
            f"{FP8}, but the model's module is not FP8; put FP8Linear (replace_linears) or GroupedExperts there first"
        )
    elif not (target.is_floating_point and info.dtype in FLOATS) and DTYPES.get(info.dtype) != target:
        return f"dtype {info.dtype}, expected {target}"
    if info.shape != destination.shape:
        return f"shape {info.shape}, expected {destination.shape}"
    return None


def _way_out(destination: Destination) -> str:
    """How to make a model's FP8 module and an unquantized tensor go together."""
    way_out = "quantize the checkpoint first (fp8moe quantize)"
    module, _, parameter = destination.key.rpartition(".")
    if module and parameter == "weight":
        way_out += f", or leave the module out with replace_linears(skip=[..., {module.rpartition('.')[2]!r}])"
    return way_out


def _is_scale(key: str, state: Mapping[str, Tensor]) -> bool:
    weight = state.get(key.removesuffix(SCALE)) if key.endswith(SCALE) else None
    return weight is not None and weight.dtype == torch.float8_e4m3fn


def scale_problems(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """The tensors among these scales, all of `SCALE_DTYPES`, that hold a NaN, an infinity, zero or a negative value.

    The scale of a block of zeros is positive, too. Memory holds one scale at a time: 1/16384 of its weight's elements.
    """
    problems, stored = [], {}
    for name in names:
        info = checkpoint.tensors[name]
        if isinstance(info, Derived):
            name, info, _ = info.scale
        stored[name] = info
    for name, values in checkpoint.read_unmapped(stored):
        found = _no_scales(as_float(values))
        if found:
            problems.append(f"{name}: has {found}, expected scales that are finite and positive")
    return sorted(problems)


def _no_scales(values: Tensor) -> str:
    """How many values are NaN, infinite, zero or negative; empty if none is."""
    if ((values > 0) & (values < torch.inf)).all():
        return ""
    counts = {
        "NaN": values.isnan(),
        "infinite": values.isinf(),
        "zero": values == 0,
        "negative": (values < 0) & values.isfinite(),
    }
    numbers = [f"{count} {kind}" for kind, where in counts.items() if (count := int(where.sum()))]
    return f"{', '.join(numbers)} of {values.numel()} values"


def _check_tied(checkpoint: Checkpoint, plan: LoadPlan, state: Mapping[str, Tensor]) -> None:
    """Find tensors that differ, but that the model ties together."""
    for keys in ties(state):
        names = [plan.sources[key][WHOLE] for key in keys if WHOLE in plan.sources.get(key, ())]
        for name in names[1:]:
            if not _equal(checkpoint, names[0], name):
                plan.problems.append(f"{name}: differs from {names[0]}, {TIED}")


def ties(state: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each tensor."""
    keys = defaultdict(list)
    for key, value in state.items():
        keys[id(value)].append(key)
    return list(keys.values())


def _equal(checkpoint: Checkpoint, *names: str) -> bool:
    with checkpoint.reader() as reader:
        return torch.equal(*(reader.read(name).flatten().view(torch.uint8) for name in names))


def missing(plan: LoadPlan, state: Mapping[str, Tensor]) -> list[str]:
    """What the model has, and no tensor of the plan is for."""
    problems = []
    for keys in ties(state):
        found = next((key for key in keys if plan.sources.get(key)), None)
        if found is not None:
            problems += _missing_parts(found, plan.sources[found], state[found])
        elif keys[0].removesuffix(SCALE) not in plan.wrong:
            also = f" (also called {', '.join(keys[1:])})" if keys[1:] else ""
            problems.append(f"{keys[0]}: missing{also}")
    return problems


def _missing_parts(key: str, parts: Mapping[Part, str], target: Tensor) -> list[str]:
    """What experts stored one by one lack of the fused parameter."""
    if WHOLE in parts:
        return [
            f"{name}: the checkpoint has it also in {parts[WHOLE]}" for part, name in parts.items() if part != WHOLE
        ]
    experts, rows = target.shape[:2]
    module, _, parameter = key.rpartition(".")
    suffix = "weight" + (SCALE if parameter.endswith(SCALE) else "")
    projections = _projections(parameter.removesuffix(SCALE), rows)
    if len(parts) == experts * len(projections):
        return []
    return [
        f"{module}.{expert}.{projection}.{suffix}: missing"
        for expert in range(experts)
        for projection, start in projections.items()
        if Part(expert, start) not in parts
    ]


def _projections(parameter: str, rows: int) -> dict[str, int]:
    """The projections that make up a fused parameter, with the row where each starts."""
    return {GATE: 0, UP: rows // 2} if parameter == GATE_UP else {parameter: 0}
