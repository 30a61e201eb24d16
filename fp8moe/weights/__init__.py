"""Read, write, inspect, quantize and convert FP8 checkpoints, and refit running models with new weights."""

from fp8moe.layers.replaced import DEFAULT_SKIP
from fp8moe.weights.inspect import inspect_checkpoint
from fp8moe.weights.load import load_fp8_checkpoint
from fp8moe.weights.quantize import convert_checkpoint, quantize_checkpoint
from fp8moe.weights.save import save_fp8_checkpoint
from fp8moe.weights.source import CheckpointError
from fp8moe.weights.stored import Format, find_format

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
