"""Quantizes a checkpoint to FP8, shard by shard: what is to be written is planned, then read, quantized and written."""

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.layers.replaced import DEFAULT_SKIP, as_patterns, matches
from fp8moe.quant.checks import check_scale_format
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.runtime.progress import progress, still_running
from fp8moe.weights.as_blocks import as_blocks, as_values, inexact_weights
from fp8moe.weights.expert_names import DOWN, GATE_UP, matrices_of, module_of, parse_expert, parse_fused
from fp8moe.weights.find_format import examine
from fp8moe.weights.formats import (
    DTYPES,
    FP8,
    Layout,
    TensorSpec,
    quantization_config,
    scale_dtype,
    scale_name,
    scale_shape,
)
from fp8moe.weights.gpt_oss import in_rows, is_gpt_oss
from fp8moe.weights.inspect import block_problems
from fp8moe.weights.read import (
    CONFIG,
    DECLARATIONS,
    HF_QUANT_CONFIG,
    INDEX,
    SINGLE,
    Checkpoint,
    CheckpointError,
    Derived,
    TensorInfo,
    open_checkpoint,
    read_header,
)
from fp8moe.weights.resume import Journal, file_checksum, make_room, survey, tidied
from fp8moe.weights.tensor_layout import low_fp8_fraction
from fp8moe.weights.untrusted import MAX_BYTES, printable
from fp8moe.weights.write import Checksum, ShardWriter, Stamp, index_of, json_bytes, write_bytes

_QUANTIZED_DTYPES = ("BF16", "F16", "F32")
_COMPANIONS = (".bpe", ".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt")
_TEMPLATES = "additional_chat_templates"  # a directory of the tokenizer
_LICENSES = ("LICENSE", "NOTICE", "USE_POLICY")


