"""Reading, writing, quantizing and inspecting FP8 checkpoints: the names of `fp8moe.checkpoints`."""

from fp8moe.checkpoints import (
    DEFAULT_SKIP,
    CheckpointError,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)

__all__ = [
    "DEFAULT_SKIP",
    "CheckpointError",
    "inspect_checkpoint",
    "load_fp8_checkpoint",
    "quantize_checkpoint",
    "save_fp8_checkpoint",
]
