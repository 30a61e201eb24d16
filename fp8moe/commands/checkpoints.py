"""`fp8moe quantize`, `convert` and `inspect`: make FP8 checkpoints, and describe them."""

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch

from fp8moe.runtime.progress import shown
from fp8moe.weights import DEFAULT_SKIP, convert_checkpoint, inspect_checkpoint, quantize_checkpoint


def quantize(options: argparse.Namespace) -> int:
    own = {"skip": (*DEFAULT_SKIP, *options.skip), "scale_format": options.scale_format, "experts": options.experts}
    own |= {"allow_nonfinite": options.allow_nonfinite, **_writing(options)}
    with shown(not options.quiet):
        quantize_checkpoint(options.source, options.target, **own)
    return _describe(options)


def convert(options: argparse.Namespace) -> int:
    requantize, writing = options.requantize, _writing(options)
    with shown(not options.quiet):
        error = convert_checkpoint(options.source, options.target, requantize=requantize, **writing)
    status = _describe(options)
    if error is not None:
        print(f"quantized again, with a relative error of {error:.2%} added")
    return status


def inspect(options: argparse.Namespace) -> int:
    report = inspect_checkpoint(options.directory)
    made = asdict(report) | {"format": report.format._asdict()}
    print(json.dumps(made, default=str, indent=2) if options.json else report)
    return 1 if report.problems else 0


def _writing(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments `device` and `force`. Raises ValueError for --device cuda without a usable GPU."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch finds no GPU that it can use; --device cpu works too")
    device = None if options.device == "auto" else options.device
    return {"device": device, "force": options.force}


def _describe(options: argparse.Namespace) -> int:
    """Inspect and describe the written checkpoint. Returns the exit status: 1 if something is wrong with it."""
    report = inspect_checkpoint(options.target)
    if report.problems or not options.quiet:
        print(report)
    return 1 if report.problems else 0
