"""`fp8moe convert`: turn a quantized checkpoint of another format into an FP8 checkpoint of 128x128 blocks."""

import argparse

from fp8moe.commands.quantize import chosen_device
from fp8moe.integrations.checkpoints import convert_checkpoint, inspect_checkpoint
from fp8moe.runtime.progress import shown


def run(options: argparse.Namespace) -> int:
    device = chosen_device(options)
    with shown(not options.quiet):
        error = convert_checkpoint(
            options.source,
            options.target,
            requantize=options.requantize,
            device=device,
            force=options.force,
            verify=options.verify,
        )
    report = inspect_checkpoint(options.target)
    if report.problems or not options.quiet:
        print(report)
    if error is not None:
        print(f"quantized again, with a relative error of {error:.2%} added")
    return 1 if report.problems else 0
