"""Inspect a checkpoint directory: report what it holds and what is wrong with it, reading only headers and scales."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8moe.weights.formats import SCALE_DTYPES, fits_scale, fractions, scale_grid, unquantized_matrices
from fp8moe.weights.names import DOWN, SCALE, SCALE_ROLE, WEIGHT
from fp8moe.weights.place import scale_problems
from fp8moe.weights.source import FP8, TensorSpec, printable
from fp8moe.weights.stored import Format, StoredWeight, Weights, int4_problems, open_weights
from fp8moe.weights.views import in_blocks


@dataclass(frozen=True)
class Report:
    """The result of `inspect_checkpoint`.

    files, tensors: how many there are. nbytes: bytes of all tensors. fp8_nbytes: bytes of FP8 weights without scales.
    parameters: elements of all tensors except scales. format: how the weights are quantized. scale_format: how scales
    are stored: "float32", "ue8m0", "none" or several of these. experts: a list of (number of layers, experts per layer,
    layout). dtypes: bytes by safetensors dtype. unquantized: element counts of unquantized matrices by name (numbers in
    names become *), largest first. problems: everything that is wrong, each with the name of a tensor or file.
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
        """Format the report as a table of two columns, with the problems below."""
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
    """Describe a checkpoint and list its problems, reading only headers and scales.

    Problems are damaged files; missing scales; scales that belong to no FP8 weight, have a wrong shape, or hold a NaN,
    an infinity, zero or a negative value; missing experts; and a format that fp8moe does not load.

    directory: the checkpoint's directory, or the name of a model on the Hugging Face Hub, which is then downloaded.
    Raises CheckpointError if there is no checkpoint.
    """
    weights = open_weights(directory)
    checkpoint = weights.checkpoint
    dtypes = Counter()
    for info in checkpoint.tensors.values():
        dtypes[info.dtype] += info.nbytes
    scales = {weight.scale.name for weight in weights.quantized if weight.scale is not None} | weights.unused
    values = {
        weight.name.text: TensorSpec(FP8 if weight.coded else weight.dtype, weight.shape)
        for weight in weights.stored
        if weight.codes.name not in scales
    }
    experts, _ = _experts(weights)
    problems = [weights.format.reason]
    if weights.format.loads:
        problems = block_problems(weights, in_blocks(weights)) + int4_problems(weights)
        # Without a quantization_config, other libraries would read FP8 weights as unquantized ones.
        if weights.quantized and checkpoint.config and not checkpoint.declarations:
            problems.insert(0, "config.json: has no quantization_config, but there are FP8 tensors")
    return Report(
        directory=checkpoint.directory,
        files=len(checkpoint.files),
        tensors=len(checkpoint.tensors),
        nbytes=sum(dtypes.values()),
        fp8_nbytes=sum(weight.codes.nbytes for weight in weights.quantized if weight.codes.dtype == FP8),
        parameters=sum(math.prod(spec.shape) for spec in values.values()),
        format=weights.format,
        scale_format=_scale_format(weights),
        experts=experts,
        dtypes=dict(dtypes.most_common()),
        unquantized=unquantized_matrices(values),
        problems=[printable(problem) for problem in checkpoint.problems + problems],
    )


def block_problems(weights: Weights, blocks: Iterable[StoredWeight]) -> list[str]:
    """List wrong scales, FP8 weights without a scale, and missing projections of experts.

    blocks: the weights as views that `in_blocks` returns.
    """
    checkpoint = weights.checkpoint
    problems, fitting, shared = [], [], defaultdict(list)
    for weight in weights.quantized:
        if weight.shared:
            shared[weight.scale.name].append(weight)
    for weight in blocks:
        text, scale = weight.name.text, weight.scale
        if weight.shared or text in shared:
            continue
        if scale is not None:
            if weight.scale_dtype not in SCALE_DTYPES:
                problems.append(f"{scale.name}: dtype {scale.dtype}, expected {', '.join(SCALE_DTYPES)}")
            elif weight.kind is not None:
                fitting += weight.scales
            if weight.kind is None:
                expected = scale_grid(weight.name.matrices, weight.shape) if len(weight.shape) > 1 else None
                problems.append(f"{scale.name}: shape {scale.shape}, expected {expected} for {text} {weight.shape}")
        elif checkpoint.incomplete:
            continue  # the scale may be in a shard that is missing or damaged
        elif weight.coded and weight.dtype == FP8:
            problems.append(f"{text}: {FP8} without a scale")
        elif weight.name.role == SCALE_ROLE and text not in weights.unused:
            other = checkpoint.tensors.get(weight.name.weight)
            if other is None and (text.endswith(SCALE) or weight.dtype == "F8_E8M0"):
                problems.append(f"{text}: a scale without a weight")
            elif other is not None and other.dtype != FP8:
                problems.append(f"{text}: the scale of a weight in {other.dtype}")
    for name, parts in shared.items():
        scale, first = checkpoint.tensors[name], parts[0]
        expected = None
        if len(first.shape) > 1:
            *_, rows, columns = scale_grid(1, first.shape)
            projections = len({part.name.projection for part in parts})
            expected = max(part.name.expert for part in parts) + 1, projections * rows, columns
        fits = expected is not None and fits_scale(scale.shape, expected)
        if scale.dtype not in SCALE_DTYPES:
            problems.append(f"{name}: dtype {scale.dtype}, expected {', '.join(SCALE_DTYPES)}")
        elif fits:
            fitting.append(scale)
        if not fits and not checkpoint.incomplete:
            problems.append(f"{name}: shape {scale.shape}, expected {expected} for {first.name.text} {first.shape}")
    return problems + scale_problems(checkpoint, fitting) + _experts(weights)[1]


def _scale_format(weights: Weights) -> str:
    formats = set()
    for dtype in {weight.scale.dtype for weight in weights.quantized if weight.scale is not None}:
        if dtype == "F8_E8M0":
            formats.add("ue8m0")
        elif weights.declared is not None and weights.declared.power_of_two:
            formats.add(f"ue8m0 in {dtype}")
        else:
            formats.add({"F32": "float32", "BF16": "bfloat16"}.get(dtype, dtype))
    return ", ".join(sorted(formats)) or "none"


def _experts(weights: Weights) -> tuple[list[tuple[int, int, str]], list[str]]:
    """Return a list of (number of layers, experts per layer, layout), and problem lines for missing projections."""
    separate: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # experts by module, projection
    kinds: Counter[tuple[int, str]] = Counter()
    for weight in weights.stored:
        name = weight.name
        if name.role != WEIGHT or not weight.is_expert:
            continue
        if name.expert is not None:
            separate[name.module][name.projection].add(name.expert)
        elif name.projection == DOWN:
            kinds[weight.shape[0], "fused"] += 1
    problems = []
    for module, projections in separate.items():
        count = max(max(experts) for experts in projections.values()) + 1
        kinds[count, "separate"] += 1
        if not weights.checkpoint.incomplete:
            for projection, experts in projections.items():
                problems += [f"{module}.{missing}: has no {projection}" for missing in _gaps(experts, count)]
    return [(layers, count, how) for (count, how), layers in sorted(kinds.items())], problems


def _gaps(numbers: Iterable[int], count: int) -> Iterator[str]:
    """Yield the numbers of range(count) that ``numbers`` lacks: "3", or "5-9" for several in a row."""
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
