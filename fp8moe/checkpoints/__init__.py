"""DeepSeek-style FP8 checkpoints: safetensors with float8_e4m3fn weights and one scale for each 128x128 of them.

Nothing here knows transformers; `fp8moe.integrations.checkpoints` has the functions that ask it.
"""

from fp8moe.checkpoints.inspect import inspect_checkpoint
from fp8moe.checkpoints.load import load_fp8_checkpoint
from fp8moe.checkpoints.quantize import DEFAULT_SKIP
from fp8moe.checkpoints.read import CheckpointError

__all__ = ["DEFAULT_SKIP", "CheckpointError", "inspect_checkpoint", "load_fp8_checkpoint"]
