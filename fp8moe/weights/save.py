"""Save a model as an FP8 checkpoint in shards, writing one tensor at a time."""

import hashlib
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn

from fp8moe.layers.parameters import is_sharded
from fp8moe.layers.wrapped import check_merged, unwrapped
from fp8moe.quant.arranged import stored_codes, stored_exponents, stored_scales
from fp8moe.quant.checks import check_scale_format
from fp8moe.quant.formats import BLOCK, MX_BLOCK, has_channel_scales, packed_format, packed_group
from fp8moe.weights.formats import NVFP4_GROUP, low_fp8_fraction, packed_config, quantization_config, scale_dtype
from fp8moe.weights.names import (
    CHANNEL_SCALE,
    DOWN,
    GATE_UP,
    GLOBAL_SCALE,
    GROUPS,
    SCALE,
    SCALE_ROLE,
    UP,
    WEIGHT,
    Name,
    one_by_one,
    parse,
)
from fp8moe.weights.place import Box, Ranks, Target, class_of, held, inside, overlap, provider, state_of, whole
from fp8moe.weights.source import (
    CONFIG,
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    FP8,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    TensorSpec,
    printable,
)
from fp8moe.weights.stored import is_interleaved
from fp8moe.weights.write import ShardWriter, index_of, json_bytes, write_bytes

_FP8 = (torch.float8_e4m3fn,)


