"""inspect_checkpoint: what a checkpoint directory holds and what is wrong with it, from headers and scales."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from fp8moe.weights.as_blocks import as_blocks
from fp8moe.weights.expert_names import DOWN, parse_expert, parse_fused
from fp8moe.weights.find_format import Format, Found, examine
from fp8moe.weights.formats import (
    FP8,
    SCALE,
    SCALE_DTYPES,
    TensorSpec,
    fits_scale,
    scale_of,
    scale_shape,
    weight_of,
)
from fp8moe.weights.match import scale_problems
from fp8moe.weights.read import Checkpoint, open_checkpoint
from fp8moe.weights.tensor_layout import fractions, unquantized_matrices
from fp8moe.weights.untrusted import printable


@dataclass(frozen=True)
class Report:
    """What `inspect_checkpoint` found.

    directory; files: how many; tensors: how many; nbytes: of all tensors; fp8_nbytes: of FP8 weights without scales;
    parameters: elements of all tensors but scales; format: of the weights; scale_format: what scales are stored as,
    "float32", "ue8m0", "none" or several; experts: (layers, experts a layer, layout) for each kind; dtypes: bytes by
    safetensors dtype; unquantized: parameters of matrices that are not quantized, largest first, by name with * for
    numbers; problems: everything that is wrong, by name.
    """

    directory: Path
    files: int
    tensors: int
    nbytes: int
    fp8_nbytes: int
    parameters: int
    format: Format
    scale_format: str
    experts: list[tuple[int, int, str]]
    dtypes: dict[str, int]
    unquantized: dict[str, int]
    problems: list[str]

    def __str__(self) -> str:
        """A table of two columns, and the problems below."""
        dtypes = ", ".join(f"{name} {_bytes(size)}" for name, size in self.dtypes.items())
        experts = "; ".join(f"{count} in each of {layers} layers, {how}" for layers, count, how in self.experts)
        loads = "loads" if self.format.loads else "does not load"
        rows = [
            ("format", f"{self.format.name}, {loads}: {self.format.reason}"),
            ("directory", str(self.directory)),
            ("files", f"{self.files}"),
            ("tensors", f"{self.tensors}, {self.parameters / 1e6:,.3f} million parameters"),
            ("bytes", f"{_bytes(self.nbytes)} ({dtypes})"),
            ("FP8 share", f"{self.fp8_nbytes / max(self.parameters, 1):.1%} of the parameters"),
            ("scales", f"{self.format.scales}, in {self.scale_format}"),
            ("experts", experts or "none"),
            ("unquantized", fractions(self.unquantized, self.parameters)),
            ("problems", str(len(self.problems)) if self.problems else "none"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join(printable(line) for line in lines + [f"  {problem}" for problem in self.problems])


def inspect_checkpoint(directory: str | os.PathLike) -> Report:
    """Describe a checkpoint and list its problems: damaged files, scales missing, left over or misshapen, experts
    missing, scales that are NaN, infinite, zero or negative, a format that does not load. Reads headers and scales.

    Raises CheckpointError if there is no checkpoint in ``directory``.
    """
    stored = open_checkpoint(directory)
    found, tensors = examine(stored), stored.tensors
    dtypes = Counter()
    for info in tensors.values():
        dtypes[info.dtype] += info.nbytes
    scales = {weight.scale for weight in found.weights} | found.unused
    codes = {weight.codes for weight in found.weights}
    values = {name: info.spec for name, info in tensors.items() if name not in scales}
    for weight in found.weights:
        values[weight.codes] = TensorSpec(FP8, weight.shape)
    blocks = as_blocks(stored)[0] if found.format.loads else stored
    experts, _ = _experts(blocks)
    problems = _undeclared(found) + block_problems(blocks, found) if found.format.loads else [found.format.reason]
    return Report(
        directory=stored.directory,
        files=len(stored.files),
        tensors=len(tensors),
        nbytes=sum(dtypes.values()),
        fp8_nbytes=sum(tensors[name].nbytes for name in codes if tensors[name].dtype == FP8),
        parameters=sum(math.prod(spec.shape) for spec in values.values()),
        format=found.format,
        scale_format=_scale_format(found),
        experts=experts,
        dtypes=dict(dtypes.most_common()),
        unquantized=unquantized_matrices(values),
        problems=[printable(problem) for problem in stored.problems + problems],
    )


def block_problems(blocks: Checkpoint, found: Found) -> list[str]:
    """What is wrong with scales, and which parts of experts are missing."""
    return _scale_problems(blocks, found.unused) + _experts(blocks)[1]


def _undeclared(found: Found) -> list[str]:
    """What other programs would take for unquantized."""
    if found.weights and found.checkpoint.config and not found.checkpoint.declarations:
        return ["config.json: has no quantization_config, but there are FP8 tensors"]
    return []


def _scale_problems(checkpoint: Checkpoint, unused: Set[str]) -> list[str]:
    """List what is wrong with scales, and weights without one."""
    problems, fitting = [], []
    scales: dict[str, list[str]] = defaultdict(list)
    for name, info in checkpoint.tensors.items():
        scale = scale_of(name, checkpoint.tensors) if info.dtype == FP8 else None
        if scale is not None:
            scales[scale].append(name)
    with_scale = {weight for weights in scales.values() for weight in weights}
    for name, info in checkpoint.tensors.items():
        if name in scales:
            first = scales[name][0]
            expected = _expected_shape(name, scales[name], checkpoint)
            channels = (*checkpoint.tensors[first].shape[:-1], 1)
            fits = expected is not None and (fits_scale(info.shape, expected) or info.shape == channels)
            partial = checkpoint.incomplete and len(scales[name]) > 1
            if info.dtype not in SCALE_DTYPES:
                problems.append(f"{name}: dtype {info.dtype}, expected {', '.join(SCALE_DTYPES)}")
            elif fits:
                fitting.append(name)
            if not fits and not partial:
                shape = checkpoint.tensors[first].shape
                problems.append(f"{name}: shape {info.shape}, expected {expected} for {first} {shape}")
        elif checkpoint.incomplete:
            continue  # it may be in the file that is missing
        elif info.dtype == FP8 and name not in with_scale:
            problems.append(f"{name}: {FP8} without a scale")
        elif name in unused:
            continue
        elif name.endswith(SCALE) or (info.dtype == "F8_E8M0" and weight_of(name)):
            weight = checkpoint.tensors.get(weight_of(name))
            if weight is None:
                problems.append(f"{name}: a scale without a weight")
            elif weight.dtype != FP8:
                problems.append(f"{name}: the scale of a weight in {weight.dtype}")
    return problems + scale_problems(checkpoint, fitting)


def _expected_shape(scale: str, weights: list[str], checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """The shape that the scale of these weights should have, None where none fits."""
    shape = checkpoint.tensors[weights[0]].shape
    if len(shape) < 2:
        return None
    rows, *columns = expected = scale_shape(weights[0], shape)
    experts = [parse_expert(weight) for weight in weights]
    if None in experts or parse_expert(scale) is not None:
        return expected
    # The fused scale of experts that are stored one by one.
    projections = len({expert.projection for expert in experts})
    return max(expert.expert for expert in experts) + 1, projections * rows, *columns


def _scale_format(found: Found) -> str:
    formats = set()
    for name in {weight.scale for weight in found.weights} - {None}:
        dtype = found.checkpoint.tensors[name].dtype
        if dtype == "F8_E8M0":
            formats.add("ue8m0")
        elif found.declared is not None and found.declared.power_of_two:
            formats.add(f"ue8m0 in {dtype}")
        else:
            formats.add({"F32": "float32", "BF16": "bfloat16"}.get(dtype, dtype))
    return ", ".join(sorted(formats)) or "none"


def _experts(checkpoint: Checkpoint) -> tuple[list[tuple[int, int, str]], list[str]]:
    """How many layers have how many experts in which layout, and experts that lack a projection."""
    separate: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # module -> projection -> experts
    kinds: Counter[tuple[int, str]] = Counter()
    for name, info in checkpoint.tensors.items():
        fused = parse_fused(name, info.shape)
        if fused is not None and fused.projection == DOWN:
            kinds[info.shape[0], "fused"] += 1
        expert = parse_expert(name)
        if expert is not None and not expert.is_scale:
            separate[expert.module][expert.projection].add(expert.expert)
    problems = []
    for module, projections in separate.items():
        count = max(max(experts) for experts in projections.values()) + 1
        kinds[count, "separate"] += 1
        if not checkpoint.incomplete:
            for projection, experts in projections.items():
                problems += [f"{module}.{missing}: has no {projection}" for missing in _gaps(experts, count)]
    return [(layers, count, how) for (count, how), layers in sorted(kinds.items())], problems


def _gaps(numbers: Iterable[int], count: int) -> Iterator[str]:
    """What ``numbers`` lacks of range(count): "3", or "5-9" for several in a row, of which there may be any number."""
    first = 0
    for number in sorted({*numbers, count}):
        if first < number:
            yield f"{first}" if first + 1 == number else f"{first}-{number - 1}"
        first = number + 1


def _bytes(size: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
