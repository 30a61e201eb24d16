"""`fp8moe quantize`: turn a checkpoint into an FP8 checkpoint, then describe what was written."""

import argparse
import sys

import torch

from fp8moe.checkpoints import DEFAULT_SKIP, inspect_checkpoint, quantize_checkpoint

HELP = "turn a checkpoint into a DeepSeek-style FP8 checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="directory with safetensors in bfloat16, float16 or float32")
    parser.add_argument("target", metavar="DST", help="directory to write; an interrupted run there is resumed")
    parser.add_argument("--scale-format", choices=("float32", "ue8m0"), default="float32", help="default: %(default)s")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="more modules to leave alone")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("fp8moe quantize: --device cuda, but PyTorch finds no GPU that it can use; --device cpu works too")
    try:
        quantize_checkpoint(
            options.source,
            options.target,
            skip=(*DEFAULT_SKIP, *options.skip),
            scale_format=options.scale_format,
            device=None if options.device == "auto" else options.device,
        )
        report = inspect_checkpoint(options.target)
    except (ValueError, OSError) as error:
        sys.exit(f"fp8moe quantize: {error}")
    print(report)
    return 1 if report.problems else 0