@torch.inference_mode(False)
def save_fp8_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike,
    *,
    experts: str = "separate",
    scale_format: str = "float32",
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write a model with FP8Linear and GroupedExperts in it as a DeepSeek-style FP8 checkpoint.

    Writes the state dict, tied tensors once, to model.safetensors or, above ``max_shard_size``, to shards and an index.
    A transformers model also gets config.json, with a quantization_config, and generation_config.json; its tensors get
    the names that its own checkpoints have.

    A model wrapped by torch.compile, DistributedDataParallel or peft is stored under the names that it has without the
    wrapper; peft's adapters must be merged.

    Experts in four bits are stored one by one as in compressed-tensors, which calls scales of blocks beside them
    X.weight_scale too; those of GPT-OSS as published.

    Per-output-channel scales are stored as in compressed-tensors (X.weight_scale (N, 1)), which the quantization_config
    then declares.

    experts: "separate" stores each expert's weights separately, under the names of DeepSeek's checkpoints, such as
        experts.7.gate_proj.weight, or of the transformers model's own (w1, w3, w2 in block_sparse_moe for Mixtral); if
        those have fused experts, experts are stored fused. "fused" stores the parameters as they are.
    scale_format: "float32", or "ue8m0" for one byte a scale (float8_e8m0fnu): all scales must be powers of two.
    max_shard_size: the most bytes of a shard, unless a single tensor and its scale are larger.

    Every file is written under a temporary name, synced and renamed. The file that makes the directory a checkpoint,
    the index or model.safetensors, comes last. Beside the model, memory holds one tensor or, of a fused tensor, one
    expert.

    If the model has sharded parameters (DTensors, of FSDP2 or `fp8moe.distributed.ExpertParallel`), all processes of
    the default group call this, and rank 0 writes what one process with the whole model would write. The other ranks
    send rank 0 the parts that they hold, through their CPUs, a tensor or an expert at a time. Tensors that are not
    sharded come from rank 0's own model, and only rank 0's ``directory`` counts. If one process fails, all processes
    raise the same ValueError.

    Warns (UserWarning) if less than half of the parameters in matrices are FP8; if none are, config.json gets no
    quantization_config.

    Raises ValueError, before anything is written, for unknown options, a directory that already holds a checkpoint, a
    model with parameters on the meta device or in a dtype that checkpoints do not have, "ue8m0" with scales that are
    not powers of two, block scales in some modules and channel scales in others, adapters that are not merged, a model
    of FSDP1, models that differ between processes, or a tensor that would not be read back under any name.
    """
    directory = Path(directory)
    inner = unwrapped("model", model)
    check_merged("model", model)
    state = state_of(model)
    owners = {id(value): name for name, value in reversed(state.items())}
    tensors = {name: value for name, value in state.items() if owners[id(value)] == name}
    ranks = Ranks(tensors.values())
    with ranks.step():
        _check(directory if ranks.first else None, state, experts, scale_format)
        packed = {name for name, value in tensors.items() if value.dtype == torch.uint8 and f"{name}_scale" in tensors}
        in_turns = bool(packed) and is_interleaved(_config(inner))
        all_scales = Target(tensors).scales
        scales = all_scales - {f"{name}_scale" for name in packed}
        channels = {name for name in scales if has_channel_scales(tensors[name.removesuffix(SCALE)], tensors[name])}
        if packed:
            forms = {_form(tensors[name], tensors[f"{name}_scale"]) for name in packed}
            _check_packed(forms, scales, channels, in_turns, experts, scale_format)
        if channels and channels != scales:
            raise ValueError("model: expected scales of blocks in all modules, or of channels in all, got both")
        if channels and scale_format != "float32":
            raise ValueError(f"scale_format: expected 'float32' for scales of channels, got {scale_format!r}")
        if scale_format == "ue8m0":
            _check_powers_of_two({name: held(tensors[name])[0] for name in scales})
        weights = {name: value for name, value in tensors.items() if name not in all_scales}
        parts = _parts(inner, weights, packed, separate=experts == "separate" and not in_turns)
        found = _groups(tensors, parts, scales, packed, scale_format, in_turns=in_turns)
        groups = {group[0].name.text: group for group in found}
        split = split_state_dict_into_shards_factory(
            groups,
            get_storage_size=lambda group: sum(tensor.spec.nbytes for tensor in group),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        by_file = split.filename_to_tensors or {SINGLE: []}
        files = {file: [tensor for name in names for tensor in groups[name]] for file, names in by_file.items()}
    layouts = {file: {tensor.name.text: tensor.spec for tensor in content} for file, content in files.items()}
    layout = {name: spec for part in layouts.values() for name, spec in part.items()}
    sharded = [name for name, value in tensors.items() if is_sharded(value)]
    digest = hashlib.sha256(repr((layouts, sharded)).encode()).hexdigest()[:8]
    ranks.check_same("model: expected the same tensors and options on all ranks", f"{len(layout)} tensors ({digest})")
    collector = Collector(tensors, ranks)
    with ranks.step():
        if ranks.first:
            directory.mkdir(parents=True, exist_ok=True)
            if hasattr(inner, "config"):
                quantization = None
                if packed:
                    quantization = packed_config(layout, in_turns=in_turns)
                elif any(spec.dtype == FP8 for spec in layout.values()):
                    plain = (name for name, value in state.items() if value.dim() > 1 and value.dtype not in _FP8)
                    others = [name.module for name in map(parse, plain) if name.role == WEIGHT]  # as the model has them
                    stored = [(tensor.name, tensor.spec) for content in files.values() for tensor in content]
                    quantization = quantization_config(stored, scale_format, others, channels=bool(channels))
                _write_configs(inner, directory, tensors, quantization)
    for file, content in files.items():
        with ranks.step():
            slices = collector.collect(content)
            try:
                if ranks.first:
                    with ShardWriter(directory / file, layouts[file]) as writer:
                        for tensor, value in slices:
                            made = value if tensor.make is None else tensor.make(value)
                            writer.put(tensor.name.text, made.to(DTYPES[tensor.spec.dtype]))
            finally:
                deque(slices, maxlen=0)  # on other ranks: send the slices; on rank 0: receive the rest after an error
    with ranks.step():
        if ranks.first and len(files) > 1:
            write_bytes(directory / INDEX, index_of(layouts))
    warning = low_fp8_fraction(layout) if ranks.first else None
    if warning:
        warnings.warn(printable(warning), stacklevel=2)


class StoredTensor(NamedTuple):
    """A tensor to write: the part ``box`` of the model's tensor ``source``.

    name, spec: the tensor's name, dtype and shape in the file. make: makes what is written of a slice; None if that is
    the slice itself.
    """

    name: Name
    source: str
    box: Box
    spec: TensorSpec
    make: Callable[[Tensor], Tensor] | None = None

    @property
    def slices(self) -> Iterator[Box]:
        """Yield the box in parts, in file order: one part per expert of fused experts, which can take gigabytes."""
        if len(self.box) < 3:
            yield self.box
            return
        for index in self.box[0]:
            yield range(index, index + 1), *self.box[1:]


def _parts(
    model: nn.Module, weights: Mapping[str, Tensor], packed: set[str], *, separate: bool
) -> dict[str, list[Name]]:
    """Return under which names each tensor is stored: one, or for experts stored one by one, that of every matrix.

    weights: the model's tensors without scales. packed: the names of weights in four bits. separate: whether experts
    are stored one by one, if the model's checkpoints have names for that.
    """
    parts = {text: [parse(text, value.dim())] for text, value in weights.items()}
    find = provider().expert_patterns(model) if separate else None
    for text, (name,) in parts.items() if find is not None else ():
        if text in packed or _splits(name, weights):
            patterns = find(name) or (one_by_one(name) if text in packed else ())
            matrices = [
                pattern.replace("*", f"{expert}") for expert in range(len(weights[text])) for pattern in patterns
            ]
            parts[text] = [parse(matrix) for matrix in matrices] or [name]
    stored = provider().stored_names(model, parts)
    return {text: [parse(stored[part.text], weights[text].dim()) for part in names] for text, names in parts.items()}


def _groups(
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, list[Name]],
    scales: set[str],
    packed: set[str],
    scale_format: str,
    *,
    in_turns: bool,
) -> Iterator[list[StoredTensor]]:
    """Yield lists of tensors to write: each weight together with its scale, any other tensor alone.

    tensors: the model's tensors. parts: the names under which each of them is stored, from `_parts`. scales: names of
    the scales of FP8 weights. packed: the names of weights in four bits. in_turns: whether rows of gate and up
    alternate in the checkpoint, as in GPT-OSS.
    """
    for text, names in parts.items():
        value = tensors[text]
        if text in packed:
            yield from (_fused_mxfp4(tensors, text, names[0]) if in_turns else _packed_experts(tensors, text, names))
            continue
        if in_turns and text.endswith(f"{GATE_UP}_bias"):
            spec = TensorSpec(DTYPE_NAMES[value.dtype], tuple(value.shape))
            yield [StoredTensor(names[0], text, whole(value.shape), spec, _in_turns)]
            continue
        scale = tensors[text + SCALE] if text + SCALE in scales else None
        as_compressed = bool(packed) and not in_turns or scale is not None and has_channel_scales(value, scale)
        suffix = CHANNEL_SCALE if as_compressed else SCALE
        single = value.dim() == 3 and names[0].expert is not None
        for index, part_name in enumerate(names):
            group = []
            for tensor, source, end in ((value, text, ""), (scale, text + SCALE, suffix)):
                if tensor is None:
                    continue
                box = _box(tensor, index, len(names)) if single else whole(tensor.shape)
                dtype = scale_dtype(scale_format) if end else DTYPE_NAMES[tensor.dtype]
                spec = TensorSpec(dtype, tuple(map(len, box[1:] if single else box)))
                own_name = part_name._replace(text=part_name.text + end, role=SCALE_ROLE if end else part_name.role)
                group.append(StoredTensor(own_name, source, box, spec))
            yield group


def _fused_mxfp4(tensors: Mapping[str, Tensor], text: str, name: Name) -> Iterator[list[StoredTensor]]:
    """Yield experts in MXFP4 as GPT-OSS stores them: X_blocks (E, N, K/32, 16) and X_scales, gate and up in turns.

    text: the weight's name in the model. name: X.
    """
    data, scale = tensors[text], tensors[f"{text}_scale"]
    experts, n, half = data.shape
    order = _in_turns if name.projection == GATE_UP else Tensor.clone
    exponents = partial(stored_exponents, n=n, k=2 * half, projections=name.matrices)
    groups = 2 * half // MX_BLOCK
    blocks = TensorSpec("U8", (experts, n, groups, MX_BLOCK // 2))
    yield [
        StoredTensor(
            name._replace(text=f"{name.text}{GROUPS}"),
            text,
            whole(data.shape),
            blocks,
            lambda part: order(stored_codes(part)),
        ),
        StoredTensor(
            name._replace(text=f"{name.text}_scales"),
            f"{text}_scale",
            whole(scale.shape),
            TensorSpec("U8", (experts, n, groups)),
            lambda part: order(exponents(part)),
        ),
    ]


def _packed_experts(tensors: Mapping[str, Tensor], text: str, names: list[Name]) -> Iterator[list[StoredTensor]]:
    """Yield experts in four bits, one by one, as compressed-tensors stores them.

    text: the weight's name in the model. names: the names of its matrices.

    Source: https://github.com/vllm-project/compressed-tensors, formats "mxfp4-pack-quantized", "nvfp4-pack-quantized"
    and "pack-quantized".
    """
    data, scale = tensors[text], tensors[f"{text}_scale"]
    n, k = data.shape[0] * data.shape[1] // len(names), 2 * data.shape[2]
    bytes_of_codes = "_packed", TensorSpec("U8", (n, k // 2)), stored_codes
    shape = torch.tensor([n, k], dtype=torch.int64, device="cpu")
    wanted = {  # the end of the name, dtype and shape, and what makes it: of codes, of scales, of their first row
        "mxfp4": (
            bytes_of_codes,
            ("_scale", TensorSpec("U8", (n, k // MX_BLOCK)), partial(stored_exponents, n=n, k=k)),
        ),
        "nvfp4": (
            bytes_of_codes,
            ("_scale", TensorSpec(FP8, (n, k // NVFP4_GROUP)), lambda part: stored_scales(part, n, k)[0]),
            # In F64, 1 / (1 / x) is x for every x of float32.
            (GLOBAL_SCALE, TensorSpec("F64", (1,)), lambda part: 1 / stored_scales(part, n, BLOCK)[1].double()),
        ),
        "int4": (
            ("_packed", TensorSpec("I32", (n, k // 8)), lambda part: (part ^ 0x88).contiguous().view(torch.int32)),
            ("_scale", TensorSpec(DTYPE_NAMES[scale.dtype], (n, scale.shape[2])), None),
            ("_shape", TensorSpec("I64", (2,)), lambda _: shape),
        ),
    }[packed_format(scale)]
    sources = text, f"{text}_scale", f"{text}_scale"
    for index, part in enumerate(names):
        codes, (expert, rows, columns) = (_box(tensor, index, len(names)) for tensor in (data, scale))
        boxes = codes, (expert, rows, columns), (expert, rows[:1], columns)
        yield [
            StoredTensor(part._replace(text=part.text + end), source, box, spec, make)
            for (end, spec, make), source, box in zip(wanted, sources, boxes, strict=False)
        ]


def _in_turns(rows: Tensor) -> Tensor:
    """Return (E, 2I, ...) with rows of gate and up, which lie one after the other, in turns."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _config(model: nn.Module) -> dict:
    config = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def _form(data: Tensor, scale: Tensor) -> str:
    """Return the format of experts in four bits, as a quantization_config declares it."""
    form = packed_format(scale)
    return f"int4 in groups of {packed_group(data, scale)}" if form == "int4" else form


