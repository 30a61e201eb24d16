"""Code for differences between the supported versions of transformers: 5.17 (the oldest), 5.23 and 5.24 (the newest).

The comment above each section names the versions that need it; the section can go when none of these is supported.
"""

import functools
import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe.hf.experts import NAME, experts_forward
from fp8moe.quant.formats import as_float
from fp8moe.weights.names import SCALE

# Up to 5.23, models take their cache as `past_key_values`; later ones as `cache`.

CACHE_NAMES = ("cache", "past_key_values")


def cache_name(forward: Callable) -> str | None:
    """Return the name of the parameter through which a forward takes its cache; None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def update_cache(
    past_key_values: Any, cache: Any, keys: Tensor, values: Tensor, layer: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Append new keys and values to a layer of the cache; return all keys and values of this layer.

    past_key_values, cache: the cache is one of them, the other is None. kwargs: further arguments of the forward, which
    later versions of transformers pass to the cache.
    """
    if cache is not None:
        return cache.update(keys, values, layer, kwargs=kwargs)
    return past_key_values.update(keys, values, layer)


LATER_DIGESTS = {
    "73b9cbf33ffbf617": "92647791d19bfb72",  # Qwen3MoeDecoderLayer
    "93a77219ba0b8c81": "96644274337cc9a1",  # MixtralDecoderLayer
    "6ce2b9306cbd4dcd": "ae8de13efb721403",  # Qwen2MoeAttention
    "22ee1ca72f4fbc0f": "c167ccd9ac50b49b",  # Qwen3MoeAttention
    "14020457402ee7ec": "f646f8be1444751f",  # MixtralAttention
    "0fe5c075091ec784": "bcc7d9a8194d1110",  # Glm4MoeAttention
    "93f60903d45cea90": "7035ce544a77a2ac",  # DeepseekV3Attention
    "816ee7ef0bb81415": "22d2a9344e3cc50b",  # GptOssAttention
    "3192a71454cbfc54": "5ad457d5ec4d898d",  # GptOssDecoderLayer
    "eb363fda9040af86": "4d38bfa9ff6accf4",  # MixtralRotaryEmbedding
    "d993ac0e1390ec42": "4d38bfa9ff6accf4",  # Qwen3NextRotaryEmbedding
}
"""Maps digests of earlier forwards to the digests in `known_forwards` of what later versions made of them.

Attention and decoder layers had `past_key_values`. Rotary embeddings multiplied by ``@``, one product for each sum.
"""


# 5.17: transformers' mask for eager attention copies a 0 from the CPU, which cannot be captured in a CUDA graph.


def eager_mask(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    """Make the same additive mask as transformers' `eager_mask`, without a copy from the CPU."""
    from transformers.masking_utils import sdpa_mask

    seen = sdpa_mask(*args, **kwargs)
    return torch.full_like(seen, torch.finfo(dtype).min, dtype=dtype).masked_fill_(seen, 0)


# 5.17 has no `ep_size`: experts are sharded by the styles in a plan, which are classes, not by an implementation from a
# registry.


def has_ep_size() -> bool:
    """Return whether transformers' DistributedConfig has an ep_size, and a registry of ep_implementations."""
    return dist.is_available() and find_spec("transformers.distributed.expert_parallel") is not None


def has_styles() -> bool:
    """Return whether transformers shards experts by styles in a plan, as versions without ep_size do."""
    return dist.is_available() and not has_ep_size()


def over_ranks(config: Any, ranks: int) -> Any:
    """Return the DistributedConfig that spreads a model over ranks: whole experts, all else by transformers' plan.

    config: the model's. ranks: their number.
    """
    from transformers.distributed import DistributedConfig

    if has_ep_size():
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    rules = (config.base_model_tp_plan or {}) | (config.base_model_ep_plan or {})
    return DistributedConfig(tp_size=ranks, tp_plan={f"model.{name}": style for name, style in rules.items()})


STYLE = f"{NAME}_experts"
"""The name of fp8moe's style for experts in a plan."""

_STYLES = {"moe_tp_experts": STYLE, "ep_router": None}
"""Maps a style of transformers in a plan to the style of fp8moe that replaces it; None removes the rule.

The router needs no style.
"""


def make_style(check: Callable[[nn.Module], None], spread: Callable[[nn.Module, Any], None]) -> Any:
    """Make fp8moe's style for experts in a plan.

    spread: called once with the experts module and the mesh. check: called with the experts module before each forward.
    """
    from transformers.distributed import tensor_parallel

    class Style(tensor_parallel.TensorParallelLayer):
        """The style of an experts module whose parameters the plan shards by expert."""

        def should_use_local_tensors(self, module: nn.Module) -> bool:
            return True

        def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: Any) -> tuple:
            check(module)
            return args, kwargs

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            spread(module, mesh)
            module.forward = functools.partial(experts_forward, module)
            return super().install_forward(module, mesh)

    return Style()


def adapt_plans(model: Any, distributed_config: Any) -> None:
    """Put fp8moe's style into the model's plans for experts that are sharded by expert."""
    model._ep_plan = _adapted(model._ep_plan, model)
    if isinstance(distributed_config.tp_plan, dict):
        distributed_config.tp_plan = _adapted(distributed_config.tp_plan, model)


