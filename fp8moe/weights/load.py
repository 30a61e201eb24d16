"""Load an FP8 checkpoint into a model: check everything first, then copy tensors one at a time."""

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
    """Load an FP8 checkpoint into FP8Linear and GroupedExperts, in any format that `find_format` reports as loadable.

    model: its state dict must have the checkpoint's tensors, with the same names and shapes. If torch.compile,
        DistributedDataParallel or peft wraps the model, the names of the model inside count, and adapters stay as they
        are. These differences are allowed:
        - experts stored one by one (experts.7.gate_proj.weight or w1, w3, w2) go into the fused parameters;
        - a weight's scale may be called weight_scale_inv, weight_scale or scale, in any dtype exact in float32;
        - per-tensor scales, MXFP8, MXFP4 and NVFP4 become 128x128 blocks, and fused experts (E, K, N) are transposed;
        - GPT-OSS's gate and up, interleaved by rows in weights and biases, are separated: all of gate comes first;
        - static scales of activations, keys and values are ignored, with a warning: fp8moe quantizes dynamically;
        - Mixtral's checkpoints have block_sparse_moe where transformers' models have mlp;
        - tensors that the model ties together need to be stored only once;
        - tensors that a transformers model ignores (its _keys_to_ignore_on_load_unexpected) are ignored;
        - unquantized tensors are converted from one floating dtype to another.
        Transformers' own FP8 modules and unquantized experts are loaded, too, since they have the same names.
    directory: contains model.safetensors, or model.safetensors.index.json and its shards; or the name of a model on the
        Hugging Face Hub.
    ignore: fnmatch patterns of checkpoint tensors that the model need not have.
    device: where parameters and buffers that are on the meta device are created; others stay where they are.

    Everything is checked before anything is copied: names, shapes, dtypes and block size; that every shard is present,
    complete and readable; and that every scale is finite and positive. Beside the model, memory holds one tensor at a
    time, or one expert of fused experts.

    If the model has sharded parameters (DTensors, of FSDP2 or `fp8moe.distributed.ExpertParallel`), on the meta device
    or not, all processes of the default group call this function, each with a directory that it can read. Each process
    reads the parts of the tensors that it holds. If one process fails, all processes raise the same error.

    Raises CheckpointError, which lists every problem by tensor name, and leaves the model unchanged; ValueError for
    adapters that are merged into the weights, for a model of FSDP1, and for one made under torch.inference_mode.
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
            target = Target(state)
            views = in_blocks(weights, packed=target.packed(weights.stored))
            moves, found = match(weights.checkpoint, views, target, ignored_names(inner, patterns, weights.unused))
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
        invalidate_masters()  # FSDP2's gathered weights keep their version counters when shards are written


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
    """Allocate memory on ``device`` for parameters and buffers on the meta device; tied ones stay tied."""
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
