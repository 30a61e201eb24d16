"""DeepSeek-style FP8 checkpoints: safetensors with float8_e4m3fn weights and one scale for each 128x128 of them."""

from fp8moe.checkpoints import *  # noqa: F403
from fp8moe.checkpoints import __all__ as __all__
