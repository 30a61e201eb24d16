"""quantize_checkpoint: an unquantized checkpoint to FP8, shard by shard."""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from fp8moe.checkpoints.checksum import Checksum, Stamp, bytes_of, header_bytes
from fp8moe.checkpoints.companions import leaves, read_companions
from fp8moe.checkpoints.destination import make_room, survey, tidied
from fp8moe.checkpoints.files import (
    CONFIG,
    DTYPES,
    FP8,
    INDEX,
    SINGLE,
    Checkpoint,
    CheckpointError,
    TensorInfo,
    open_checkpoint,
    read_pieces,
    sections,
)
from fp8moe.checkpoints.fit import Fit, fit_to_transformers
from fp8moe.checkpoints.journal import Journal
from fp8moe.checkpoints.names import (
    DOWN,
    GATE_UP,
    module_of,
    parse_expert,
    parse_fused,
    quantization_config,
    scale_name,
)
from fp8moe.checkpoints.recipe import Recipe
from fp8moe.checkpoints.share import warn_if_hardly_fp8
from fp8moe.checkpoints.untrusted import printable
from fp8moe.checkpoints.write import METADATA, Layout, ShardWriter, index_of, json_bytes, write_bytes
from fp8moe.layers.replaced import as_patterns, matches
from fp8moe.quant.formats import SCALE_FORMATS
from fp8moe.runtime.progress import progress, still_running

DEFAULT_SKIP = (
    *("lm_head", "head", "output_layer", "score", "classifier"),
    *("*embed*", "wte", "wpe", "shared", "*norm"),
    *("gate", "*.gate.*", "router", "*.router.*", "router_gate", "shared_expert_gate"),
    *("weights_proj", "eh_proj"),  # DeepSeek's indexer and multi-token prediction
    "dt_proj",  # of Mamba, which reads the weight itself
)
"""Modules that stay as they are by default: output layers, embeddings, norms, routers, and what DeepSeek's and
transformers' FP8 checkpoints leave unquantized.
"""

_QUANTIZED_DTYPES = ("BF16", "F16", "F32")


