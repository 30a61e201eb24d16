"""`fp8moe quantize`, `convert` and `inspect`: make FP8 checkpoints, and describe them."""

import argparse
import json
from dataclasses import asdict

import torch

from fp8moe.runtime.progress import shown
from fp8moe.weights import DEFAULT_SKIP, convert_checkpoint, inspect_checkpoint, quantize_checkpoint


def quantize(options: argparse.Namespace) -> int:
    device = _device(options)
    with shown(not options.quiet):
        quantize_checkpoint(
            options.source,
            options.target,
            skip=(*DEFAULT_SKIP, *options.skip),
            scale_format=options.scale_format,
            device=device,
            allow_nonfinite=options.allow_nonfinite,
            force=options.force,
        )
    return _describe(options)


def convert(options: argparse.Namespace) -> int:
    device = _device(options)
    with shown(not options.quiet):
        error = convert_checkpoint(
            options.source,
            options.target,
            requantize=options.requantize,
            device=device,
            force=options.force,
        )
    status = _describe(options)
    if error is not None:
        print(f"quantized again, with a relative error of {error:.2%} added")
    return status


def inspect(options: argparse.Namespace) -> int:
    report = inspect_checkpoint(options.directory)
    made = asdict(report) | {"format": report.format._asdict()}
    print(json.dumps(made, default=str, indent=2) if options.json else report)
    return 1 if report.problems else 0


def _device(options: argparse.Namespace) -> str | None:
    """The device to quantize on, None for a GPU if there is one. Raises ValueError for one that is missing."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch finds no GPU that it can use; --device cpu works too")
    return None if options.device == "auto" else options.device


def _describe(options: argparse.Namespace) -> int:
    """Print what was written, and return the exit status."""
    report = inspect_checkpoint(options.target)
    if report.problems or not options.quiet:
        print(report)
    return 1 if report.problems else 0
