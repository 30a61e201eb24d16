"""Quantize and convert checkpoints shard by shard: plan the outputs first, then read, compute and write each."""

import importlib.util
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.layers.replaced import DEFAULT_SKIP, as_patterns, matches
from fp8moe.quant.checks import check_scale_format
from fp8moe.quant.formats import FP8Tensor, PackedTensor, as_float
from fp8moe.quant.quantize import dequantize
from fp8moe.runtime.progress import still_running
from fp8moe.weights.formats import low_fp8_fraction, packed_config, quantization_config
from fp8moe.weights.inspect import block_problems
from fp8moe.weights.names import CHANNEL_SCALE, DOWN, GATE_UP, WEIGHT, Name
from fp8moe.weights.place import provider
from fp8moe.weights.source import (
    CONFIG,
    DECLARATIONS,
    HF_QUANT_CONFIG,
    INDEX,
    MAX_BYTES,
    Checkpoint,
    CheckpointError,
    TensorSpec,
    printable,
)
from fp8moe.weights.stored import INTERLEAVED, StoredWeight, Weights, experts_of_their_own, open_weights
from fp8moe.weights.views import (
    as_values,
    bias_in_rows,
    in_blocks,
    in_four_bits,
    in_rows,
    inexact,
    inexact_problems,
    quantized,
)
from fp8moe.weights.write import into_directory, json_bytes

_QUANTIZED_DTYPES = ("BF16", "F16", "F32")
_ROUNDED = ("fp8-channel", "int4", "nvfp4")  # kinds of weights that blocks do not hold exactly
_COMPANIONS = (".bpe", ".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt")
_TEMPLATES = "additional_chat_templates"  # a directory of tokenizer files
_LICENSES = ("LICENSE", "NOTICE", "USE_POLICY")

Take = Callable[[StoredWeight, Tensor, FP8Tensor | PackedTensor], None]
"""A callback that gets a weight, one of its matrices, and the quantized matrix; called for every matrix."""


def _ignore(weight: StoredWeight, values: Tensor, made: FP8Tensor | PackedTensor) -> None:
    """Accept any matrix: the `Take` that does nothing."""


def _check_finite(weight: StoredWeight, values: Tensor, made: FP8Tensor | PackedTensor) -> None:
    """Raise CheckpointError if a matrix holds a NaN or an infinity."""
    if not as_float(made.scale).isfinite().all():  # a NaN or an infinity makes its block's scale non-finite
        count = values.numel() - int(values.isfinite().sum())
        raise CheckpointError(
            f"cannot quantize {weight.codes.file}",
            [
                f"{weight.name.text}: {count} values are NaN or infinite, expected finite weights; "
                "allow_nonfinite=True (--allow-nonfinite) goes on with them"
            ],
        )


@dataclass
class OutputPlan:
    """What to write for an unquantized checkpoint.

    quantized: maps the source name of each weight that becomes FP8 to its name in the output.
    unconverted: further modules to list in modules_to_not_convert; modules whose weights are written unquantized are
        listed anyway.
    kept: maps each module that was to be quantized, but stays unquantized, to the reason.
    notes: other lines for the user.
    experts: the format of experts; see `quantize_checkpoint`.
    """

    weights: Weights
    quantized: dict[str, Name]
    scale_format: str
    device: torch.device
    unconverted: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    experts: str = "fp8"

    def outputs(self, take: Take = _ignore) -> list[StoredWeight]:
        """Return views of the weights to write, in the order of the source."""
        in_rows = self.weights.interleaved and self.experts == "fp8"
        in_turns = {f"{text}_bias" for text in self.quantized} if in_rows else ()
        outputs = []
        for weight in self.weights.stored:
            name = self.quantized.get(weight.name.text)
            if name is not None and weight.is_expert and self.experts != "fp8":
                weight = in_four_bits(weight, self.experts, device=self.device, take=partial(take, weight))
            elif name is not None:
                seen = as_rows(weight, self.weights)._replace(name=name)
                weight = quantized(seen, scale_format=self.scale_format, device=self.device, take=partial(take, weight))
                if self.experts != "fp8":  # compressed-tensors' name for scales of blocks
                    data, scale = weight.specs().values()
                    weight = weight._replace(layout={name.text: data, f"{name.text}{CHANNEL_SCALE}": scale})
            elif weight.name.text in in_turns and weight.name.projection == GATE_UP and len(weight.shape) == 2:
                weight = bias_in_rows(weight)
            outputs.append(weight)
        return outputs

    def quantization_config(self, outputs: Iterable[StoredWeight]) -> dict:
        if self.experts != "fp8":
            layout = {text: spec for weight in outputs for text, spec in weight.specs().items()}
            return packed_config(layout, in_turns=self.weights.interleaved)
        return quantization_config(
            ((weight.name, TensorSpec(weight.dtype, weight.shape)) for weight in outputs),
            self.scale_format,
            self.unconverted,
        )

    def lines(self) -> list[str]:
        """Return the notes, and a line for each reason in ``kept`` with its modules (layer numbers become *)."""
        lines = list(self.notes)
        for reason in dict.fromkeys(self.kept.values()):
            modules = (re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, why in self.kept.items() if why == reason)
            names = ", ".join(f"{name} ({count})" for name, count in Counter(modules).items())
            lines.append(f"not quantized: {names}: {reason}")
        return lines


