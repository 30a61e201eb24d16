"""save_fp8_checkpoint: a model's tensors in shards, written one at a time."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8moe.checkpoints.files import (
    CONFIG,
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    FP8,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
)
from fp8moe.checkpoints.match import is_sharded, state_of
from fp8moe.checkpoints.names import (
    DOWN,
    GATE,
    GATE_UP,
    SCALE,
    UP,
    module_of,
    parse_fused,
    quantization_config,
    scale_name,
)
from fp8moe.checkpoints.share import warn_if_hardly_fp8
from fp8moe.checkpoints.spelling import Spelling, spelling_of
from fp8moe.checkpoints.write import METADATA, ShardWriter, index_of, json_bytes, write_bytes
from fp8moe.quant.formats import SCALE_FORMATS


@dataclass(frozen=True)
class Entry:
    """One tensor to be written: a view of the model's, and the safetensors dtype it is stored in."""

    name: str
    tensor: Tensor
    dtype: str

    @property
    def layout(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * DTYPES[self.dtype].itemsize


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
    or model.safetensors, comes last. Memory holds one tensor beside the model.

    Warns (UserWarning) if less than half of the parameters in matrices are FP8; without any, config.json gets no
    quantization_config.

    Raises ValueError, before anything is written, for unknown options, a directory that already holds a checkpoint, a
    model with parameters on the meta device or sharded (DTensor), or "ue8m0" with other scales.
    """
    directory = Path(directory)
    if experts not in ("separate", "fused"):
        raise ValueError(f"experts: expected 'separate' or 'fused', got {experts!r}")
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")
    for name in (SINGLE, INDEX):
        if (directory / name).exists():
            raise ValueError(f"directory: {directory} already holds a checkpoint ({name}); give another one")
    state = state_of(model)
    meta = [name for name, value in state.items() if value.is_meta]
    if meta:
        raise ValueError(f"model: has no data, on the meta device: {', '.join(meta[:10])}")
    sharded = [name for name, value in state.items() if is_sharded(value)]
    if sharded:
        raise ValueError(
            f"model: is sharded (DTensor): {', '.join(sharded[:10])}; load its full state dict into an unsharded model "
            "and save that one (torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True)"
        )
    owners = {id(value): name for name, value in reversed(state.items())}
    stored = {name: value.detach() for name, value in state.items() if owners[id(value)] == name}
    tied = [name for name, value in state.items() if name not in stored and value.dtype != torch.float8_e4m3fn]
    scales = {scale_name(name) for name, value in stored.items() if value.dtype == torch.float8_e4m3fn} & stored.keys()
    if scale_format == "ue8m0":
        _check_powers_of_two({name: stored[name] for name in scales})

    spelling = spelling_of(model) if experts == "separate" else None
    shards = _shards(_groups(stored, scales, spelling, "F8_E8M0" if scale_format == "ue8m0" else "F32"), max_shard_size)
    layouts = {file: {entry.name: entry.layout for entry in entries} for file, entries in shards.items()}
    tensors = {name: layout for layouts_of_file in layouts.values() for name, layout in layouts_of_file.items()}
    directory.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "config"):
        has_fp8 = any(dtype == FP8 for dtype, _ in tensors.values())
        others = filter(None, map(module_of, tied))
        quantization = quantization_config(tensors, scale_format == "ue8m0", others) if has_fp8 else None
        _write_configs(model, directory, stored, quantization)
    for file, entries in shards.items():
        with ShardWriter(directory / file, layouts[file], METADATA) as writer:
            for entry in entries:
                writer.put(entry.name, entry.tensor.cpu().to(DTYPES[entry.dtype]))
    if len(shards) > 1:
        write_bytes(directory / INDEX, index_of(layouts))
    warn_if_hardly_fp8(tensors)


def _groups(
    stored: Mapping[str, Tensor], scales: set[str], spelling: Spelling | None, scale_dtype: str
) -> Iterator[list[Entry]]:
    """Each weight with its scale, under their names in the checkpoint; other tensors by themselves."""
    for name, value in stored.items():
        if name in scales:
            continue
        scale = stored[scale_name(name)] if scale_name(name) in scales else None
        splits = spelling is not None and _splits(name, stored)
        parts = _one_by_one(name, value, scale) if splits else [(name, value, scale)]
        for own_name, part, part_scale in parts:
            part_name = own_name if spelling is None else spelling.name(own_name)
            group = [Entry(part_name, part, DTYPE_NAMES[part.dtype])]
            if part_scale is not None:
                group.append(Entry(scale_name(part_name), part_scale, scale_dtype))
            yield group


def _splits(name: str, stored: Mapping[str, Tensor]) -> bool:
    """Whether this is a weight of fused experts that can be stored one by one.

    Not so in GPT-OSS, where weights are transposed and have biases.
    """
    fused = parse_fused(name, tuple(stored[name].shape))
    if fused is None or any(f"{fused[0]}.{projection}_bias" in stored for projection in (GATE_UP, UP, DOWN)):
        return False
    gate_up, up, down = (stored.get(f"{fused[0]}.{projection}") for projection in (GATE_UP, UP, DOWN))
    if down is None or (gate_up is None) == (up is None):
        return False
    count, hidden, size = down.shape
    return gate_up.shape == (count, 2 * size, hidden) if up is None else up.shape == (count, size, hidden)


def _one_by_one(name: str, value: Tensor, scale: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    module, fused = parse_fused(name, tuple(value.shape))
    projections = (GATE, UP) if fused == GATE_UP else (fused,)
    for expert in range(value.shape[0]):
        rows = value[expert].chunk(len(projections))
        scales = [None] * len(projections) if scale is None else scale[expert].chunk(len(projections))
        for projection, part, part_scale in zip(projections, rows, scales, strict=True):
            yield f"{module}.{expert}.{projection}.weight", part, part_scale


def _shards(groups: Iterable[list[Entry]], max_shard_size: int) -> dict[str, list[Entry]]:
    """Fill one shard after the other; a group stays together."""
    shards, size = [[]], 0
    for group in groups:
        nbytes = sum(entry.nbytes for entry in group)
        if shards[-1] and size + nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1] += group
        size += nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _check_powers_of_two(scales: Mapping[str, Tensor]) -> None:
    wrong = [name for name, scale in sorted(scales.items()) if not (scale.float().frexp().mantissa == 0.5).all()]
    if wrong:
        raise ValueError(
            f"scale_format: 'ue8m0', but not all scales are powers of two in {', '.join(wrong[:10])}"
            + (f" and {len(wrong) - 10} more" if wrong[10:] else "")
        )


def _write_configs(model: nn.Module, directory: Path, stored: Mapping[str, Tensor], quantization: dict | None) -> None:
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
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
