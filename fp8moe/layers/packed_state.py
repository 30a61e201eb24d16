"""State dicts of experts in four bits: as checkpoints have them, while modules keep them as `quant.arranged` does."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.layers.parameters import frozen, is_sharded, local
from fp8moe.quant import arranged
from fp8moe.quant.formats import packed_format
from fp8moe.runtime.checks import describe

_ARRANGED_SCALES = {"mxfp4": arranged.arranged_exponents, "nvfp4": arranged.arranged_scales}


_MINUS_ZERO, _NAN = 128, 255  # codes of E4M3; those of negative numbers are between them


def pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each weight's name with that of its scale."""
    return zip(names[::2], names[1::2], strict=True)


def tensor_scale_name(name: str) -> str:
    """Return the name of the tensor scales of a weight in NVFP4."""
    return f"{name}_tensor_scale"


def as_kept(layer: Any, state: dict[str, Tensor], prefix: str) -> list[str]:
    """Convert a state dict to how `layer`, a GroupedExperts in four bits, keeps its weights.

    Codes are arranged unless scales beside them are. Tensors of a wrong dtype or shape stay as they are, for PyTorch to
    refuse them. Returns what is wrong with NVFP4: tensor scales that do not belong to the scales, negative scales.
    """
    problems: list[str] = []
    for name, scale_name in pairs(layer.weight_names):
        own, own_scale = getattr(layer, name), getattr(layer, scale_name)
        key, scale_key, tensor_key = (prefix + each for each in (name, scale_name, tensor_scale_name(name)))
        data, scale = state.get(key), state.get(scale_key)
        known = scale is not None and scale.dtype in layer.kept.scale_dtypes
        form = packed_format(own_scale)
        if form not in arranged.ARRANGED:
            if known and scale.dtype != own_scale.dtype:  # scales keep their dtype
                setattr(layer, scale_name, frozen(torch.empty_like(own_scale, dtype=scale.dtype)))
            continue
        shape = arranged.stored_shape(own, form)[1:]
        if known:
            state[scale_key] = scale = scale.view(own_scale.dtype)
        if known and scale.shape[1:] == shape:
            projections = 2 if name == "gate_up_proj" else 1
            scales = [scale]
            if form == "nvfp4":
                expected = torch.Size((len(scale), 2)[:projections])
                problems += _wrong_scales(scale_key, scale, tensor_key, state.get(tensor_key), expected)
                if problems:
                    continue
                scales.append(_sharded_like(scale, state.pop(tensor_key)))
            convert = partial(_ARRANGED_SCALES[form], projections=projections)
            (state[scale_key],) = _by_shard(scale_key, convert, *scales)
        stored = scale is None or scale.shape[1:] == shape
        if stored and data is not None and (data.dtype, data.shape[1:]) == (own.dtype, own.shape[1:]):
            (state[key],) = _by_shard(key, arranged.arranged_codes, data)
    return problems


def _wrong_scales(
    scale_key: str, scale: Tensor, tensor_key: str, tensor_scale: Tensor | None, shape: torch.Size
) -> Iterator[str]:
    """Yield what is wrong with the scales of a weight in NVFP4. shape: of its tensor scales."""
    if tensor_scale is None or (tensor_scale.dtype, tensor_scale.shape) != (torch.float32, shape):
        got = "none" if tensor_scale is None else describe(tensor_scale)
        yield f"{tensor_key}: expected float32 {tuple(shape)} beside {scale_key}, got {got}"
    codes = local(scale).view(torch.uint8)
    if not codes.is_meta and ((codes > _MINUS_ZERO) & (codes < _NAN)).any():
        yield f"{scale_key}: expected scales that are not negative, which fp8moe cannot keep"


def _sharded_like(like: Tensor, values: Tensor) -> Tensor:
    """Return values (E, ...) as the DTensor `like`: PyTorch shards what it loads from a whole state by its parameters.

    Tensor scales are no parameters, so they are whole then. DTensors stay as they are.
    """
    if not is_sharded(like) or is_sharded(values):
        return values
    (chunk,) = like.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    here = values.narrow(0, chunk.offsets[0], chunk.sizes[0]).to(like.device)
    options = {"run_check": False, "shape": values.shape, "stride": values.stride()}
    return type(like).from_local(here, like.device_mesh, like.placements, **options)


def as_stored(layer: Any, state: dict[str, Tensor], prefix: str, local_metadata: dict) -> None:
    """Save weights as checkpoints have them, unless the parameters themselves are asked for, or are on the meta device.

    transformers takes the names of what it loads from a state dict on the meta device.
    """
    for name, scale_name in pairs(layer.weight_names):
        keys = [prefix + each for each in (name, scale_name, tensor_scale_name(name))]
        data, scale = (state[key] for key in keys[:2])
        if packed_format(scale) in arranged.ARRANGED and not (isinstance(scale, nn.Parameter) or scale.is_meta):
            state.update(zip(keys, _by_shard(keys[0], _stored, data, scale), strict=False))


def _stored(data: Tensor, scale: Tensor) -> list[Tensor]:
    return [part for part in arranged.as_stored(data, scale) if isinstance(part, Tensor)]


def _by_shard(name: str, convert: Callable[..., Tensor | list[Tensor]], *values: Tensor) -> list[Tensor]:
    """Apply ``convert`` to tensors, or to this rank's shards of DTensors, and return its results.

    Raises ValueError, which begins with ``name``, for DTensors that are not all sharded by experts alike.
    """
    of, places = values[0], [getattr(value, "placements", None) for value in values]
    for value, placements in zip(values, places, strict=True):
        if local(value).shape[1:] != value.shape[1:]:
            raise ValueError(f"{name}: expected whole experts on each rank, got a DTensor with {placements}")
        if placements != places[0]:
            raise ValueError(f"{name}: expected all that belongs to it with {places[0]}, got {placements}")
    made = convert(*map(local, values))
    results = [made] if isinstance(made, Tensor) else made
    if not is_sharded(of):
        return results
    shapes = (torch.Size((of.shape[0], *result.shape[1:])) for result in results)
    return [
        type(of).from_local(result, of.device_mesh, of.placements, run_check=False, shape=shape, stride=result.stride())
        for result, shape in zip(results, shapes, strict=True)
    ]