def _check_packed(
    forms: set[str], scales: set[str], channels: set[str], in_turns: bool, experts: str, scale_format: str
) -> None:
    """Raise ValueError for what cannot be stored beside experts in four bits."""
    if channels:
        raise ValueError("model: expected scales of blocks beside experts in four bits, got scales of channels")
    if in_turns and forms != {"mxfp4"}:
        raise ValueError(f"model: GPT-OSS's checkpoints have experts in MXFP4, got {' and '.join(sorted(forms))}")
    if len(forms) > 1:
        raise ValueError(f"model: expected one format of experts in four bits, got {' and '.join(sorted(forms))}")
    if in_turns and scales:
        raise ValueError(
            f"model: GPT-OSS's checkpoints have four bits and unquantized weights, and {sorted(scales)[0]} is of FP8"
        )
    if experts == "fused" and not in_turns:
        raise ValueError("experts: expected 'separate' for experts in four bits, got 'fused'")
    if scale_format != "float32":
        raise ValueError(f"scale_format: expected 'float32' beside experts in four bits, got {scale_format!r}")


def _splits(name: Name, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is a weight of fused experts, without biases, that can be stored expert by expert."""
    if name.role != WEIGHT or name.projection is None or name.expert is not None:
        return False
    keys = [f"{name.module}.{projection}" for projection in (GATE_UP, UP, DOWN)]
    if any(f"{key}_bias" in tensors for key in keys):
        return False
    gate_up, up, down = map(tensors.get, keys)
    if down is None or (gate_up is None) == (up is None):
        return False
    count, hidden, size = down.shape
    return gate_up.shape == (count, 2 * size, hidden) if up is None else up.shape == (count, size, hidden)


def _box(fused: Tensor, index: int, count: int) -> Box:
    """Return the box of matrix ``index`` of a fused tensor, which consists of ``count`` matrices, ordered by expert."""
    experts, rows, columns = fused.shape
    expert, matrix = divmod(index, count // experts)
    size = rows * experts // count
    return range(expert, expert + 1), range(matrix * size, (matrix + 1) * size), range(columns)


def _check(directory: Path | None, state: Mapping[str, Tensor], experts: str, scale_format: str) -> None:
    """Raise ValueError for wrong options or an unsuitable model. directory: None if another process writes."""
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


class Collector:
    """Gathers a model's tensors, sharded or not, on rank 0, piece by piece.

    All processes must create a Collector, and then collect the same tensors. If several processes hold the same box,
    the lowest of these ranks sends it. Tensors that are not sharded come from rank 0's own model.
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

    def collect(self, tensors: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
        """Yield the slices of these tensors, on the CPU of rank 0; the other ranks only send, and yield nothing.

        Memory holds one slice, and a part of the slice that is being received. A process that cannot read a part sends
        arbitrary values, so that no other process waits for the part, and raises the error at the end.
        """
        errors: list[Exception] = []
        for tensor in tensors:
            for box in tensor.slices:
                value = self._slice(tensor.source, box, errors)
                if value is not None:
                    yield tensor, value
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
            piece = torch.empty(tuple(map(len, part)), dtype=local.dtype, device="cpu")
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
            value = torch.empty(tuple(map(len, box)), dtype=local.dtype, device="cpu") if value is None else value
            value[inside(part, box)].copy_(piece)
        return value


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
