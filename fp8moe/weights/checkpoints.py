"""DeepSeek-style FP8 checkpoints: safetensors with float8_e4m3fn weights and one scale for each 128x128 of them."""

import importlib.util
import os
from collections.abc import Iterable, Set

import torch
from torch import nn

from fp8moe.hf.architecture import find_expert_names
from fp8moe.weights.find_format import Format, find_format
from fp8moe.weights.inspect import inspect_checkpoint
from fp8moe.weights.load import load_fp8_checkpoint
from fp8moe.weights.quantize import DEFAULT_SKIP, Fit, OutputPlan, convert, quantize
from fp8moe.weights.read import CheckpointError
from fp8moe.weights.save import save

__all__ = [
    "DEFAULT_SKIP",
    "CheckpointError",
    "Format",
    "convert_checkpoint",
    "find_format",
    "inspect_checkpoint",
    "load_fp8_checkpoint",
    "quantize_checkpoint",
    "save_fp8_checkpoint",
]


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

    Scales of output channels are stored as compressed-tensors has them (X.weight_scale (N, 1)), and so the
    quantization_config says.

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
    model with parameters on the meta device or in a dtype that is not stored, "ue8m0" with other scales, scales of
    blocks in some modules and of channels in others, or another model on one of the processes.
    """
    save(
        model,
        directory,
        find_expert_names,
        experts=experts,
        scale_format=scale_format,
        max_shard_size=max_shard_size,
    )


def quantize_checkpoint(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    scale_format: str = "float32",
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
    force: bool = False,
    verify: bool = False,
) -> None:
    """Quantize a bfloat16, float16 or float32 checkpoint to FP8 with 128x128 blocks, shard by shard.

    Every weight of two dimensions (X.weight, with its scale in X.weight_scale_inv) and of fused experts
    (experts.gate_up_proj (E, 2I, H), up_proj or down_proj, with experts.gate_up_proj_scale_inv...) is quantized, gate
    and up of fused experts each with blocks of its own; other tensors are copied. What transformers could not load in
    FP8 is copied, too, and a warning names it. GPT-OSS's experts, (E, H, 2I) and (E, I, H) with gate and up in turns,
    get the order of others, and so do their biases: `load_model` loads them. Which shard holds what stays the same, and
    so do names, but for fused experts that transformers renames: they get the names in its model. The index is written
    anew, config.json gets a quantization_config, and the tokenizer, generation settings and other small text files are
    copied.

    src_dir: with model.safetensors, or model.safetensors.index.json and its shards. Links are followed within it, and
        in the hub's cache to the blobs of the same repository.
    dst_dir: made if needed, and locked while this runs. What an interrupted run has finished there is not done again; a
        hidden file lists each finished shard, its source, and the checksums of both. A shard has its final name only
        when it is complete and synced.
    skip: fnmatch patterns of modules that stay as they are, matched with the qualified name
        ("model.layers.3.mlp.gate") and the last part of it ("gate").
    scale_format: "float32", or "ue8m0" for powers of two in one byte (float8_e8m0fnu).
    device: where to quantize; by default a GPU if there is one. The result is the same everywhere.
    allow_nonfinite: go on with weights that hold a NaN or an infinity, which make their blocks useless.
    force: write to a directory that holds other things. Files with the names of this run's are overwritten, and a
        model.safetensors or index that would be read in their place is deleted; all others stay.
    verify: read again what is finished, in both directories. Otherwise files of the same size and time are taken to be
        the same.

    Memory holds one tensor at a time, of fused experts one expert.

    Warns (UserWarning) of links and large files that were left out, and if less than half of the parameters in matrices
    became FP8.

    Raises CheckpointError for a source that is damaged, quantized already, has nothing to quantize or fused experts in
    another layout, for a weight with a NaN or an infinity, for patterns that leave only some of the weights of a
    layer's experts as they are, and for a destination with anything that this run would not write; ValueError for
    unknown options, for patterns outside DEFAULT_SKIP that match nothing, and while another run writes to dst_dir.
    """
    quantize(
        src_dir,
        dst_dir,
        _find_fit,
        skip=skip,
        scale_format=scale_format,
        device=device,
        allow_nonfinite=allow_nonfinite,
        force=force,
        verify=verify,
    )


def convert_checkpoint(
    src_dir: str | os.PathLike,
    dst_dir: str | os.PathLike,
    *,
    requantize: bool = False,
    device: torch.device | str | None = None,
    force: bool = False,
    verify: bool = False,
) -> float | None:
    """Write a quantized checkpoint of another format as one of FP8 weights in 128x128 blocks, shard by shard.

    Values stay as they are, but for MXFP8, where what falls below E4M3's smallest subnormal rounds: by at most 4.1e-6
    of the largest value of its block. Names stay, and scales are called weight_scale_inv. Static scales of
    activations, keys and values are left out.

    src_dir: a checkpoint of any format that `find_format` says loads.
    requantize: take one scale a channel, too, and MXFP4 whose exponents E4M3 cannot hold, and quantize these values
        again.
    device: where to quantize; by default a GPU if there is one.
    dst_dir, force, verify: those of `quantize_checkpoint`.
    Returns the relative Frobenius error that requantizing has added, over all weights that it was done to; None where
    there are none.

    Raises CheckpointError for a source that is damaged, unquantized, or of a format whose values blocks cannot hold.
    """
    return convert(src_dir, dst_dir, requantize=requantize, device=device, force=force, verify=verify)


def _find_fit(plan: OutputPlan, wanted: Set[str]) -> Fit:
    """The part of a plan that transformers can load; all of it, with a note, where transformers cannot be asked."""
    if importlib.util.find_spec("transformers") is None:
        return Fit(plan, notes=["not checked against transformers, which is not installed"])
    if "model_type" not in plan.source.config:
        return Fit(plan, notes=["not checked against transformers: config.json has no model_type"])
    from fp8moe.hf.fit import fit_to_transformers

    return fit_to_transformers(plan, wanted)