def quantize_checkpoint(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    scale_format: str = "float32",
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
    force: bool = False,
    verify: bool = False,
) -> None:
    """Quantize a bfloat16, float16 or float32 checkpoint to FP8 with 128x128 blocks, shard by shard.

    Every weight of two dimensions (X.weight, with its scale in X.weight_scale_inv) and of fused experts
    (experts.gate_up_proj (E, 2I, H), up_proj or down_proj, with experts.gate_up_proj_scale_inv...) is quantized, gate
    and up of fused experts each with blocks of its own; other tensors are copied. What transformers could not load in
    FP8 is copied, too, and a warning names it. Which shard holds what stays the same, and so do names, but for fused
    experts that transformers renames: they get the names in its model. The index is written anew, config.json gets a
    quantization_config, and the tokenizer, generation settings and other small text files are copied.

    src_dir: with model.safetensors, or model.safetensors.index.json and its shards. Links are followed within it, and
        in the hub's cache to the blobs of the same repository.
    dst_dir: made if needed, and locked while this runs. What an interrupted run has finished there is not done again; a
        hidden file lists each finished shard, its source, and the checksums of both. A shard has its final name only
        when it is complete and synced.
    skip: fnmatch patterns of modules that stay as they are, matched with the qualified name
        ("model.layers.3.mlp.gate") and the last part of it ("gate").
    scale_format: "float32", or "ue8m0" for powers of two in one byte (float8_e8m0fnu).
    device: where to quantize; by default a GPU if there is one. The result is the same everywhere.
    allow_nonfinite: go on with weights that hold a NaN or an infinity, which make their blocks useless.
    force: write to a directory that holds other things. Files with the names of this run's are overwritten, and a
        model.safetensors or index that would be read in their place is deleted; all others stay.
    verify: read again what is finished, in both directories. Otherwise files of the same size and time are taken to be
        the same.

    Memory holds one tensor at a time, of fused experts one expert.

    Warns (UserWarning) of links and large files that were left out, and if less than half of the parameters in matrices
    became FP8.

    Raises CheckpointError for a source that is damaged, quantized already, has nothing to quantize or fused experts in
    another layout, for a weight with a NaN or an infinity, for patterns that leave only some of the weights of a
    layer's experts as they are, and for a destination with anything that this run would not write; ValueError for
    unknown options, for patterns outside DEFAULT_SKIP that match nothing, and while another run writes to dst_dir.
    """
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")
    skip = as_patterns("skip", skip)
    source, target = open_checkpoint(src_dir), Path(dst_dir)
    if target.resolve() == source.directory.resolve():
        raise ValueError(f"dst_dir: expected another directory than src_dir, got {target}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"dst_dir: expected a directory, but {target} is a file")
    _check_patterns(skip, source)
    wanted = {name for name, info in source.tensors.items() if _may_be_quantized(name, info, skip)}
    quantized = {name: name for name in wanted if _is_weight(name, source.tensors[name])}
    problems = source.problems + _source_problems(source, quantized)
    if problems:
        raise CheckpointError(f"cannot quantize {source.directory}", problems)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    recipe = Recipe(quantized, scale_format, device, allow_nonfinite)
    with still_running("checking what transformers can load"):
        fit = fit_to_transformers(source, quantized, wanted, lambda fit: _plan(source, recipe, fit))
    if not fit.quantized:
        raise CheckpointError(f"cannot quantize {source.directory}, nothing would become FP8", fit.lines())
    for line in fit.lines():
        warnings.warn(printable(line), stacklevel=2)
    recipe = replace(recipe, quantized=fit.quantized)
    layouts = {file: recipe.layout(tensors) for file, tensors in source.by_file.items()}
    tensors, quantization = _plan(source, recipe, fit)
    contents, left_out = read_companions(source.directory)
    contents[CONFIG] = json_bytes(source.config | {"quantization_config": quantization})
    if source.files != [SINGLE]:
        contents[INDEX] = index_of(layouts)

    target.mkdir(parents=True, exist_ok=True)
    with Journal(target) as journal:
        found = survey(target, source.directory, layouts, contents, journal, verify)
        if found.foreign and not force:
            raise CheckpointError(
                f"cannot write to {target}; give another directory, or force=True (--force) to overwrite",
                found.foreign.values(),
            )
        journal.begin()
        make_room(target, found, layouts)
        with tidied(target, layouts.keys() | contents.keys()):
            for name in contents.keys() - found.finished - {INDEX}:
                write_bytes(target / name, contents[name])
            total = sum(info.nbytes for info in source.tensors.values())
            with progress(total=total, label="quantizing", unit="B") as bar:
                for file in source.files:
                    if file in found.finished:
                        bar.update(sum(info.nbytes for info in source.by_file[file].values()))
                    else:
                        _quantize_shard(source, file, target, recipe, journal, bar.update)
            if INDEX in contents.keys() - found.finished:
                write_bytes(target / INDEX, contents[INDEX])
    if left_out:
        warnings.warn(printable(f"not copied from {source.directory}: {', '.join(left_out)}"), stacklevel=2)
    warn_if_hardly_fp8(tensors)


def _plan(source: Checkpoint, recipe: Recipe, fit: Fit) -> tuple[Layout, dict]:
    """All tensors to be written, and the quantization_config."""
    layout = replace(recipe, quantized=fit.quantized).layout(source.tensors)
    return layout, quantization_config(layout, recipe.scale_format == "ue8m0", fit.unconverted)


def _quantize_shard(
    source: Checkpoint, file: str, target: Path, recipe: Recipe, journal: Journal, advance: Callable[[int], object]
) -> None:
    path, tensors = source.directory / file, source.by_file[file]
    status = path.stat()
    checksum = Checksum(header_bytes(path), tensors)
    with (
        ShardWriter(target / file, recipe.layout(tensors), METADATA) as writer,
        safe_open(path, framework="pt") as reader,
    ):
        for name, info in tensors.items():
            for _, value in read_pieces(reader, name, info):
                checksum.update(name, bytes_of(value))
                for stored, part in recipe.apply(name, info, value).items():
                    writer.put(stored, part)
                advance(value.nbytes)
        journal.add(file, Stamp(status.st_size, status.st_mtime_ns, str(checksum)), writer.seal())


def _source_problems(source: Checkpoint, quantized: Container[str]) -> list[str]:
    for content in sections(source.config):
        quantization = content.get("quantization_config")
        if quantization and isinstance(quantization, dict):
            method = quantization.get("quant_method")
            return [f"{CONFIG}: the checkpoint is quantized already ({method}); start from the unquantized one"]
    problems = [
        f"{file}: is a link to outside of the checkpoint; put the file itself there"
        for file in (CONFIG, INDEX, *source.files)
        if leaves(source.directory / file)
    ]
    if not quantized:
        problems.append("no weight would become FP8: skip leaves no matrix in BF16, F16 or F32, and no fused experts")
    for module in sorted(_partly_quantized(source, quantized)):
        problems.append(f"{module}: some of these experts' weights would be FP8, some not; skip {module!r} or none")
    for name, info in source.tensors.items():
        if info.dtype == FP8:
            problems.append(f"{name}: is {FP8} already; start from the unquantized checkpoint")
        elif info.dtype not in DTYPES:
            problems.append(f"{name}: unknown dtype {info.dtype}")
        if name in quantized and scale_name(name) in source.tensors:
            problems.append(f"{scale_name(name)}: this name is needed for the scale of {name}")
        fused = parse_fused(name, info.shape) if name in quantized else None
        if fused is None or fused[1] == DOWN:
            continue
        down = source.tensors.get(f"{fused[0]}.{DOWN}")
        if f"{name}_bias" in source.tensors:
            problems.append(f"{name}: experts with a bias, which no FP8 checkpoint has")
        elif down is not None and len(down.shape) != 3:
            problems.append(f"{fused[0]}.{DOWN}: shape {down.shape}, expected three dimensions to go with {name}")
        elif down is not None:
            experts, hidden, size = down.shape
            expected = (experts, 2 * size if fused[1] == GATE_UP else size, hidden)
            if info.shape != expected:
                problems.append(f"{name}: shape {info.shape}, expected {expected} to go with {DOWN}")
        elif fused[1] == GATE_UP and info.shape[1] % 2:
            problems.append(f"{name}: shape {info.shape}, expected as many rows of gate as of up")
    return problems


def _check_patterns(skip: tuple[str, ...], source: Checkpoint) -> None:
    modules = {module for name in source.tensors for module in _modules(name)}
    for pattern in skip:
        if pattern not in DEFAULT_SKIP and not any(matches(module, (pattern,)) for module in modules):
            raise ValueError(f"skip: {pattern!r} matches no module with a weight in {source.directory}")


def _partly_quantized(source: Checkpoint, quantized: Container[str]) -> set[str]:
    """Modules of experts of which some weights are to be quantized and some are not."""
    found: dict[str, set[bool]] = defaultdict(set)
    for name, info in source.tensors.items():
        if expert := parse_expert(name):
            found[expert.experts].add(name in quantized)
        elif fused := parse_fused(name, info.shape):
            found[fused[0]].add(name in quantized)
    return {module for module, states in found.items() if len(states) > 1}


def _modules(name: str) -> set[str]:
    """The module that a weight belongs to, and for one of single experts that of all experts."""
    return {name.removesuffix(".weight"), module_of(name) or ""}


def _may_be_quantized(name: str, info: TensorInfo, skip: tuple[str, ...]) -> bool:
    return info.dtype in _QUANTIZED_DTYPES and not any(matches(module, skip) for module in _modules(name))


def _is_weight(name: str, info: TensorInfo) -> bool:
    return bool(parse_fused(name, info.shape)) or (name.endswith(".weight") and len(info.shape) == 2)