def as_rows(weight: StoredWeight, weights: Weights) -> StoredWeight:
    """Return ``in_rows(weight)`` for fused experts of models that interleave gate and up; else the weight itself."""
    return in_rows(weight) if weights.interleaved and len(weight.shape) == 3 else weight


EXPERTS = ("fp8", "mxfp4", "int4", "int4-32")
"""The formats to which `quantize_checkpoint` quantizes experts. NVFP4 is read, not written from unquantized weights."""


@torch.inference_mode(False)
def quantize_checkpoint(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    scale_format: str = "float32",
    experts: str = "fp8",
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
    force: bool = False,
) -> None:
    """Quantize a bfloat16, float16 or float32 checkpoint to FP8 with 128x128 blocks, shard by shard.

    Two-dimensional weights (X.weight, with the scale in X.weight_scale_inv) and fused experts (experts.gate_up_proj
    (E, 2I, H), up_proj or down_proj, with experts.gate_up_proj_scale_inv...) are quantized; gate and up of fused
    experts have separate blocks. Other tensors are copied. Weights that transformers could not load in FP8 are copied,
    too, and a warning names them. GPT-OSS's experts, (E, H, 2I) and (E, I, H) with gate and up interleaved, and their
    biases are reordered like the experts of other models: `load_model` loads them, vLLM does not. Every tensor stays in
    its shard and keeps its name, with one exception: fused experts that transformers renames when loading get their
    names in transformers' model. The index is rewritten, config.json gets a quantization_config, and the tokenizer,
    generation settings and other small text files are copied.

    src_dir: has model.safetensors, or model.safetensors.index.json and its shards; or a name on the Hugging Face Hub,
        from where it is downloaded. Links are followed only within the directory and, in the hub's cache, to the blobs
        of the same repository.
    dst_dir: created if needed, and locked while this runs. A shard gets its final name only when it is complete and
        synced. The header of a shard records the size and time of the source shard, so a rerun skips finished shards.
    skip: fnmatch patterns of modules to leave unquantized, matched against the qualified name
        ("model.layers.3.mlp.gate") and its last part ("gate").
    scale_format: "float32", or "ue8m0" for powers of two in one byte (float8_e8m0fnu).
    experts: "fp8"; or "mxfp4", "int4" with groups of 128, or "int4-32", to round experts to four bits, as `load_model`
        keeps them. They are stored as in compressed-tensors, with the scales of blocks beside them in X.weight_scale;
        those of GPT-OSS as published, beside unquantized linears.
    device: where to quantize; by default a GPU if there is one. The result is the same everywhere.
    allow_nonfinite: accept weights that hold a NaN or an infinity, which make their blocks useless.
    force: write to a directory that holds other files. Those with the name of an output are overwritten, and a
        model.safetensors or index that would be read instead of the outputs is deleted; all others stay.

    Memory holds one tensor at a time, or one expert of fused experts.

    Warns (UserWarning) of links and large files that were not copied, and if less than half of the parameters in
    matrices became FP8.

    Raises CheckpointError for a source that is damaged or quantized already, has nothing to quantize, or has fused
    experts in another layout; for a weight with a NaN or an infinity; for patterns that skip only some of the weights
    of a layer's experts; and for a destination with files that this run would not write. Raises ValueError for unknown
    options, for patterns outside DEFAULT_SKIP that match nothing, and while another run writes to dst_dir.
    """
    check_scale_format(scale_format)
    if experts not in EXPERTS:
        raise ValueError(f"experts: expected one of {EXPERTS}, got {experts!r}")
    if experts != "fp8" and scale_format != "float32":
        raise ValueError(f"scale_format: expected 'float32' beside experts in four bits, got {scale_format!r}")
    skip = as_patterns("skip", skip)
    weights, target = open_weights(src_dir), Path(dst_dir)
    directory = weights.checkpoint.directory
    _check_target(target, weights.checkpoint)
    modules = {module for weight in weights.stored for module in weight.name.modules}
    for pattern in skip:
        if pattern not in DEFAULT_SKIP and not any(matches(module, (pattern,)) for module in modules):
            raise ValueError(f"skip: {pattern!r} matches no module with a weight in {directory}")
    wanted = [
        weight
        for weight in weights.stored
        if weight.dtype in _QUANTIZED_DTYPES and not any(matches(module, skip) for module in weight.name.modules)
    ]
    names = {weight.name.text: weight.name for weight in wanted if _is_matrix(weight)}
    problems = weights.checkpoint.problems + _source_problems(weights, names)
    problems += _four_bits_problems(weights, names, experts) if experts != "fp8" and not problems else []
    if problems:
        raise CheckpointError(f"cannot quantize {directory}", problems)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = OutputPlan(weights, names, scale_format, device)
    with still_running("checking what transformers can load"):
        _fit(plan, {weight.name.text: weight for weight in wanted})
    if not plan.quantized:
        raise CheckpointError(f"cannot quantize {directory}, nothing would become FP8", plan.lines())
    for line in plan.lines():
        _warn(line)

    plan.experts = experts  # transformers was asked about experts in FP8
    if experts != "fp8" and not any(name.projection for name in plan.quantized.values()):
        raise CheckpointError(f"cannot quantize {directory}, no experts would be in four bits", plan.lines())
    outputs = plan.outputs(_ignore if allow_nonfinite else _check_finite)
    _write(weights.checkpoint, target, outputs, plan.quantization_config(outputs), force)
    warning = low_fp8_fraction({text: spec for weight in outputs for text, spec in weight.specs().items()})
    if warning:
        _warn(warning)


