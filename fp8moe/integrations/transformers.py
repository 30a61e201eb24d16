"""transformers models on fp8moe's kernels: experts, FP8 linears, indexers, and a loader that needs no GPU."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8moe.checkpoints.files import FP8, CheckpointError, open_checkpoint
from fp8moe.checkpoints.load import load_fp8_checkpoint
from fp8moe.checkpoints.match import EXTRA
from fp8moe.checkpoints.names import BLOCK_IN_MODEL, W_BLOCK
from fp8moe.checkpoints.spelling import renamed
from fp8moe.integrations.fingerprint import Fingerprint
from fp8moe.integrations.transformers_indexer import route_indexers
from fp8moe.kernels.linear.forward import linear
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from fp8moe.quant.formats import BLOCK
from fp8moe.runtime import autograd

NAME = "fp8moe"


def register() -> None:
    """Make ``experts_implementation="fp8moe"`` known to transformers, and run its FP8 linears and indexers on fp8moe's.

    After it, ``AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe")`` or
    ``model.set_experts_implementation("fp8moe")`` is all it takes. Calling it again changes nothing.

    - Experts in bfloat16, float16 or float32 are quantized the first time that they run. The copy is kept beside the
      module, half the size of bfloat16 weights, until the weights move or change; then it is made anew. Writes through
      ``weight.data`` are not noticed: call ``fp8moe.layers.master.invalidate()`` after them.
    - FP8 experts (block size 128x128, dynamic activation scales) run on the module's own weights, with no copy.
    - FP8 linears of every FP8 model in the process, with the same block size and activation scales, run on fp8moe's
      kernels; other formats go on running on transformers' own.
    - The indexers of every DeepSeek-V3.2 and GLM-MoE-DSA model in the process, with 32 or 64 heads of 32, 64 or 128
      values, score in FP8, and the model's cache holds their keys in FP8; those of other sizes run as before. A cache
      made before this call cannot be continued after it.

    An experts module that GroupedExperts cannot express raises TypeError or ValueError with its class and the reason
    when it runs first. Frozen experts pass gradients on; a backward through experts whose weights require gradients
    raises RuntimeError.

    Raises ImportError if transformers is missing.
    """
    from transformers.integrations import finegrained_fp8, moe

    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
    # FP8Linear.forward looks this function up in its module at each call. transformers 5.17 calls it with keywords,
    # 5.23 by position and, where the input needs gradients, inside an autograd function that has a backward.
    if not hasattr(finegrained_fp8.fp8_linear, "_fp8moe"):
        finegrained_fp8.fp8_linear = _routed(finegrained_fp8.fp8_linear)
    route_indexers()


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


# Experts.


def _experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls as the forward of its experts modules, with the arguments of `GroupedExperts.forward`.

    Under expert parallelism ``self`` holds this rank's experts, and experts of other ranks have the index num_experts:
    outside the range, so they add nothing.
    """
    kept = self.__dict__.get("_fp8moe")
    # A compiled forward cannot tell whether weights have changed: it uses the copy that the last eager call has left.
    if kept is None or kept.layer is None or not (torch.compiler.is_compiling() or kept.is_of(self)):
        kept = self.__dict__["_fp8moe"] = None  # frees the old copy before there is a new one
        kept = self.__dict__["_fp8moe"] = _keep(self)
    # The layer is frozen: a backward must say that weights which require gradients get none.
    trained = [weight for weight in _weights(self) if weight.requires_grad]
    if not trained:
        return kept.layer(hidden_states, top_k_index, top_k_weights)
    name = f"fp8moe's {type(self).__name__} with weights that require gradients"
    inputs = (hidden_states, top_k_index, top_k_weights)
    return autograd.run(lambda *args: kept.layer(*args[: len(inputs)]), name, *inputs, *trained)


class _Kept:
    """A GroupedExperts kept beside the module that it was made from. Copies and files of that module leave it out."""

    def __init__(self, layer: GroupedExperts | None = None, weights: Fingerprint | None = None):
        self.layer = layer
        self.weights = weights

    def is_of(self, module: nn.Module) -> bool:
        """Whether the layer was made from the weights that the module has now."""
        return self.weights is not None and self.weights.matches(_weights(module))

    def __reduce__(self):
        return _Kept, ()


def _weights(module: nn.Module) -> list[Tensor]:
    return [value for value in module._parameters.values() if value is not None]


@torch.compiler.disable
def _keep(module: nn.Module) -> _Kept:
    return _Kept(_grouped_experts(module), Fingerprint(_weights(module)))


@torch.inference_mode(False)
@torch.no_grad()
def _grouped_experts(module: nn.Module) -> GroupedExperts:
    try:
        if getattr(module, "block_size", ()) is None:
            raise ValueError(f"module: one scale per tensor; expected blocks of {BLOCK}x{BLOCK}")
        return GroupedExperts.from_experts(module)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{type(module).__name__} cannot run with experts_implementation={NAME!r}: {error}"
        ) from error


# Linears.


def _routed(theirs):
    """transformers' fp8_linear, with fp8moe's in its place where the format is ours."""

    @functools.wraps(theirs)
    def fp8_linear(
        input, weight, weight_scale_inv, block_size=None, bias=None, activation_scale=None, *arguments, **options
    ):
        ours = (
            weight.dtype is torch.float8_e4m3fn
            and activation_scale is None
            and block_size is not None
            and tuple(block_size) == (BLOCK, BLOCK)
        )
        if not ours:
            return theirs(input, weight, weight_scale_inv, block_size, bias, activation_scale, *arguments, **options)
        scale = _float_scale(weight_scale_inv)
        if torch.is_grad_enabled():  # transformers' parameters may ask for gradients; the weights here are constants
            weight, scale, bias = (value if value is None else value.detach() for value in (weight, scale, bias))
        return linear(input, weight, scale, bias)

    fp8_linear._fp8moe = True
    return fp8_linear


_float_scales = WeakTensorKeyDictionary()  # e8m0 scale -> (its Fingerprint, its values in float32)


def _float_scale(scale: Tensor) -> Tensor:
    """The scale in float32; of e8m0 scales a copy is kept for as long as they live."""
    if scale.dtype is torch.float32:
        return scale
    if torch.compiler.is_compiling():
        return scale.float()
    kept = _float_scales.get(scale)
    if kept is None or not kept[0].matches([scale]):
        kept = _float_scales[scale] = (Fingerprint([scale]), scale.detach().float())
    return kept[1]


# Loading.


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
            model.set_submodule(owner, _grouped_experts(module))
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
