"""The server of `fp8moe serve`: OpenAI's completions and chat completions over the rows of a GraphDecoder."""

from fp8moe.serving.app import make_app
from fp8moe.serving.manager import BatchingManager, DecoderManager
from fp8moe.serving.ranks import Ranks
from fp8moe.serving.server import serve

__all__ = ["BatchingManager", "DecoderManager", "Ranks", "make_app", "serve"]
