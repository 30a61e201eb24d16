"""Code for differences between devices, and between the tested versions of vLLM, 0.26.0 to 0.33.0."""

import os

from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.platforms import current_platform


def not_here() -> str | None:
    """Return why fp8moe cannot run on this device; None if it can."""
    if current_platform.is_device_capability(90) or os.environ.get("FP8MOE_BACKEND") == "reference":
        return None
    return "it needs a Hopper GPU (sm_90); FP8MOE_BACKEND=reference runs anywhere, slowly"


def skipped(config: Fp8Config, prefix: str) -> bool:
    """Return whether the checkpoint stores a layer unquantized.

    The layer's name must be equal to a name in the config's ignored_layers or, in later versions of vLLM, match it as
    the config's ignored_layers_match_mode says.
    """
    mode = getattr(config, "ignored_layers_match_mode", None)
    return is_layer_skipped(
        prefix, config.ignored_layers, config.packed_modules_mapping, **({"match_mode": mode} if mode else {})
    )
