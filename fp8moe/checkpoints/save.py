"""save_fp8_checkpoint: a model's tensors in shards, written one at a time."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8moe.checkpoints.collect import Collector
from fp8moe.checkpoints.entries import Entry, groups, shards
from fp8moe.checkpoints.files import CONFIG, DTYPE_NAMES, DTYPES, FLOATS, FP8, GENERATION_CONFIG, INDEX, SINGLE
from fp8moe.checkpoints.match import state_of
from fp8moe.checkpoints.names import SCALE, module_of, quantization_config, scale_name
from fp8moe.checkpoints.ranks import Ranks
from fp8moe.checkpoints.sharding import class_of, held
from fp8moe.checkpoints.share import warn_if_hardly_fp8
from fp8moe.checkpoints.spelling import spelling_of
from fp8moe.checkpoints.write import METADATA, Layout, ShardWriter, index_of, json_bytes, write_bytes
from fp8moe.layers.parameters import is_sharded
from fp8moe.quant.formats import SCALE_FORMATS


def save_fp8_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike,
    *,
    experts: str = "separate",
    scale_format: str = "float32",
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write a model with FP8Linear and GroupedExperts in it as a DeepSeek-style FP8 checkpoint.

    Writes the state dict, tied tensors once, into model.safetensors or, above ``max_shard_size``, into shards with
    their index. For a transformers model also config.json, with a quantization_config, and generation_config.json.

    experts: "separate" stores them one by one under the names of DeepSeek's checkpoints, experts.7.gate_proj.weight, or
        of a transformers model's (w1, w3, w2 in block_sparse_moe for Mixtral); if those have them fused, so does this.
        "fused" stores the parameters as they are.
    scale_format: "float32", or "ue8m0" for one byte a scale (float8_e8m0fnu): all scales must be powers of two.
    max_shard_size: bytes of a shard, unless a single tensor and its scale are larger.

    Every file is written under a temporary name, synced and renamed; what makes the directory a checkpoint, the index
    or model.safetensors, comes last. Memory holds one tensor beside the model, of fused experts one expert.

    A model with sharded parameters (DTensors, of FSDP2 or `fp8moe.distributed.ExpertParallel`): all processes of the
    default group call this, and the first writes what one process with the whole model would. The others send it what
    they hold, through their CPUs, a tensor or an expert at a time; what is not sharded it takes from its own model.
    Only its directory counts. If one process fails, all raise the same ValueError.

    Warns (UserWarning) if less than half of the parameters in matrices are FP8; without any, config.json gets no
    quantization_config.

    Raises ValueError, before anything is written, for unknown options, a directory that already holds a checkpoint, a
    model with parameters on the meta device, "ue8m0" with other scales, or another model on one of the processes.
    """
    directory = Path(directory)
    state = state_of(model)
    owners = {id(value): name for name, value in reversed(state.items())}
    stored = {name: value for name, value in state.items() if owners[id(value)] == name}
    ranks = Ranks(stored.values())
    with ranks.step():
        _check(directory if ranks.first else None, state, experts, scale_format)
        fp8 = (name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn)
        scales = set(map(scale_name, fp8)) & stored.keys()
        if scale_format == "ue8m0":
            _check_powers_of_two({name: held(stored[name])[0] for name in scales})
        spelling = spelling_of(model) if experts == "separate" else None
        scale_dtype = "F8_E8M0" if scale_format == "ue8m0" else "F32"
        files = shards(groups(stored, scales, spelling, scale_dtype), max_shard_size)
    layouts = {file: {entry.name: entry.layout for entry in entries} for file, entries in files.items()}
    tensors = {name: layout for layouts_of_file in layouts.values() for name, layout in layouts_of_file.items()}
    sharded = [name for name, value in stored.items() if is_sharded(value)]
    digest = hashlib.sha256(repr((layouts, sharded)).encode()).hexdigest()[:8]
    ranks.check_same("model: expected the same tensors and options on all ranks", f"{len(tensors)} tensors ({digest})")
    collector = Collector(stored, ranks)
    with ranks.step():
        if ranks.first:
            directory.mkdir(parents=True, exist_ok=True)
            if hasattr(model, "config"):
                tied = {name: value for name, value in state.items() if name not in stored}
                _write_configs(model, directory, stored, _quantization(tensors, tied, scale_format))
    for file, entries in files.items():
        with ranks.step():
            slices = collector.collect(entries)
            try:
                if ranks.first:
                    _write_shard(directory / file, layouts[file], slices)
            finally:
                deque(slices, maxlen=0)  # the others wait until what they send is received
    with ranks.step():
        if ranks.first and len(files) > 1:
            write_bytes(directory / INDEX, index_of(layouts))
    if ranks.first:
        warn_if_hardly_fp8(tensors)


def _check(directory: Path | None, state: Mapping[str, Tensor], experts: str, scale_format: str) -> None:
    """directory: None where another process writes."""
    if experts not in ("separate", "fused"):
        raise ValueError(f"experts: expected 'separate' or 'fused', got {experts!r}")
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")
    for name in (SINGLE, INDEX):
        if directory is not None and (directory / name).exists():
            raise ValueError(f"directory: {directory} already holds a checkpoint ({name}); give another one")
    meta = [name for name, value in state.items() if value.is_meta]
    if meta:
        raise ValueError(f"model: has no data, on the meta device: {', '.join(meta[:10])}")


def _write_shard(path: Path, layout: Layout, slices: Iterable[tuple[Entry, Tensor]]) -> None:
    with ShardWriter(path, layout, METADATA) as writer:
        for entry, value in slices:
            writer.put(entry.name, value.to(DTYPES[entry.dtype]))


def _check_powers_of_two(scales: Mapping[str, Tensor]) -> None:
    wrong = [name for name, scale in sorted(scales.items()) if not (scale.float().frexp().mantissa == 0.5).all()]
    if wrong:
        raise ValueError(
            f"scale_format: 'ue8m0', but not all scales are powers of two in {', '.join(wrong[:10])}"
            + (f" and {len(wrong) - 10} more" if wrong[10:] else "")
        )


def _quantization(tensors: Layout, tied: Mapping[str, Tensor], scale_format: str) -> dict | None:
    """The quantization_config, None for a checkpoint without FP8. tied: what has other names among ``tensors``."""
    if all(dtype != FP8 for dtype, _ in tensors.values()):
        return None
    others = (module_of(name) for name, value in tied.items() if value.dtype != torch.float8_e4m3fn)
    return quantization_config(tensors, scale_format == "ue8m0", filter(None, others))


def _write_configs(model: nn.Module, directory: Path, stored: Mapping[str, Tensor], quantization: dict | None) -> None:
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [class_of(model).__name__]
    floats = (
        value.dtype for name, value in stored.items() if DTYPE_NAMES[value.dtype] in FLOATS and not name.endswith(SCALE)
    )
    config["dtype"] = str(next(floats, torch.bfloat16)).removeprefix("torch.")
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    write_bytes(directory / CONFIG, json_bytes(config))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_bytes(directory / GENERATION_CONFIG, json_bytes(json.loads(generation.to_json_string())))
