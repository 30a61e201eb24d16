"""load_model: a transformers model with its FP8 weights as they are, on a CPU too."""

import os
from pathlib import Path
from typing import Any

import torch

from fp8moe.checkpoints.read import CheckpointError, open_checkpoint
from fp8moe.integrations.architecture import construction_lock, empty_model, read_config, read_generation_config


def load_model(
    directory: str | os.PathLike, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Any:
    """The causal language model of a checkpoint, with its FP8 weights as they are: on a CPU too.

    transformers itself turns FP8 weights back into bfloat16 where there is no GPU. Here every linear and every experts
    module whose weights are FP8 in the checkpoint becomes an `FP8Linear` or a `GroupedExperts`, and the rest stays
    transformers' own, which also makes the model: checkpoints may have any names and layouts that it converts. Nothing
    is allocated twice: parameters get memory when their tensors are read.

    directory: config.json and safetensors files, as transformers or fp8moe write them (see
        fp8moe.integrations.checkpoints for the spellings of names); read without a network.
    dtype: of everything that is not FP8, and of the activations.
    device: where the model is to be.
    Returns the model in eval mode.

    For a moment transformers changes PyTorch's default dtype, for all threads, and the way in which models of its own
    tie weights. Modules that other threads make then are otherwise what they always are.

    Raises CheckpointError (a ValueError), before any weight is read, listing what is missing, extra or misshapen, or
    why transformers cannot make a model of config.json; ImportError without transformers.
    """
    from fp8moe.integrations.transformers.quantizer import ReplaceModules
    from fp8moe.integrations.transformers.tensors import match_model

    directory, device = Path(directory), torch.device(device)
    checkpoint = open_checkpoint(directory)
    if not checkpoint.config:
        raise CheckpointError(f"cannot load {directory}", [*checkpoint.problems, "config.json: missing or empty"])
    try:
        config, generation_config = read_config(checkpoint), read_generation_config(checkpoint)
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None:
            del config.quantization_config  # or transformers would quantize by itself
        matched = match_model(checkpoint, empty_model(config))
    except ValueError as error:
        raise CheckpointError(f"cannot load {directory}", [*checkpoint.problems, str(error)]) from error
    problems = matched.problems + matched.cast_by_transformers(dtype)
    if problems:
        raise CheckpointError(f"cannot load {directory}", problems)
    with checkpoint.reader() as reader, construction_lock:
        model, report = type(matched.model).from_pretrained(
            None,
            config=matched.model.config,
            dtype=dtype,
            state_dict=matched.tensors(reader, device),
            quantization_config=ReplaceModules(matched.replaced, device),
            output_loading_info=True,
        )
    left = [f"{key}: {kind}" for kind, keys in report.items() for key in sorted(map(str, keys))]
    if left:
        raise CheckpointError(f"cannot load {directory}, transformers reports", left)
    if quantization is not None:
        model.config.quantization_config = quantization
    if generation_config is not None:
        model.generation_config = generation_config
    return model
