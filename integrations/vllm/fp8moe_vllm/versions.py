"""What differs between the versions of vLLM that are tried, 0.26.0 to 0.33.0, and between devices."""

import os

from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.platforms import current_platform


def not_here() -> str | None:
    """Why fp8moe cannot run on this device; None if it can."""
    if current_platform.is_device_capability(90) or os.environ.get("FP8MOE_BACKEND") == "reference":
        return None
    return "it needs a Hopper GPU (sm_90); FP8MOE_BACKEND=reference runs anywhere, slowly"


def skipped(config: Fp8Config, prefix: str) -> bool:
    """Whether the checkpoint has a layer unquantized; later versions may compare names in other ways than equality."""
    mode = getattr(config, "ignored_layers_match_mode", None)
    return is_layer_skipped(
        prefix, config.ignored_layers, config.packed_modules_mapping, **({"match_mode": mode} if mode else {})
    )
