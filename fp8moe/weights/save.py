"""Saves a model as an FP8 checkpoint: its tensors in shards, written one at a time."""

import hashlib
import json
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe.layers.parameters import is_sharded
from fp8moe.quant.checks import check_scale_format
from fp8moe.quant.formats import has_channel_scales
from fp8moe.weights.expert_names import FindExpertNames, module_of
from fp8moe.weights.formats import (
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    FP8,
    SCALE,
    Layout,
    quantization_config,
    scale_name,
)
from fp8moe.weights.match import state_of
from fp8moe.weights.read import CONFIG, GENERATION_CONFIG, INDEX, SINGLE
from fp8moe.weights.sharded import Box, Ranks, class_of, held, inside, overlap
from fp8moe.weights.tensor_layout import StoredTensor, groups, low_fp8_fraction, split_into_shards
from fp8moe.weights.untrusted import printable
from fp8moe.weights.write import ShardWriter, index_of, json_bytes, write_bytes


def save(
    model: nn.Module,
    directory: str | os.PathLike,
    find_expert_names: FindExpertNames,
    *,
    experts: str,
    scale_format: str,
    max_shard_size: int,
) -> None:
    """Write a model as `save_fp8_checkpoint` does. find_expert_names: asked where experts are to be separate."""
    directory = Path(directory)
    state = state_of(model)
    owners = {id(value): name for name, value in reversed(state.items())}
    tensors = {name: value for name, value in state.items() if owners[id(value)] == name}
    ranks = Ranks(tensors.values())
    with ranks.step():
        _check(directory if ranks.first else None, state, experts, scale_format)
        fp8 = (name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn)
        scales = set(map(scale_name, fp8)) & tensors.keys()
        channels = [has_channel_scales(tensors[name.removesuffix(SCALE)], tensors[name]) for name in scales]
        if any(channels) and not all(channels):
            raise ValueError("model: expected scales of blocks in all modules, or of channels in all, got both")
        if any(channels) and scale_format != "float32":
            raise ValueError(f"scale_format: expected 'float32' for scales of channels, got {scale_format!r}")
        if scale_format == "ue8m0":
            _check_powers_of_two({name: held(tensors[name])[0] for name in scales})
        expert_names = find_expert_names(model) if experts == "separate" else None
        stored = groups(tensors, scales, expert_names, scale_format)
        files = split_into_shards(stored, max_shard_size)
    layouts = {file: {tensor.name: tensor.spec for tensor in content} for file, content in files.items()}
    layout = {name: spec for part in layouts.values() for name, spec in part.items()}
    sharded = [name for name, value in tensors.items() if is_sharded(value)]
    digest = hashlib.sha256(repr((layouts, sharded)).encode()).hexdigest()[:8]
    ranks.check_same("model: expected the same tensors and options on all ranks", f"{len(layout)} tensors ({digest})")
    collector = Collector(tensors, ranks)
    with ranks.step():
        if ranks.first:
            directory.mkdir(parents=True, exist_ok=True)
            if hasattr(model, "config"):
                tied = {name: value for name, value in state.items() if name not in tensors}
                _write_configs(model, directory, tensors, _quantization(layout, tied, scale_format))
    for file, content in files.items():
        with ranks.step():
            slices = collector.collect(content)
            try:
                if ranks.first:
                    with ShardWriter(directory / file, layouts[file]) as writer:
                        for tensor, value in slices:
                            writer.put(tensor.name, value.to(DTYPES[tensor.dtype]))
            finally:
                deque(slices, maxlen=0)  # the others wait until what they send is received
    with ranks.step():
        if ranks.first and len(files) > 1:
            write_bytes(directory / INDEX, index_of(layouts))
    warning = low_fp8_fraction(layout) if ranks.first else None
    if warning:
        warnings.warn(printable(warning), stacklevel=3)


def _check(directory: Path | None, state: Mapping[str, Tensor], experts: str, scale_format: str) -> None:
    """Check the options and the model. directory: None where another process writes."""
    if experts not in ("separate", "fused"):
        raise ValueError(f"experts: expected 'separate' or 'fused', got {experts!r}")
    check_scale_format(scale_format)
    for name in (SINGLE, INDEX):
        if directory is not None and (directory / name).exists():
            raise ValueError(f"directory: {directory} already holds a checkpoint ({name}); give another one")
    meta = [name for name, value in state.items() if value.is_meta]
    if meta:
        raise ValueError(f"model: has no data, on the meta device: {', '.join(meta[:10])}")
    for name, value in state.items():
        if value.dtype not in DTYPE_NAMES:
            raise ValueError(f"model: {name} is in {value.dtype}, which checkpoints do not have")


