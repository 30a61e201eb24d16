"""State dicts of experts in four bits: as checkpoints have them, while modules keep MXFP4 as `quant.arranged` does."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.layers.parameters import frozen, is_sharded, local
from fp8moe.quant import arranged
from fp8moe.quant.formats import MX_BLOCK


def pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each weight's name with that of its scale."""
    return zip(names[::2], names[1::2], strict=True)


def as_kept(layer: Any, state: dict[str, Tensor], prefix: str) -> None:
    """Convert a state dict to how `layer`, a GroupedExperts in four bits, keeps its weights.

    Codes are arranged unless exponents beside them are. Tensors of a wrong dtype or shape stay as they are.
    """
    for name, scale_name in pairs(layer.weight_names):
        own, own_scale = getattr(layer, name), getattr(layer, scale_name)
        key, scale_key = prefix + name, prefix + scale_name
        data, scale = state.get(key), state.get(scale_key)
        known = scale is not None and scale.dtype in layer.kept.scale_dtypes
        if layer.weight_format != "mxfp4":
            if known and scale.dtype != own_scale.dtype:  # scales keep their dtype
                setattr(layer, scale_name, frozen(torch.empty_like(own_scale, dtype=scale.dtype)))
            continue
        shape = (own.shape[1], own.shape[2] * 2 // MX_BLOCK)
        if known:
            state[scale_key] = scale = scale.view(torch.uint8)
        if known and scale.shape[1:] == shape:
            projections = 2 if name == "gate_up_proj" else 1
            convert = partial(arranged.arranged_exponents, projections=projections)
            state[scale_key] = _by_shard(scale_key, convert, scale)
        stored = scale is None or scale.shape[1:] == shape
        if stored and data is not None and (data.dtype, data.shape[1:]) == (own.dtype, own.shape[1:]):
            state[key] = _by_shard(key, arranged.arranged_codes, data)


def as_stored(layer: Any, state: dict[str, Tensor], prefix: str, local_metadata: dict) -> None:
    """Save MXFP4 as checkpoints have it, unless the parameters themselves are asked for."""
    for name, scale_name in pairs(layer.weight_names) if layer.weight_format == "mxfp4" else ():
        data, scale = state[prefix + name], state[prefix + scale_name]
        if isinstance(scale, nn.Parameter):
            continue
        shape = {"n": data.shape[1], "k": 2 * data.shape[2], "projections": arranged.projections_of(data, scale)}
        exponents = partial(arranged.stored_exponents, **shape)
        state[prefix + scale_name] = _by_shard(prefix + scale_name, exponents, scale)
        state[prefix + name] = _by_shard(prefix + name, arranged.stored_codes, data)


def _by_shard(name: str, convert: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Apply ``convert`` to tensors, or to this rank's shards of DTensors.

    Raises ValueError, which begins with ``name``, for DTensors that are not sharded by experts.
    """
    for value in values:
        if local(value).shape[1:] != value.shape[1:]:
            raise ValueError(f"{name}: expected whole experts on each rank, got a DTensor with {value.placements}")
    of, made = values[0], convert(*map(local, values))
    if not is_sharded(of):
        return made
    shape = torch.Size((of.shape[0], *made.shape[1:]))
    options = {"run_check": False, "shape": shape, "stride": made.stride()}
    return type(of).from_local(made, of.device_mesh, of.placements, **options)
