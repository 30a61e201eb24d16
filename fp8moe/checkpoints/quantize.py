"""quantize_checkpoint: an unquantized checkpoint to FP8, shard by shard."""

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

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
    read_header,
    read_pieces,
)
from fp8moe.checkpoints.names import (
    DOWN,
    GATE_UP,
    module_of,
    parse_expert,
    parse_fused,
    quantization_config,
    scale_name,
    scale_shape,
)
from fp8moe.checkpoints.write import (
    METADATA,
    Layout,
    ShardWriter,
    replace,
    temporary_path,
    write_index,
    write_json,
)
from fp8moe.quant.formats import SCALE_FORMATS, FP8Tensor
from fp8moe.quant.quantize import quantize_128x128
from fp8moe.runtime.patterns import as_patterns, matches

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
_SUFFIXES = (".bpe", ".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt")  # of files that are copied
_LICENSES = ("LICENSE", "NOTICE", "USE_POLICY")
_SOURCE = "fp8moe_source"  # metadata: the fingerprint of the shard that this one was made from


def quantize_checkpoint(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    scale_format: str = "float32",
    device: torch.device | str | None = None,
) -> None:
    """Quantize a bfloat16, float16 or float32 checkpoint to FP8 with 128x128 blocks, shard by shard.

    Every weight of two dimensions (X.weight, with its scale in X.weight_scale_inv) and of fused experts
    (experts.gate_up_proj (E, 2I, H), up_proj or down_proj, with experts.gate_up_proj_scale_inv...) is quantized, gate
    and up of fused experts each with blocks of its own; other tensors are copied. Names, and which shard holds what,
    stay the same. The index is written anew, config.json gets a quantization_config, and the tokenizer, generation
    settings and other small text files are copied.

    src_dir: with model.safetensors, or model.safetensors.index.json and its shards.
    dst_dir: made if needed. What an interrupted run has finished there is recognised by its header, which holds a
        fingerprint of the source, and not done again. A shard has its final name only when it is complete and synced.
    skip: fnmatch patterns of modules that stay as they are, matched with the qualified name
        ("model.layers.3.mlp.gate") and the last part of it ("gate").
    scale_format: "float32", or "ue8m0" for powers of two in one byte (float8_e8m0fnu).
    device: where to quantize; by default a GPU if there is one. The result is the same everywhere.

    Memory holds one tensor at a time, of fused experts one expert.

    Raises CheckpointError for a source that is damaged, quantized already, or has fused experts in another layout, for
    patterns that leave only some of the weights of a layer's experts as they are, and for a destination with files that
    this run would not write; ValueError for unknown options, and for patterns outside DEFAULT_SKIP that match nothing.
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
    quantized = {name for name, info in source.tensors.items() if _to_quantize(name, info, skip)}
    problems = source.problems + _source_problems(source, quantized)
    if problems:
        raise CheckpointError(f"cannot quantize {source.directory}", problems)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    scale_dtype = "F8_E8M0" if scale_format == "ue8m0" else "F32"
    layouts = {file: _layout(tensors, quantized, scale_dtype) for file, tensors in source.by_file.items()}
    fingerprints = {file: _fingerprint(source, file) for file in source.files}
    finished = _finished(target, layouts, fingerprints)

    target.mkdir(parents=True, exist_ok=True)
    for leftover in target.glob(".*.partial"):
        leftover.unlink()
    _copy_files(source, target)
    tensors = {name: entry for layout in layouts.values() for name, entry in layout.items()}
    write_json(
        target / CONFIG,
        source.config | {"quantization_config": quantization_config(tensors, scale_format == "ue8m0", ())},
    )
    total = sum(info.nbytes for info in source.tensors.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="quantizing", disable=None) as bar:
        for file, tensors in source.by_file.items():
            if file in finished:
                bar.update(sum(info.nbytes for info in tensors.values()))
                continue
            with (
                ShardWriter(target / file, layouts[file], METADATA | {_SOURCE: fingerprints[file]}) as writer,
                safe_open(source.directory / file, framework="pt") as reader,
            ):
                for name, info in tensors.items():
                    for index, value in read_pieces(reader, name, info):
                        if name in quantized:
                            data, scale = _quantize(name, info, value.to(device), scale_format)
                            writer.put(name, data, index)
                            writer.put(scale_name(name), scale.cpu().to(DTYPES[scale_dtype]), index)
                        else:
                            writer.put(name, value, index)
                        bar.update(value.nbytes)
    if source.files != [SINGLE]:
        write_index(target, layouts)


def _source_problems(source: Checkpoint, quantized: set[str]) -> list[str]:
    if source.quantization:
        method = source.quantization.get("quant_method")
        return [f"{CONFIG}: the checkpoint is quantized already ({method}); start from the unquantized one"]
    problems = []
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
        if f"{name}_bias" in source.tensors:
            problems.append(f"{name}: experts with a bias, which no FP8 checkpoint has")
        elif f"{fused[0]}.{DOWN}" in source.tensors:
            experts, hidden, size = source.tensors[f"{fused[0]}.{DOWN}"].shape
            expected = (experts, 2 * size if fused[1] == GATE_UP else size, hidden)
            if info.shape != expected:
                problems.append(f"{name}: shape {info.shape}, expected {expected} to go with {DOWN}")
    return problems


def _check_patterns(skip: tuple[str, ...], source: Checkpoint) -> None:
    modules = {module for name in source.tensors for module in _modules(name)}
    for pattern in skip:
        if pattern not in DEFAULT_SKIP and not any(matches(module, (pattern,)) for module in modules):
            raise ValueError(f"skip: {pattern!r} matches no module with a weight in {source.directory}")


def _partly_quantized(source: Checkpoint, quantized: set[str]) -> set[str]:
    """Modules of experts of which some weights are to be quantized and some are not."""
    found: dict[str, set[bool]] = defaultdict(set)
    for name, info in source.tensors.items():
        expert, fused = parse_expert(name), parse_fused(name, info.shape)
        if expert or fused:
            found[expert.experts if expert else fused[0]].add(name in quantized)
    return {module for module, states in found.items() if len(states) > 1}


def _modules(name: str) -> set[str]:
    """The module that a weight belongs to, and for one of single experts that of all experts."""
    return {name.removesuffix(".weight"), module_of(name) or ""}


def _to_quantize(name: str, info: TensorInfo, skip: tuple[str, ...]) -> bool:
    is_weight = parse_fused(name, info.shape) or (name.endswith(".weight") and len(info.shape) == 2)
    skipped = any(matches(module, skip) for module in _modules(name))
    return bool(is_weight) and info.dtype in _QUANTIZED_DTYPES and not skipped


def _layout(tensors: Mapping[str, TensorInfo], quantized: set[str], scale_dtype: str) -> Layout:
    """What a shard with these tensors becomes."""
    layout: Layout = {}
    for name, info in tensors.items():
        layout[name] = (FP8 if name in quantized else info.dtype, info.shape)
        if name in quantized:
            layout[scale_name(name)] = (scale_dtype, scale_shape(name, info.shape))
    return layout


def _fingerprint(source: Checkpoint, file: str) -> str:
    """Tells checkpoints apart that differ in their values only: a hash of header and start of each tensor."""
    digest = hashlib.sha256()
    with (source.directory / file).open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(length))
        for info in source.by_file[file].values():
            stream.seek(8 + length + info.begin)
            digest.update(stream.read(min(info.nbytes, 4096)))
    return digest.hexdigest()


def _finished(target: Path, layouts: Mapping[str, Layout], fingerprints: Mapping[str, str]) -> set[str]:
    """The shards that are there already. Raises CheckpointError if one is there that would not be written so."""
    finished, problems = set(), []
    for file in sorted(path.name for path in target.glob("*.safetensors")):
        if file not in layouts:
            problems.append(f"{file}: is there already, and not one of the shards to be written")
            continue
        try:
            header, metadata = read_header(target / file)
        except CheckpointError as error:
            problems += error.problems
            continue
        layout = {name: (info.dtype, info.shape) for name, info in header.items()}
        if layout == layouts[file] and metadata.get(_SOURCE) == fingerprints[file]:
            finished.add(file)
        else:
            problems.append(f"{file}: is there already, made from another source or with other options")
    if list(layouts) == [SINGLE] and (target / INDEX).exists():
        problems.append(f"{INDEX}: is there already, and not one of the files to be written")
    if problems:
        raise CheckpointError(f"cannot write to {target}; delete these files or give another directory", problems)
    return finished


def _copy_files(source: Checkpoint, target: Path) -> None:
    for path in sorted(source.directory.iterdir()):
        wanted = path.suffix in _SUFFIXES or path.name.startswith(_LICENSES)
        if path.is_file() and wanted and path.name not in (CONFIG, INDEX) and not path.name.endswith(".index.json"):
            temporary = temporary_path(target / path.name)
            shutil.copyfile(path, temporary)
            replace(temporary, target / path.name)


def _quantize(name: str, info: TensorInfo, value: Tensor, scale_format: str) -> FP8Tensor:
    """One matrix (rows, columns); of fused gate and up, each by itself."""
    fused = parse_fused(name, info.shape)
    matrices = 2 if fused and fused[1] == GATE_UP else 1
    data, scale = quantize_128x128(value.unflatten(0, (matrices, -1)), scale_format=scale_format)
    return FP8Tensor(data.flatten(0, 1), scale.flatten(0, 1))