def _adapted(plan: dict[str, str], model: Any) -> dict[str, str]:
    """Return a plan that shards by expert with fp8moe's style for experts; return any other plan unchanged.

    If the model is quantized, the result also has rules for the scales of experts.
    """
    whole = [name for name, style in plan.items() if style == "grouped_gemm"]
    if not whole:
        return plan
    scales = {f"{name}_scale_inv": "grouped_gemm" for name in whole if not name.endswith("_scale_inv")}
    plan = {name: _STYLES.get(style, style) for name, style in plan.items()}
    plan = {name: style for name, style in plan.items() if style is not None}
    return plan | scales if getattr(model, "is_quantized", False) else plan


def complete_plan(theirs):
    """Wrap `update_tp_plan` of transformers' FP8 quantizer: keep rules of whole modules, add those of experts' scales.

    For Qwen3, transformers would keep rules for weights only, so that no module would unwrap the DTensors.
    """

    @functools.wraps(theirs)
    def update_tp_plan(self, config):
        plan = dict(config.base_model_tp_plan or {})
        config = theirs(self, config)
        plan |= config.base_model_tp_plan or {}
        for name, style in list(plan.items()):
            if plan.get(name.rpartition(".")[0]) == "moe_tp_experts":
                plan.setdefault(f"{name}_scale_inv", style)
        config.base_model_tp_plan = plan
        return config

    return update_tp_plan


# 5.17: on the meta device, from_pretrained accepts tensors of any shape and never reports a mismatch.


class Rehearsal:
    """A mixin for quantizers that load to the meta device, without a GPU, and record shapes to find mismatches."""

    _shapes: dict[str, torch.Size]

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update_device_map(self, device_map: Any) -> dict[str, str]:
        return {"": "meta"}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        self._shapes = {name: value.shape for name, value in model.state_dict().items()}

    def changed_shapes(self, loaded: nn.Module) -> set[str]:
        """Return the names of the tensors whose shapes have changed during loading."""
        return {name for name, value in loaded.state_dict().items() if value.shape != self._shapes[name]}


# 5.17: from_pretrained leaves the scales of FP8 checkpoints in their stored dtype, and does not restore the dimensions
# of size 1 that save_pretrained has dropped from the scales.


def note_shapes(theirs):
    """Wrap the FP8 quantizer's preparation of a model: afterwards, record shapes of scales for `complete_scales`."""

    @functools.wraps(theirs)
    def _process_model_before_weight_loading(self, model, *args, **kwargs):
        theirs(self, model, *args, **kwargs)
        scales = {name: value for name, value in model.named_parameters() if name.endswith(SCALE)}
        self._fp8moe_shapes = {name: value.shape for name, value in scales.items()}

    return _process_model_before_weight_loading


def complete_scales(theirs):
    """Wrap the FP8 quantizer's step after loading: before it, convert scales to float32, unless they are E8M0.

    Scales also get the shapes that `note_shapes` has recorded.
    """

    @functools.wraps(theirs)
    def _process_model_after_weight_loading(self, model, *args, **kwargs):
        for name, shape in self._fp8moe_shapes.items():
            module, _, own_name = name.rpartition(".")
            scale = model.get_parameter(name).detach()
            if scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
                scale = as_float(scale)
            if scale.numel() == shape.numel():
                scale = scale.reshape(shape)
            setattr(model.get_submodule(module), own_name, nn.Parameter(scale, requires_grad=False))
        return theirs(self, model, *args, **kwargs)

    return _process_model_after_weight_loading


# 5.17: quantizers do not get the model when they change its weight conversions, and none adds conversions of scales.


def conversions_to_save(model: Any) -> list:
    """Return the renamings and fusions of experts that saving must undo in a model with FP8 weights.

    A change of prefix is none of them: checkpoints have names with and without the prefix, and both are read. Nor is a
    renaming of FP8 weights that leaves the names of their scales.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    names = {name for name, _ in model.named_parameters()}
    quantized = [name for name in names if name + SCALE in names]

    def separates(conversion: Any) -> bool:
        new_name = conversion.reverse_transform().rename_source_key
        pairs = ((name, new_name(name)[0], new_name(name + SCALE)[0]) for name in quantized)
        return any(new not in (name, scale.removesuffix(SCALE)) for name, new, scale in pairs)

    conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
    conversions = [each for each in conversions if not (isinstance(each, WeightRenaming) and separates(each))]
    if "model" not in inspect.signature(HfQuantizer.update_weight_conversions).parameters:
        return _with_scales(conversions, model)
    # Not pre_quantized: fusions of experts that are not in FP8 would get a dequantization, which saving cannot undo.
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=False)
    # Call the base class's method: the quantizer's own would add Mistral's names of scales.
    return HfQuantizer.update_weight_conversions(quantizer, conversions, model)


def _with_scales(conversions: list, model: nn.Module) -> list:
    """Return the conversions, and after each conversion of weights the same conversion of their scales.

    Only conversions of weights for which the model has scales get a second conversion.
    """
    from transformers.core_model_loading import WeightConverter

    scales = [name for name, _ in model.named_parameters() if name.endswith(SCALE)]
    result = []
    for conversion in conversions:
        result.append(conversion)
        sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
        of_weights = isinstance(conversion, WeightConverter) and all(name.endswith(".weight") for name in sources)
        if of_weights and any(re.search(f"{targets[0]}{SCALE}$", name) for name in scales):
            converter = WeightConverter(
                [name + SCALE for name in sources],
                [name + SCALE for name in targets],
                operations=list(conversion.operations),
            )
            converter.scope_prefix, converter.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
            result.append(converter)
    return result
