"""load_model: a transformers model with its FP8 weights as they are, on a CPU too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8moe.checkpoints.files import FP8, CheckpointError, open_checkpoint
from fp8moe.checkpoints.load import load_fp8_checkpoint
from fp8moe.checkpoints.match import EXTRA
from fp8moe.checkpoints.names import BLOCK_IN_MODEL, W_BLOCK
from fp8moe.checkpoints.spelling import renamed
from fp8moe.integrations.transformers.experts import grouped_experts
from fp8moe.layers.linear import FP8Linear


def load_model(
    directory: str | os.PathLike, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Any:
    """The causal language model of a checkpoint, with its FP8 weights as they are: on a CPU too.

    transformers itself turns FP8 weights back into bfloat16 where there is no GPU. Here every linear and every experts
    module whose weights are FP8 in the checkpoint becomes an `FP8Linear` or a `GroupedExperts`, and the rest stays
    transformers' own. Nothing is allocated twice: parameters get memory when their tensors are read.

    directory: config.json and safetensors files, as transformers or fp8moe write them (see
        fp8moe.integrations.checkpoints for the spellings of names); read without a network.
    dtype: of everything that is not FP8, and of the activations.
    device: where the model is to be.
    Returns the model in eval mode.

    Raises CheckpointError (a ValueError) listing what is missing, extra or misshapen; ImportError without transformers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = Path(directory)
    checkpoint = open_checkpoint(directory)
    if not checkpoint.config:
        raise CheckpointError(f"cannot load {directory}", [*checkpoint.problems, "config.json: missing or empty"])
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        del config.quantization_config  # or transformers would quantize by itself
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _keep_in_float32(model, dtype)
    _replace_modules(model, [name for name, info in checkpoint.tensors.items() if info.dtype == FP8])
    try:
        load_fp8_checkpoint(model, directory, device=device)
    except CheckpointError as error:
        patterns = ", ".join(renamed(model)[:3])
        if not patterns or not any(problem.endswith(EXTRA) for problem in error.problems):
            raise
        hint = f"transformers converts {patterns}..., load_model does not: use from_pretrained on a GPU"
        raise CheckpointError(f"cannot load {directory}, the model is unchanged", [hint, *error.problems]) from None
    if quantization is not None:
        config.quantization_config = quantization
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model.to(device).eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory. Buffers get their values: not all are in checkpoints."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(without_memory)
    try:
        yield
    finally:
        handle.remove()


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Put in float32 what transformers' from_pretrained keeps in it with this dtype, such as router biases."""
    patterns = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns += getattr(model, "_keep_in_fp32_modules", None) or ()
    for path, module in model.named_modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                kept = any(f".{pattern}." in f".{path}.{name}." for pattern in patterns)
                if kept and value is not None and value.is_floating_point():
                    value.data = value.data.float()


def _replace_modules(model: nn.Module, names: list[str]) -> None:
    """Put FP8 modules where the checkpoint has FP8 weights; `names` are the weights'."""
    modules = dict(model.named_modules())
    owners = {_owner(_name_in(modules, name), modules) for name in names}
    for owner in sorted(owners):
        module = modules[owner]
        if type(module) is nn.Linear:
            model.set_submodule(owner, FP8Linear.from_linear(module))
        elif isinstance(getattr(module, "down_proj", None), nn.Parameter):
            model.set_submodule(owner, grouped_experts(module))
        # FP8 weights of anything else are for load_fp8_checkpoint to list, with all that does not fit.


def _name_in(modules: dict[str, nn.Module], name: str) -> str:
    """The model's name of a tensor, where the checkpoint may have another name for the block that it is in."""
    block, found, _ = name.partition(W_BLOCK)
    if not found or block + W_BLOCK.removesuffix(".") in modules:
        return name
    return name.replace(W_BLOCK, BLOCK_IN_MODEL)


def _owner(name: str, modules: dict[str, nn.Module]) -> str:
    """The innermost module that holds a tensor of this name; for one expert's tensor, the module of all experts."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name
