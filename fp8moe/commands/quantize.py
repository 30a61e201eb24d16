"""`fp8moe quantize`: turn a checkpoint into an FP8 checkpoint, then describe what was written."""

import argparse

import torch

from fp8moe.integrations.checkpoints import DEFAULT_SKIP, inspect_checkpoint, quantize_checkpoint
from fp8moe.runtime.progress import shown


def chosen_device(options: argparse.Namespace) -> str | None:
    """The device to quantize on, None for a GPU if there is one. Raises ValueError for one that is missing."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch finds no GPU that it can use; --device cpu works too")
    return None if options.device == "auto" else options.device


def run(options: argparse.Namespace) -> int:
    device = chosen_device(options)
    with shown(not options.quiet):
        quantize_checkpoint(
            options.source,
            options.target,
            skip=(*DEFAULT_SKIP, *options.skip),
            scale_format=options.scale_format,
            device=device,
            allow_nonfinite=options.allow_nonfinite,
            force=options.force,
            verify=options.verify,
        )
    report = inspect_checkpoint(options.target)
    if report.problems or not options.quiet:
        print(report)
    return 1 if report.problems else 0
