"""The experts of GPT-OSS, (E, columns, rows) with rows of gate and up in turns, seen as those of other models."""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from fp8moe.weights.expert_names import GATE_UP, parse_fused
from fp8moe.weights.read import Checkpoint, Derived, Source, TensorInfo, sections


def is_gpt_oss(checkpoint: Checkpoint) -> bool:
    """Whether config.json says so."""
    return any(content.get("model_type") == "gpt_oss" for _, content in sections(checkpoint.config))


def in_rows(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """See these fused weights, where they are GPT-OSS's, as (E, rows, columns), gate before up, and so their biases."""
    tensors = dict(checkpoint.tensors)
    for name in names if is_gpt_oss(checkpoint) else ():
        info, bias = tensors[name], tensors.get(f"{name}_bias")
        fused = parse_fused(name, info.shape)
        if fused is None:
            continue
        experts, columns, rows = info.shape
        make = _gate_then_up_rows if fused.projection == GATE_UP else _rows
        tensors[name] = _derived(name, info, (experts, rows, columns), make)
        if bias is not None and fused.projection == GATE_UP and len(bias.shape) == 2:
            tensors[f"{name}_bias"] = bias_in_rows(f"{name}_bias", bias)
    return replace(checkpoint, tensors=tensors)


def tensor_in_rows(name: str, stored: Tensor) -> Tensor:
    """A weight of GPT-OSS's experts, or the bias of gate and up, as `in_rows` sees it; any other tensor as it is."""
    fused = parse_fused(name.removesuffix("_bias"), (0, 0, 0))
    if fused is None:
        return stored
    values = stored if name.endswith("_bias") else stored.transpose(1, 2)
    return _gate_then_up(values) if fused.projection == GATE_UP else values


def as_stored(checkpoint: Checkpoint, modules: Collection[str] | None = None) -> Checkpoint:
    """Undo `in_rows` for the experts of these modules, or of all."""
    tensors = dict(checkpoint.tensors)
    for name, info in tensors.items():
        if isinstance(info, Derived) and (modules is None or name.rpartition(".")[0] in modules):
            tensors[name] = info.sources[0].info
    return replace(checkpoint, tensors=tensors)


def bias_in_rows(name: str, stored: TensorInfo) -> Derived:
    """A bias (E, rows of gate and up in turns), gate before up."""
    return _derived(name, stored, stored.shape, _gate_then_up)


def _derived(name: str, stored: TensorInfo, shape: tuple[int, ...], make: Callable[[Tensor], Tensor]) -> Derived:
    sources = [Source(name, stored, by_expert=len(shape) == 3)]
    return Derived(stored.dtype, shape, stored.begin, stored.end, stored.file, sources, make, None)


def _rows(columns: Tensor) -> Tensor:
    return columns.t().contiguous()


def _gate_then_up_rows(columns: Tensor) -> Tensor:
    return _rows(_gate_then_up(columns))


def _gate_then_up(in_turns: Tensor) -> Tensor:
    return torch.cat([in_turns[:, ::2], in_turns[:, 1::2]], 1)