@torch.inference_mode(False)
def convert_checkpoint(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    *,
    requantize: bool = False,
    device: torch.device | str | None = None,
    force: bool = False,
) -> float | None:
    """Convert a quantized checkpoint of another format to FP8 with 128x128 blocks, shard by shard.

    Values stay the same, except that MXFP8 values below E4M3's smallest subnormal are rounded: by at most 4.1e-6 of the
    largest value of the block. Names stay the same, and scales are called weight_scale_inv. Static scales of
    activations, keys and values are left out.

    src_dir: a checkpoint in any format that `find_format` says loads; or its name on the Hugging Face Hub.
    requantize: also accept weights with per-channel scales, INT4, NVFP4, and MXFP4 whose exponents E4M3 cannot hold;
        the values of these weights are quantized again.
    device: where to quantize; by default a GPU if there is one.
    dst_dir, force: as for `quantize_checkpoint`.
    Returns the relative Frobenius error that requantizing added, over all requantized weights; None if there are none.

    Raises CheckpointError for a source that is damaged or unquantized, or has values that blocks cannot hold.
    """
    weights, target = open_weights(src_dir), Path(dst_dir)
    _check_target(target, weights.checkpoint)
    what = f"cannot convert {weights.checkpoint.directory}"
    weights.check(what)
    if not weights.quantized:
        raise CheckpointError(what, [f"{weights.format.reason}; quantize it instead"])
    rounded = {weight.name.text: weight for weight in weights.quantized if weight.kind in _ROUNDED}
    if rounded and not requantize:
        name = next(iter(rounded.values())).codes.name
        why = f"{weights.format.reason} ({name}), which blocks cannot hold; requantize=True (--requantize) rounds it"
        raise CheckpointError(what, [why])
    blocks = in_blocks(weights)
    problems = weights.checkpoint.problems + weights.checkpoint.unknown_dtypes + block_problems(weights, blocks)
    problems += inexact_problems(weights) if not requantize and not problems else ()
    if problems:
        raise CheckpointError(what, problems)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")  # sums of squared errors, and of squared values

    def add(weight: StoredWeight, values: Tensor, made: FP8Tensor) -> None:
        _check_finite(weight, values, made)
        whole = values.double()
        difference = dequantize(made, dtype=torch.float32).double() - whole
        squares.add_(torch.stack([difference.square().sum(), whole.square().sum()]).cpu())

    rounded |= {weight.name.text: weight for weight in inexact(weights)} if requantize else {}
    make = partial(quantized, scale_format="float32", device=device)
    outputs = [
        make(as_values(found), take=partial(add, found)) if (found := rounded.get(weight.name.text)) else weight
        for weight in blocks
        if weight.name.text not in weights.unused
    ]
    said = quantization_config(
        ((weight.name, TensorSpec(weight.dtype, weight.shape)) for weight in outputs), "float32", ()
    )
    _write(weights.checkpoint, target, outputs, said, force)
    return float((squares[0] / squares[1].clamp(min=torch.finfo(torch.float64).tiny)).sqrt()) if rounded else None


