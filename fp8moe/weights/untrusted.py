"""Text that may come from anyone: JSON read strictly, and values and names made fit to stand in a message."""

import json
import reprlib
from collections import Counter

MAX_BYTES = 100_000_000
"""The largest JSON text that is read; the safetensors library reads headers up to this size."""

_MAX_DEPTH = 64  # transformers' nested configurations have 4; safetensors allows 128
_TOO_DEEP = f"nested more than {_MAX_DEPTH} deep"
_MAX_DIGITS = 100
_MAX_MESSAGE = 2000  # characters


def parse_object(content: bytes) -> dict:
    """A JSON object in UTF-8.

    Raises ValueError for anything else, for deep nesting, for a name that is there twice and for endless integers.
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=_without_duplicates, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(value)}")
    if _is_deeper(value, _MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def shown(value: object) -> str:
    """A parsed JSON value for a message; a long or nested one is cut."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = 60
    return short.repr(value)


def printable(text: str) -> str:
    """One line that any terminal can show: control characters and lone surrogates escaped, the middle cut out."""
    if len(text) > _MAX_MESSAGE:
        text = f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {shown(name)} is there more than once")
    return content


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _is_deeper(value: object, depth: int) -> bool:
    """Whether lists and objects are nested more than ``depth`` deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return bool(level)
