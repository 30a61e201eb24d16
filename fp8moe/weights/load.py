"""Fills a model from an FP8 checkpoint: everything is checked first, then tensors are copied one at a time."""

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn

from fp8moe.layers.master import invalidate_masters
from fp8moe.layers.replaced import as_patterns
from fp8moe.weights.as_blocks import as_blocks, inexact_weights
from fp8moe.weights.match import Destination, plan_load, state_of
from fp8moe.weights.read import Checkpoint, CheckpointError, Piece, TensorReader, open_checkpoint
from fp8moe.weights.sharded import Ranks
from fp8moe.weights.untrusted import printable


def load_fp8_checkpoint(
    model: nn.Module, directory: str | os.PathLike, *, ignore: Iterable[str] = (), device: torch.device | str = "cpu"
) -> None:
    """Load an FP8 checkpoint, of any format that `find_format` says loads, into FP8Linear and GroupedExperts.

    model: its state dict must have what the checkpoint has, with the names and shapes that it has there. Besides:
        - experts one by one (experts.7.gate_proj.weight or w1, w3, w2) go into the fused parameters;
        - a weight's scale is called weight_scale_inv, weight_scale or scale, and has any dtype exact in float32;
        - one scale a tensor, MXFP8 and MXFP4 become blocks of 128x128, and fused experts (E, K, N) are transposed;
        - GPT-OSS's rows of gate and up, which take turns in weights and biases, are parted: all of gate comes first;
        - static scales of activations, keys and values are ignored, with a warning: all are quantized as they come;
        - Mixtral's block_sparse_moe is transformers' mlp;
        - a tensor that the model ties to another need be there only once;
        - tensors that a transformers model ignores (its _keys_to_ignore_on_load_unexpected) are ignored;
        - unquantized tensors are converted from one floating dtype to another.
        Also transformers' own FP8 modules and unquantized experts are filled, having the same names.
    directory: with model.safetensors, or model.safetensors.index.json and its shards.
    ignore: fnmatch patterns of tensors in the checkpoint that are not wanted.
    device: where parameters and buffers that are on the meta device are created; others stay where they are.

    Everything is checked before anything is copied: names, shapes, dtypes, block size, that every shard is there, whole
    and readable, that every scale is finite and positive. Beside the model, memory holds one tensor at a time, of fused
    experts one expert.

    A model with sharded parameters (DTensors, of FSDP2 or `fp8moe.distributed.ExpertParallel`), also on the meta
    device: all processes of the default group call this, each with a directory that it can read, and read what they
    hold. If one process fails, all raise the same error.

    Raises CheckpointError, which lists all that is wrong by name, with the model untouched.
    """
    state = state_of(model)
    ranks = Ranks(state.values())
    with ranks.step():
        patterns = as_patterns("ignore", ignore)
        device = torch.device(device)
        what, problems = f"cannot load {directory}, the model is unchanged", []
        try:
            checkpoint, found = as_blocks(open_checkpoint(directory))
            plan = plan_load(checkpoint, state, ignored_names(model, patterns, found.unused))
            problems += plan.problems + _bufferless(model, state)
            problems += inexact_weights(found) if not problems else ()
            if found.unused - plan.destinations.keys():
                warn_of_unused(directory)
        except CheckpointError as error:
            what, problems = error.what, error.problems
    wrong = [(what, problems) for what, problems in ranks.gather((what, problems)) if problems]
    if wrong:
        raise CheckpointError(wrong[0][0], dict.fromkeys(chain.from_iterable(problems for _, problems in wrong)))
    with ranks.step():
        _materialize(model, device)
        _copy(checkpoint, plan.destinations, state_of(model))
        invalidate_masters()  # weights that FSDP2 gathers have versions that do not change


def warn_of_unused(directory: str | os.PathLike) -> None:
    """Warn once of static scales."""
    text = "has static scales of activations, keys or values, which are not used: all are quantized as they come"
    warnings.warn(printable(f"{directory} {text}"), stacklevel=3)


def ignored_names(model: nn.Module, patterns: tuple[str, ...], unused: Collection[str]) -> Callable[[str], bool]:
    """Whether a tensor of this name may be in a checkpoint that the model has no place for. unused: some such names."""
    regexes = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def ignored(name: str) -> bool:
        if name in unused or any(fnmatchcase(name, pattern) for pattern in patterns):
            return True
        return any(regex.search(name) for regex in regexes)

    return ignored


def _bufferless(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name}: a buffer on the meta device that no checkpoint has; create the model with its buffers on a real one"
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name not in state
    ]


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers that are on the meta device memory on ``device``; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None or not value.is_meta:
                continue
            if id(value) not in made:
                empty = torch.empty_like(value, device=device)
                is_parameter = isinstance(value, nn.Parameter)
                made[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad) if is_parameter else empty
            setattr(module, name, made[id(value)])


@torch.no_grad()
def _copy(checkpoint: Checkpoint, destinations: Mapping[str, Destination], state: Mapping[str, Tensor]) -> None:
    for tensors in checkpoint.by_file.values():
        with checkpoint.reader() as reader:
            for name in [name for name in tensors if name in destinations]:
                copy_tensor(reader, name, destinations[name], state[destinations[name].key])


def copy_tensor(reader: TensorReader, name: str, destination: Destination, target: Tensor) -> None:
    """Read a tensor into its part of ``target``: of a DTensor, what this process holds."""
    local, part = destination.held_by(target)
    if not local.numel():
        return
    pieces: Iterable[Piece]
    if reader.shape(name) != destination.shape:  # a scale with more or fewer sizes of one
        pieces = [Piece(None, reader.read(name).view(destination.shape)[part])]
    else:
        pieces = reader.pieces(name, part)
    for index, value in pieces:
        piece = local if index is None else local[index]
        piece.copy_(value.to(piece.dtype))
