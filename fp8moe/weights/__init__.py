"""Weights from files to modules: FP8 checkpoints read, written, quantized, converted, and refits of models that run."""

from fp8moe.weights.checkpoints import (
    DEFAULT_SKIP,
    CheckpointError,
    Format,
    convert_checkpoint,
    find_format,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)

__all__ = [
    "DEFAULT_SKIP",
    "CheckpointError",
    "Format",
    "convert_checkpoint",
    "find_format",
    "inspect_checkpoint",
    "load_fp8_checkpoint",
    "quantize_checkpoint",
    "save_fp8_checkpoint",
]
