"""Fills a model from an FP8 checkpoint: everything is checked first, then tensors are copied one at a time."""

import os
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from fp8moe.layers.master import invalidate_masters
from fp8moe.layers.replaced import as_patterns
from fp8moe.layers.wrapped import check_unmerged, names_inside, unwrapped
from fp8moe.weights.place import (
    Ranks,
    Target,
    check_writable,
    copy_weights,
    ignored_names,
    match,
    state_of,
    warn_of_unused,
)
from fp8moe.weights.source import (
    CheckpointError,
)
from fp8moe.weights.stored import open_weights
from fp8moe.weights.views import in_blocks, inexact_problems


@torch.inference_mode(False)
def load_fp8_checkpoint(
    model: nn.Module, directory: str | os.PathLike, *, ignore: Iterable[str] = (), device: torch.device | str = "cpu"
) -> None:
    """Load an FP8 checkpoint, of any format that `find_format` says loads, into FP8Linear and GroupedExperts.

    model: its state dict must have what the checkpoint has, with the names and shapes that it has there. Wrapped by
        torch.compile, DistributedDataParallel or peft it has the names of the model inside; adapters stay as they are.
        Besides:
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
    directory: with model.safetensors, or model.safetensors.index.json and its shards; or the name of a model on the
        Hugging Face Hub.
    ignore: fnmatch patterns of tensors in the checkpoint that are not wanted.
    device: where parameters and buffers that are on the meta device are created; others stay where they are.

    Everything is checked before anything is copied: names, shapes, dtypes, block size, that every shard is there, whole
    and readable, that every scale is finite and positive. Beside the model, memory holds one tensor at a time, of fused
    experts one expert.

    A model with sharded parameters (DTensors, of FSDP2 or `fp8moe.distributed.ExpertParallel`), also on the meta
    device: all processes of the default group call this, each with a directory that it can read, and read what they
    hold. If one process fails, all raise the same error.

    Raises CheckpointError, which lists all that is wrong by name, with the model untouched; ValueError for adapters
    that are merged into the weights, for a model of FSDP1, and for one that was made under torch.inference_mode.
    """
    inner = unwrapped("model", model)
    check_unmerged("model", model)
    state = state_of(model)
    ranks = Ranks(state.values())
    with ranks.step():
        check_writable(state)
        patterns = as_patterns("ignore", ignore)
        device = torch.device(device)
        what, problems = f"cannot load {directory}, the model is unchanged", []
        try:
            weights = open_weights(directory)
            weights.check(f"cannot load {directory}")
            moves, found = match(
                weights.checkpoint, in_blocks(weights), Target(state), ignored_names(inner, patterns, weights.unused)
            )
            problems += found + _bufferless(model, state)
            problems += inexact_problems(weights) if not problems else ()
            warn_of_unused(weights, moves)
        except CheckpointError as error:
            what, problems = error.what, error.problems
    wrong = [(what, problems) for what, problems in ranks.gather((what, problems)) if problems]
    if wrong:
        raise CheckpointError(wrong[0][0], dict.fromkeys(chain.from_iterable(problems for _, problems in wrong)))
    with ranks.step():
        _materialize(model, device)
        copy_weights(moves, weights.checkpoint.directory, state_of(model))
        invalidate_masters()  # weights that FSDP2 gathers have versions that do not change


def _bufferless(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    meta = [
        (kind, name)
        for kind, tensors in (("an adapter", model.named_parameters()), ("a buffer", model.named_buffers()))
        for name, value in tensors
        if value.is_meta
    ]
    own = names_inside(model, [name for _, name in meta])
    return [
        f"{name}: {kind} on the meta device that no checkpoint has; create the model with its buffers on a real one"
        for kind, name in meta
        if own[name] not in state
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