@dataclass(frozen=True)
class OutputPlan:
    """What each tensor of a source becomes.

    quantized: the weights that become FP8, and the names that they have then. unconverted: modules that are to be named
    in modules_to_not_convert, besides those whose tensors say it. error: takes in what quantizing changes, if given.
    """

    source: Checkpoint
    scale_format: str
    device: torch.device
    allow_nonfinite: bool
    quantized: Mapping[str, str]
    unconverted: Set[str] = frozenset()
    error: "AddedError | None" = None

    def outputs(self, name: str) -> Layout:
        """What a tensor of the source becomes."""
        spec, stored = self.source.tensors[name].spec, self.quantized.get(name)
        if stored is None:
            return {name: spec}
        scale = TensorSpec(scale_dtype(self.scale_format), scale_shape(stored, spec.shape))
        return {stored: TensorSpec(FP8, spec.shape), scale_name(stored): scale}

    def shard(self, file: str) -> Layout:
        """What a shard of the source becomes."""
        return {stored: spec for name in self.source.by_file[file] for stored, spec in self.outputs(name).items()}

    @property
    def layout(self) -> Layout:
        """All tensors to be written."""
        return {stored: spec for name in self.source.tensors for stored, spec in self.outputs(name).items()}

    @property
    def quantization_config(self) -> dict:
        return quantization_config(self.layout, self.scale_format, self.unconverted)

    def convert(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """All of a tensor, or one of its experts, as it is stored. Raises CheckpointError for a NaN or an infinity."""
        stored = self.quantized.get(name)
        if stored is None:
            return {name: value}
        info = self.source.tensors[name]
        matrices = value.to(self.device).unflatten(0, (matrices_of(stored, info.shape), -1))
        data, scale = quantize_128x128(matrices, scale_format=self.scale_format)
        if not self.allow_nonfinite and not scale.isfinite().all():  # as is the scale of a block with such a value
            count = value.numel() - int(value.isfinite().sum())
            raise CheckpointError(
                f"cannot quantize {info.file}",
                [
                    f"{name}: {count} values are NaN or infinite, expected finite weights; allow_nonfinite=True "
                    "(--allow-nonfinite) goes on with them"
                ],
            )
        if self.error is not None:
            self.error.add(matrices, FP8Tensor(data, scale))
        scale = scale.flatten(0, 1).cpu().to(DTYPES[scale_dtype(self.scale_format)])
        return {stored: data.flatten(0, 1), scale_name(stored): scale}


class AddedError:
    """The relative Frobenius error of quantized weights against what they were."""

    def __init__(self) -> None:
        self._squares = [0.0, 0.0]

    def add(self, values: Tensor, quantized: FP8Tensor) -> None:
        difference = dequantize(quantized).double() - values.double()
        for index, tensor in enumerate((difference, values.double())):
            self._squares[index] += float(tensor.square().sum())

    @property
    def relative(self) -> float:
        error, whole = self._squares
        return (error / whole) ** 0.5 if whole else 0.0


@dataclass
class Fit:
    """A plan whose result can be loaded.

    kept: why weights that were asked for do not become FP8, by module. notes: what else to tell the user.
    """

    plan: OutputPlan
    kept: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The notes, and one line for each reason, with the modules of all layers in one."""
        lines = list(self.notes)
        for reason in dict.fromkeys(self.kept.values()):
            modules = (re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, why in self.kept.items() if why == reason)
            names = ", ".join(f"{name} ({count})" for name, count in Counter(modules).items())
            lines.append(f"not quantized: {names}: {reason}")
        return lines


FindFit = Callable[[OutputPlan, Set[str]], Fit]
"""Limits a plan to what can be loaded; the second argument names further tensors that may become FP8."""


def quantize(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    find_fit: FindFit,
    *,
    skip: Iterable[str],
    scale_format: str,
    device: torch.device | str | None,
    allow_nonfinite: bool,
    force: bool,
    verify: bool,
) -> None:
    """Quantize a checkpoint as `quantize_checkpoint` does. find_fit: asked what those who load it can have in FP8."""
    check_scale_format(scale_format)
    skip = as_patterns("skip", skip)
    source, target = open_checkpoint(src_dir), Path(dst_dir)
    _check_target(target, source)
    _check_patterns(skip, source)
    wanted = {name for name, info in source.tensors.items() if _may_be_quantized(name, info, skip)}
    quantized = {name: name for name in wanted if _is_weight(name, source.tensors[name])}
    source = in_rows(source, quantized)
    problems = source.problems + _source_problems(source, quantized)
    if problems:
        raise CheckpointError(f"cannot quantize {source.directory}", problems)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with still_running("checking what transformers can load"):
        fit = find_fit(OutputPlan(source, scale_format, device, allow_nonfinite, quantized), wanted)
    plan = fit.plan
    if not plan.quantized:
        raise CheckpointError(f"cannot quantize {source.directory}, nothing would become FP8", fit.lines())
    for line in fit.lines():
        _warn(line)
    _write(plan, target, force=force, verify=verify)
    warning = low_fp8_fraction(plan.layout)
    if warning:
        _warn(warning)


def convert(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    *,
    requantize: bool,
    device: torch.device | str | None,
    force: bool,
    verify: bool,
) -> float | None:
    """Convert a checkpoint as `convert_checkpoint` does."""
    stored, target = open_checkpoint(src_dir), Path(dst_dir)
    _check_target(target, stored)
    found = examine(stored)
    if not found.format.loads:
        raise CheckpointError(f"cannot convert {stored.directory}", [found.format.reason, *stored.problems])
    if not found.weights:
        raise CheckpointError(f"cannot convert {stored.directory}", [f"{found.format.reason}; quantize it instead"])
    channels = [weight.codes for weight in found.weights if weight.kind == "fp8-channel"]
    if channels and not requantize:
        why = (
            f"{found.format.reason} ({channels[0]}), which blocks cannot hold; requantize=True (--requantize) rounds it"
        )
        raise CheckpointError(f"cannot convert {stored.directory}", [why])
    blocks, _ = as_blocks(stored)
    source, values = as_values(found) if requantize else (blocks, set())
    problems = stored.problems + _unknown_dtypes(stored) + block_problems(blocks, found)
    problems += inexact_weights(found) if not requantize and not problems else ()
    if problems:
        raise CheckpointError(f"cannot convert {stored.directory}", problems)
    tensors = {name: info for name, info in source.tensors.items() if name not in found.unused}
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    error = AddedError()
    plan = OutputPlan(
        source=replace(source, tensors=tensors),
        scale_format="float32",
        device=device,
        allow_nonfinite=False,
        quantized={name: name for name in values},
        error=error,
    )
    _write(plan, target, force=force, verify=verify)
    return error.relative if values else None


def _check_target(target: Path, source: Checkpoint) -> None:
    if target.resolve() == source.directory.resolve():
        raise ValueError(f"dst_dir: expected another directory than src_dir, got {target}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"dst_dir: expected a directory, but {target} is a file")


def _write(plan: OutputPlan, target: Path, *, force: bool, verify: bool) -> None:
    """Write a checkpoint, or what an interrupted run has left of it."""
    source = plan.source
    shards = {file: plan.shard(file) for file in source.files}
    companions = _read_companions(source.directory)
    contents = dict(companions.contents)
    contents[CONFIG] = json_bytes(_undeclared(source.config) | {"quantization_config": plan.quantization_config})
    if source.files != [SINGLE]:
        contents[INDEX] = index_of(shards)

    target.mkdir(parents=True, exist_ok=True)
    with Journal(target) as journal:
        found = survey(target, source.directory, shards, contents, journal, verify)
        if found.foreign and not force:
            raise CheckpointError(
                f"cannot write to {target}; give another directory, or force=True (--force) to overwrite",
                found.foreign.values(),
            )
        journal.begin()
        make_room(target, found, shards)
        with tidied(target, shards.keys() | contents.keys()):
            for name in contents.keys() - found.finished - {INDEX}:
                write_bytes(target / name, contents[name])
            total = sum(info.nbytes for info in source.tensors.values())
            with progress(total=total, label="quantizing", unit="B") as bar:
                for file in source.files:
                    if file in found.finished:
                        bar.update(sum(info.nbytes for info in source.by_file[file].values()))
                    else:
                        _write_shard(plan, file, target / file, journal, bar.update)
            if INDEX in contents.keys() - found.finished:
                write_bytes(target / INDEX, contents[INDEX])
    if companions.left_out:
        _warn(f"not copied from {source.directory}: {', '.join(companions.left_out)}")


def _undeclared(config: dict) -> dict:
    """A configuration without entries of another quantization, in its parts either."""
    kept = {name: value for name, value in config.items() if name not in DECLARATIONS}
    if "expert_dtype" in kept:  # of DeepSeek-V4: "fp4"
        kept["expert_dtype"] = "fp8"
    return {name: _undeclared(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _write_shard(
    plan: OutputPlan,
    file: str,
    target: Path,
    journal: Journal,
    advance: Callable[[int], object],
) -> None:
    """Read the tensors of a shard piece by piece, quantize them and write them. advance: told the bytes read."""
    path, tensors = plan.source.directory / file, plan.source.by_file[file]
    status = path.stat()
    made = any(isinstance(info, Derived) for info in tensors.values())
    checksum = file_checksum(path) if made else Checksum(read_header(path).content, tensors)
    with ShardWriter(target, plan.shard(file)) as writer, plan.source.reader() as reader:
        for name in tensors:
            for _, value in reader.pieces(name):
                if isinstance(checksum, Checksum):
                    checksum.update(name, value)
                for stored, output in plan.convert(name, value).items():
                    writer.put(stored, output)
                advance(value.nbytes)
        journal.add(file, Stamp(status.st_size, status.st_mtime_ns, str(checksum)), writer.seal())


def _warn(text: str) -> None:
    """Warn whoever called `quantize_checkpoint`."""
    warnings.warn(printable(text), stacklevel=4)


def _source_problems(source: Checkpoint, quantized: Collection[str]) -> list[str]:
    found = examine(source)
    if found.declared is not None or found.format.name != "bf16":
        says = f"{found.declared.where} says {found.declared.method}" if found.declared else found.format.reason
        return [f"the checkpoint is quantized already: {says}; start from the unquantized one"]
    problems = [
        f"{file}: is a link to outside of the checkpoint; put the file itself there"
        for file in (CONFIG, INDEX, *source.files)
        if _leaves(source.directory / file)
    ] + _unknown_dtypes(source)
    if not quantized:
        problems.append("no weight would become FP8: skip leaves no matrix in BF16, F16 or F32, and no fused experts")
    for module in sorted(_partly_quantized(source, quantized)):
        problems.append(f"{module}: some of these experts' weights would be FP8, some not; skip {module!r} or none")
    for name, info in source.tensors.items():
        if info.dtype == FP8:
            problems.append(f"{name}: is {FP8} already; start from the unquantized checkpoint")
        if name in quantized and scale_name(name) in source.tensors:
            problems.append(f"{scale_name(name)}: this name is needed for the scale of {name}")
        fused = parse_fused(name, info.shape) if name in quantized else None
        if fused is None or fused.projection == DOWN:
            continue
        down, bias = (source.tensors.get(other) for other in (f"{fused.module}.{DOWN}", f"{name}_bias"))
        if bias is not None and not is_gpt_oss(source):
            problems.append(f"{name}: experts with a bias, where config.json does not say that they are GPT-OSS's")
        elif down is not None and len(down.shape) != 3:
            problems.append(f"{fused.module}.{DOWN}: shape {down.shape}, expected three dimensions to go with {name}")
        elif down is not None:
            experts, hidden, size = down.shape
            expected = (experts, 2 * size if fused.projection == GATE_UP else size, hidden)
            if info.shape != expected:
                problems.append(f"{name}: shape {info.shape}, expected {expected} to go with {DOWN}")
            elif bias is not None and bias.shape != expected[:2]:
                problems.append(f"{name}_bias: shape {bias.shape}, expected {expected[:2]}")
        elif fused.projection == GATE_UP and info.shape[1] % 2:
            problems.append(f"{name}: shape {info.shape}, expected as many rows of gate as of up")
    return problems


def _unknown_dtypes(source: Checkpoint) -> list[str]:
    return [f"{name}: unknown dtype {info.dtype}" for name, info in source.tensors.items() if info.dtype not in DTYPES]


def _check_patterns(skip: tuple[str, ...], source: Checkpoint) -> None:
    modules = {module for name in source.tensors for module in _modules(name)}
    for pattern in skip:
        if pattern not in DEFAULT_SKIP and not any(matches(module, (pattern,)) for module in modules):
            raise ValueError(f"skip: {pattern!r} matches no module with a weight in {source.directory}")


def _partly_quantized(source: Checkpoint, quantized: Collection[str]) -> set[str]:
    """Modules of experts of which some weights are to be quantized and some are not."""
    found: dict[str, set[bool]] = defaultdict(set)
    for name, info in source.tensors.items():
        if expert := parse_expert(name):
            found[expert.module].add(name in quantized)
        elif fused := parse_fused(name, info.shape):
            found[fused.module].add(name in quantized)
    return {module for module, states in found.items() if len(states) > 1}


def _modules(name: str) -> set[str]:
    """The module that a weight belongs to, and for one of single experts that of all experts."""
    return {name.removesuffix(".weight"), module_of(name) or ""}


def _may_be_quantized(name: str, info: TensorInfo, skip: tuple[str, ...]) -> bool:
    return info.dtype in _QUANTIZED_DTYPES and not any(matches(module, skip) for module in _modules(name))


def _is_weight(name: str, info: TensorInfo) -> bool:
    return bool(parse_fused(name, info.shape)) or (name.endswith(".weight") and len(info.shape) == 2)


class Companions(NamedTuple):
    """The small files that go along with the weights. left_out: others of their kind, and why."""

    contents: dict[str, bytes]
    left_out: list[str]


def _read_companions(directory: Path) -> Companions:
    """Read the small files of a checkpoint: tokenizer, generation settings, code and licence.

    config.json and indices are not among them: a changed checkpoint has its own.
    """
    contents: dict[str, bytes] = {}
    left_out: list[str] = []
    templates = directory / _TEMPLATES
    inside = sorted(templates.iterdir()) if templates.is_dir() and not _leaves(templates) else []
    for path in [*sorted(directory.iterdir()), *inside]:
        name = str(path.relative_to(directory))
        is_companion = path.suffix in _COMPANIONS or name.startswith(_LICENSES)
        if not is_companion or name in (CONFIG, HF_QUANT_CONFIG) or name.endswith(".index.json"):
            continue
        if _leaves(path):
            left_out.append(f"{name} (a link to outside of the checkpoint)")
        elif not path.is_file():
            if path.is_symlink():
                left_out.append(f"{name} (a link to no file)")
        elif path.stat().st_size > MAX_BYTES:
            left_out.append(f"{name} (more than {MAX_BYTES:,} bytes)")
        else:
            contents[name] = path.read_bytes()
    return Companions(contents, left_out)


def _leaves(path: Path) -> bool:
    """Whether this is a link to outside of its directory.

    The links of a snapshot in the hub's cache lead to the blobs of the same repository: snapshots/REVISION/FILE to
    blobs/HASH. These count as inside.
    """
    directory, target = (Path(os.path.realpath(place)) for place in (path.parent, path))
    roots = [directory]
    if directory.parent.name == "snapshots":
        roots.append(directory.parent.parent / "blobs")
    return path.is_symlink() and not any(target.is_relative_to(root) for root in roots)
