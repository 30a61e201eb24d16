"""The sizes of a model on the command line: a checkpoint, its config.json, or a model type with sizes by hand."""

import argparse
import json
from pathlib import Path
from typing import Any

from fp8moe.checkpoints.read import CONFIG, read_json


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", type=Path, metavar="SRC", help="a checkpoint, or its config.json")
    add_type = {"metavar": "TYPE", "help": "instead of SRC: a model type of transformers, such as qwen3_moe"}
    parser.add_argument("--model-type", **add_type)
    size = {"type": _size, "action": "append", "default": [], "metavar": "NAME=VALUE"}
    parser.add_argument("--set", **size, help="a value of the configuration, such as hidden_size=2048; may be repeated")


def read_source(options: argparse.Namespace) -> dict[str, Any]:
    """What config.json holds, or would hold. Raises ValueError where there is none."""
    if (options.source is None) == (options.model_type is None):
        raise ValueError("expected either SRC or --model-type")
    if options.source is None:
        return {"model_type": options.model_type, **dict(options.set)}
    path = options.source / CONFIG if options.source.is_dir() else options.source
    if not path.is_file():
        raise ValueError(f"SRC is {str(options.source)!r}; it must be a directory with a {CONFIG}, or such a file")
    problems: list[str] = []
    content = read_json(path, problems)
    for problem in problems:
        raise ValueError(problem)
    return content | dict(options.set)


def _size(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