def _check_target(target: Path, source: Checkpoint) -> None:
    if target.resolve() == source.directory.resolve():
        raise ValueError(f"dst_dir: expected another directory than src_dir, got {target}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"dst_dir: expected a directory, but {target} is a file")


def _write(source: Checkpoint, target: Path, outputs: list[StoredWeight], quantization: dict, force: bool) -> None:
    """Write the outputs, and the configuration, tokenizer and other small files of the source beside them."""
    contents, left_out = _companions(source.directory)
    contents[CONFIG] = json_bytes(_undeclared(source.config) | {"quantization_config": quantization})
    into_directory(outputs, source, target, contents, force=force)
    if left_out:
        _warn(f"not copied from {source.directory}: {', '.join(left_out)}")


def _fit(plan: OutputPlan, wanted: dict[str, StoredWeight]) -> None:
    """Limit a plan to weights that transformers can load in FP8, or add a note why the weights were not checked."""
    if importlib.util.find_spec("transformers") is None:
        plan.notes.append("not checked against transformers, which is not installed")
    elif "model_type" not in plan.weights.checkpoint.config:
        plan.notes.append("not checked against transformers: config.json has no model_type")
    else:
        provider("fit").fit_to_transformers(plan, wanted)


def _undeclared(config: dict) -> dict:
    """Return a copy of a config without the keys, at any level, that declare the source's quantization."""
    kept = {name: value for name, value in config.items() if name not in DECLARATIONS}
    if "expert_dtype" in kept:  # the value is "fp4" in DeepSeek-V4
        kept["expert_dtype"] = "fp8"
    return {name: _undeclared(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _warn(text: str) -> None:
    """Issue a warning at the line that called `quantize_checkpoint` or `convert_checkpoint`."""
    warnings.warn(printable(text), stacklevel=3)


def _is_matrix(weight: StoredWeight) -> bool:
    """Return whether a weight is a matrix, or fused experts with one matrix per expert."""
    return weight.name.role == WEIGHT and len(weight.shape) == (2 if weight.name.text.endswith(".weight") else 3)


def _source_problems(weights: Weights, quantized: dict[str, Name]) -> list[str]:
    source, found = weights.checkpoint, weights.declared
    if found is not None or weights.format.name != "bf16":
        says = f"{found.where} says {found.method}" if found else weights.format.reason
        return [f"the checkpoint is quantized already: {says}; start from the unquantized one"]
    if source.incomplete:
        return []  # what seems missing may be in the shard that cannot be read
    problems = [
        f"{file}: is a link to outside of the checkpoint; put the file itself there"
        for file in (CONFIG, INDEX, *source.files)
        if _leaves(source.directory / file)
    ] + source.unknown_dtypes
    if not quantized:
        problems.append("no weight would become FP8: skip leaves no matrix in BF16, F16 or F32, and no fused experts")
    refusal = experts_of_their_own(source.config)
    experts = [weight.name for weight in weights.stored if weight.is_expert and weight.name.text in quantized]
    if refusal is not None and experts:
        return [*problems, f"{experts[0].module}: {refusal}; leave them as they are: skip 'experts'"]
    states = defaultdict(set)  # by module of experts: {True} if all weights will be FP8, {False} if none, both if some
    for weight in weights.stored:
        if weight.is_expert and weight.name.role == WEIGHT:
            states[weight.name.module].add(weight.name.text in quantized)
    for module in sorted(module for module, found in states.items() if len(found) > 1):
        problems.append(f"{module}: some of these experts' weights would be FP8, some not; skip {module!r} or none")
    for weight in weights.stored:
        if weight.name.text in quantized:
            if weight.name.scale in source.tensors:
                problems.append(f"{weight.name.scale}: this name is needed for the scale of {weight.name.text}")
            if len(weight.shape) == 3 and weight.name.projection != DOWN:
                problems += _fused_problems(as_rows(weight, weights), weights)
    return problems


def _four_bits_problems(weights: Weights, quantized: dict[str, Name], experts: str) -> list[str]:
    """List what keeps the weights to quantize from being stored with experts in four bits."""
    wanted = [weight for weight in weights.stored if weight.name.text in quantized]
    of_experts, problems = [weight for weight in wanted if weight.is_expert], []
    if not of_experts:
        return [f"experts: expected 'fp8' for a checkpoint without experts to quantize, got {experts!r}"]
    if weights.interleaved and experts != "mxfp4":
        problems.append(f"experts: expected 'mxfp4' for experts of {INTERLEAVED}, got {experts!r}")
    if weights.interleaved:
        linears = [weight.name for weight in wanted if not weight.is_expert]
        problems += [
            f"{name.text}: {INTERLEAVED} has unquantized weights beside experts in four bits; skip {name.module!r}"
            for name in linears[:1]
        ]
    for weight in of_experts:
        columns, group = weight.shape[-2 if weights.interleaved else -1], PACKED_WEIGHTS[experts][1]
        if len(weight.shape) == 3 and not weights.interleaved:
            problems.append(f"{weight.name.text}: fused experts, which fp8moe stores in FP8 only")
        elif columns % group:
            problems.append(f"{weight.name.text}: {columns} columns, expected a multiple of {group} for {experts!r}")
    return problems


def _fused_problems(weight: StoredWeight, weights: Weights) -> list[str]:
    """List a problem if the shape of a gate_up or up weight does not match its bias or the down weight."""
    name, shape = weight.name.text, weight.shape
    down_name = f"{weight.name.module}.{DOWN}"
    by_name = {other.name.text: other for other in weights.stored if other.name.module == weight.name.module}
    down, bias = by_name.get(down_name), weights.checkpoint.tensors.get(weight.name.bias)
    if bias is not None and not weights.interleaved:
        return [f"{name}: experts with a bias, where config.json does not say that they are {INTERLEAVED}'s"]
    if down is None:
        odd = weight.name.projection == GATE_UP and shape[1] % 2
        return [f"{name}: shape {shape}, expected as many rows of gate as of up"] if odd else []
    if len(down.shape) != 3:
        return [f"{down_name}: shape {down.shape}, expected three dimensions to go with {name}"]
    experts, hidden, size = as_rows(down, weights).shape
    expected = (experts, 2 * size if weight.name.projection == GATE_UP else size, hidden)
    if shape != expected:
        return [f"{name}: shape {shape}, expected {expected} to go with {DOWN}"]
    if bias is not None and bias.shape != expected[:2]:
        return [f"{weight.name.bias}: shape {bias.shape}, expected {expected[:2]}"]
    return []


def _companions(directory: Path) -> tuple[dict[str, bytes], list[str]]:
    """Read the small files to copy from a checkpoint: tokenizer, generation settings, code and licence.

    config.json and index files are not among them: the new checkpoint has its own. Returns the contents by file name,
    and the names of files that were left out, with the reasons.
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
    return contents, left_out


def _leaves(path: Path) -> bool:
    """Return whether a path is a link that leads outside of its directory.

    In the hub's cache, snapshots/REVISION/FILE is a link to blobs/HASH of the same repository, which counts as inside.
    """
    directory, target = (Path(os.path.realpath(place)) for place in (path.parent, path))
    roots = [directory]
    if directory.parent.name == "snapshots":
        roots.append(directory.parent.parent / "blobs")
    return path.is_symlink() and not any(target.is_relative_to(root) for root in roots)
