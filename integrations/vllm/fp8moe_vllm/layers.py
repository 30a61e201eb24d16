"""Layers: logs which layers run on fp8moe, and collects their shapes to compile kernels before serving."""

import os
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

import fp8moe

logger = init_logger("vllm.fp8moe")


class Layers:
    """Base of quantization configs: logs which layers run on fp8moe, and compiles their kernels."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._unwarmed: dict[tuple[tuple[str, Any], ...], dict[tuple[int, ...], int]] = {}

    def leave_to_vllm(self, layer: str, why: str) -> None:
        """Log that a layer runs on vLLM's kernels, and why; with FP8MOE_STRICT=1 raise ValueError instead."""
        if os.environ.get("FP8MOE_STRICT") == "1":
            raise ValueError(f"fp8moe: {layer}: {why}; without FP8MOE_STRICT=1 they run on vLLM's kernels")
        logger.warning_once("fp8moe: %s: on vLLM's kernels: %s", layer, why)

    def taken(self, layer: str, shape: tuple[int, ...], max_tokens: int, **how: Any) -> None:
        """Log that fp8moe runs a layer, and record its shape and largest number of tokens for `warm`.

        how: options of `fp8moe.warm` for it.
        """
        logger.info_once("fp8moe: %s %s: on fp8moe", layer, shape)
        self._unwarmed.setdefault(tuple(how.items()), {})[shape] = max_tokens

    def warm(self) -> None:
        """Compile the kernels of all recorded layers, so that none is compiled while a request waits."""
        for how, shapes in self._unwarmed.items() if current_platform.is_cuda() else ():
            fp8moe.warm(shapes, shapes.values(), **dict(how))
        self._unwarmed.clear()
