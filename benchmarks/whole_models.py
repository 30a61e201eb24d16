"""Whole transformers models with random weights on the GPU, in FP8 or bfloat16: sizes are what a decode step costs."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from fp8moe import GroupedExperts, replace_linears
from fp8moe.distributed import ExpertParallel
from fp8moe.distributed.transport import all_gather
from fp8moe.layers.parameters import local
from fp8moe.weights import DEFAULT_SKIP

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096}
_YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True, "rope_theta": 1e6}
        | {"max_position_embeddings": 40960},
    ),
    "glm-4.5-air": (
        "glm4_moe",
        {"head_dim": 128, "attention_bias": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ),
    # 4 of its 61 layers, one of them of the 3 dense ones
    "deepseek-v3": (
        "deepseek_v3",
        {"num_hidden_layers": 4, "first_k_dense_replace": 1, "rope_parameters": _YARN}
        | {"max_position_embeddings": 163840},
    ),
    # SmolLM2-1.7B with 8 experts in the place of each feed-forward module
    "smollm2-moe": (
        "mixtral",
        {"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
        | {"num_key_value_heads": 32, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 130000.0}},
    ),
}
"""Model types of transformers, and where a configuration differs from that type's defaults."""

WHOLE = {"deepseek-v3": {"num_hidden_layers": 61, "first_k_dense_replace": 3}}
"""Options of the whole models whose configurations above are cut."""

STD = 0.02  # of weights
FP8_STD = 64.0  # of the E4M3 values
PIECE = 1 << 28  # elements drawn at once


def build(
    name: str,
    *,
    fp8: bool = True,
    device: str = "cuda",
    changes: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> Any:
    """Build the model in eval mode, its experts and linears in FP8, or all of it in bfloat16.

    changes: to the model's configuration. mesh: of the ranks that hold the model together, 1-D, on which all of them
    call it with the same tokens; None: the whole model is here. A rank has its part of the values of the whole model:

    - its experts, by `ExpertParallel`;
    - its heads of attention, its rows and columns of dense feed-forward modules, whose results NCCL adds up in the
      dtype of the model, and its rows of the output layer. What every rank holds: projections to latents, which all
      heads read, shared experts, which take no longer to read than to add up, router, norms and embedding.

    Nothing that is not here is ever in memory, but for one matrix at a time.
    """
    from transformers import AutoConfig

    model_type, options = CONFIGS[name]
    options = options | (changes or {})
    ranks = 1 if mesh is None else mesh.size()
    whole = AutoConfig.for_model(model_type, **options)
    shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    part = {name: _share(name, getattr(whole, name), ranks) for name in shared}
    config = AutoConfig.for_model(model_type, **options | part)
    model = _empty(config)
    shapes = {name: value.shape for name, value in model.named_parameters()}
    if ranks > 1:
        shapes = {name: value.shape for name, value in _empty(whole).named_parameters()}
        head = model.get_output_embeddings()
        rows = _share("vocab_size", head.out_features, ranks)
        model.set_output_embeddings(nn.Linear(head.in_features, rows, bias=False, device="meta", dtype=torch.bfloat16))
    if fp8:
        for path, module in list(model.named_modules()):
            if isinstance(getattr(module, "down_proj", None), nn.Parameter):
                model.set_submodule(path, GroupedExperts.from_experts(module))
        replace_linears(model, skip=DEFAULT_SKIP)
    else:
        model.set_experts_implementation("grouped_mm")
    if ranks > 1:
        _spread(model, mesh, shapes)
    model.to_empty(device=device)
    model.tie_weights()
    for path, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):  # rotary frequencies, which are in no checkpoint
            model.set_submodule(path, type(module)(config).to(device))
    generator = torch.Generator(device)
    rank = 0 if mesh is None else mesh.get_local_rank()
    for parameter_name, parameter in model.named_parameters():
        shape = shapes.get(parameter_name, parameter.shape)  # scales, all equal, have none
        _fill(parameter_name, local(parameter.data), shape, rank, generator)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.zero_()
        elif not buffer_name.endswith("inv_freq"):
            raise ValueError(f"{buffer_name}: nothing says which values it has")
    return model.eval()


def _empty(config: Any) -> Any:
    """Build the model on the meta device, in bfloat16."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _share(name: str, size: int, ranks: int) -> int:
    """Divide a size among ranks. ValueError if it is no multiple."""
    if size % ranks:
        raise ValueError(f"{name}: expected a multiple of the {ranks} ranks, got {size}")
    return size // ranks


def _spread(model: Any, mesh: DeviceMesh, shapes: Mapping[str, torch.Size]) -> None:
    """Share out the experts; put together the results of modules whose weights are smaller than in `shapes`."""
    group = mesh.get_group()

    def add_up(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        dist.all_reduce(output, group=group)
        return output

    def join(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        columns = output.flatten(0, -2)
        parts = all_gather(group, columns).view(mesh.size(), *columns.shape)
        return parts.transpose(0, 1).reshape(*output.shape[:-1], -1)

    for path, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            if module.down_proj.shape != shapes[f"{path}.down_proj"]:
                raise ValueError(f"{path}: expected intermediate_size to be that of dense modules alone")
            parallelize_module(module, mesh, ExpertParallel(method="replicated", uniform=True))
        elif module is model.get_output_embeddings():
            module.register_forward_hook(join)
        elif f"{path}.weight" in shapes and module.weight.shape[-1] < shapes[f"{path}.weight"][-1]:
            module.register_forward_hook(add_up)


def _fill(name: str, value: Tensor, whole: torch.Size, rank: int, generator: torch.Generator) -> None:
    """Fill a parameter of shape `whole` with values that its name decides; value: the part that this rank has."""
    if name.endswith("_scale_inv"):
        value.fill_(STD / FP8_STD)
    elif value.dim() == 1:
        value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    else:
        corner = [rank * mine if mine < size else 0 for mine, size in zip(value.shape, whole, strict=True)]
        for index, matrix in enumerate(value.view(-1, *value.shape[-2:])):
            expert = corner[0] + index if value.dim() == 3 else 0
            generator.manual_seed(zlib.crc32(f"{name} {expert}".encode()))
            _draw(matrix, whole[-2:], corner[-2:], generator)


def _draw(value: Tensor, whole: torch.Size, corner: list[int], generator: torch.Generator) -> None:
    """Draw the part from `corner` on of a random matrix of shape `whole`."""
    (row, column), (rows, columns) = corner, value.shape
    std = FP8_STD if value.dtype == torch.float8_e4m3fn else STD
    at_once = max(PIECE // whole[1], 1)
    for first in range(0, whole[0], at_once):
        size = min(at_once, whole[0] - first), whole[1]
        drawn = torch.randn(size, generator=generator, device=value.device, dtype=torch.bfloat16).mul_(std)
        begin, end = max(first, row), min(first + size[0], row + rows)
        if begin < end:
            value[begin - row : end - row].copy_(drawn[begin - first : end - first, column : column + columns])
