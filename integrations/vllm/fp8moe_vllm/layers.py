"""What linears and experts tell the configuration that they belong to: where they run, and what is to be compiled."""

import os
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.platforms import current_platform

import fp8moe

logger = init_logger("vllm.fp8moe")


class LayersConfig(Fp8Config):
    """A quantization config that says which layers run on fp8moe, and compiles their kernels."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._unwarmed: dict[tuple[int, ...], int] = {}

    def leave_to_vllm(self, layer: str, why: str) -> None:
        """Say it, or with FP8MOE_STRICT=1 raise ValueError."""
        if os.environ.get("FP8MOE_STRICT") == "1":
            raise ValueError(f"fp8moe: {layer}: {why}; without FP8MOE_STRICT=1 they run on vLLM's kernels")
        logger.warning_once("fp8moe: %s: on vLLM's kernels: %s", layer, why)

    def taken(self, layer: str, shape: tuple[int, ...], max_tokens: int) -> None:
        """Say that fp8moe runs a layer, and note its shape for `warm`."""
        logger.info_once("fp8moe: %s %s: on fp8moe", layer, shape)
        self._unwarmed[shape] = max_tokens

    def warm(self) -> None:
        """Compile the kernels of all layers that were made, so that none is compiled while a request waits."""
        if self._unwarmed and current_platform.is_cuda():
            shapes, counts = zip(*self._unwarmed.items(), strict=True)
            fp8moe.warm(shapes, counts)
        self._unwarmed.clear()
