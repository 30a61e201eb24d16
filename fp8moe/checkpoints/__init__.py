"""DeepSeek-style FP8 checkpoints: safetensors with float8_e4m3fn weights and one scale for each 128x128 of them."""

from fp8moe.checkpoints.files import CheckpointError
from fp8moe.checkpoints.inspect import inspect_checkpoint
from fp8moe.checkpoints.load import load_fp8_checkpoint
from fp8moe.checkpoints.quantize import DEFAULT_SKIP, quantize_checkpoint
from fp8moe.checkpoints.save import save_fp8_checkpoint

__all__ = [
    "DEFAULT_SKIP",
    "CheckpointError",
    "inspect_checkpoint",
    "load_fp8_checkpoint",
    "quantize_checkpoint",
    "save_fp8_checkpoint",
]