def _check_powers_of_two(scales: Mapping[str, Tensor]) -> None:
    wrong = [name for name, scale in sorted(scales.items()) if not (scale.float().frexp().mantissa == 0.5).all()]
    if wrong:
        raise ValueError(
            f"scale_format: 'ue8m0', but not all scales are powers of two in {', '.join(wrong[:10])}"
            + (f" and {len(wrong) - 10} more" if wrong[10:] else "")
        )


def _quantization(layout: Layout, tied: Mapping[str, Tensor], scale_format: str) -> dict | None:
    """The quantization_config, None for a checkpoint without FP8. tied: what has other names in the layout."""
    if all(spec.dtype != FP8 for spec in layout.values()):
        return None
    others = (module_of(name) for name, value in tied.items() if value.dtype != torch.float8_e4m3fn)
    return quantization_config(layout, scale_format, filter(None, others))


def _write_configs(model: nn.Module, directory: Path, tensors: Mapping[str, Tensor], quantization: dict | None) -> None:
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [class_of(model).__name__]
    floats = (
        value.dtype
        for name, value in tensors.items()
        if DTYPE_NAMES[value.dtype] in FLOATS and not name.endswith(SCALE)
    )
    config["dtype"] = str(next(floats, torch.bfloat16)).removeprefix("torch.")
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    write_bytes(directory / CONFIG, json_bytes(config))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_bytes(directory / GENERATION_CONFIG, json_bytes(json.loads(generation.to_json_string())))


class Slice(NamedTuple):
    """A tensor to be written, or its next slice."""

    tensor: StoredTensor
    value: Tensor


class Collector:
    """Brings the tensors of a model that may be sharded together on the first process, piece by piece.

    All processes must make one, and then collect the same. Of several that hold the same, the first sends it. What is
    not sharded is the first process's own.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks):
        self._ranks = ranks
        self._held = {name: held(tensor) for name, tensor in tensors.items()}
        self._senders: dict[str, dict[Box, int]] = {name: {box: 0} for name, (_, box) in self._held.items()}
        sharded = [name for name, tensor in tensors.items() if is_sharded(tensor)]
        boxes = ranks.gather([self._held[name][1] for name in sharded])
        for name, own_boxes in zip(sharded, zip(*boxes, strict=True), strict=True):
            senders = self._senders[name] = {}
            for rank, box in enumerate(own_boxes):
                senders.setdefault(box, rank)

    def collect(self, tensors: Iterable[StoredTensor]) -> Iterator[Slice]:
        """The slices of these tensors, on the CPU: on the first process, the others get none.

        Memory holds one of them and a part of it that is received. A process that cannot read a part sends something,
        so that no other waits for it, and raises its error behind the last.
        """
        errors: list[Exception] = []
        for tensor in tensors:
            for box in tensor.slices:
                value = self._slice(tensor.source, box, errors)
                if value is not None:
                    yield Slice(tensor, value)
        for error in errors:
            raise error

    def _slice(self, source: str, box: Box, errors: list[Exception]) -> Tensor | None:
        rank, first, group = self._ranks.rank, self._ranks.first, self._ranks.group
        local, own_box = self._held[source]
        value = None
        for held_box, sender in self._senders[source].items():
            part = overlap(box, held_box)
            if not all(part) or rank not in (0, sender):
                continue
            piece = torch.empty(tuple(map(len, part)), dtype=local.dtype)
            if sender == rank:
                try:
                    piece = local[inside(part, own_box)].detach().cpu()
                except Exception as error:
                    errors.append(error)
            if not first:
                dist.send(_flat_bytes(piece), 0, group)
                continue
            if sender != rank:
                dist.recv(_flat_bytes(piece), sender, group)
            if part == box:
                return piece
            value = torch.empty(tuple(map(len, box)), dtype=local.dtype) if value is None else value
            value[inside(part, box)].copy_(piece)
        return value


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
