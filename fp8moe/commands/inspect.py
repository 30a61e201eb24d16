"""`fp8moe inspect`: describe an FP8 checkpoint and list its problems."""

import argparse

from fp8moe.checkpoints import inspect_checkpoint

HELP = "what an FP8 checkpoint holds; exit status 1 if something is wrong"
DESCRIPTION = (
    "Print what an FP8 checkpoint holds, and list what is wrong with it. Reads headers and scales only. Exit status 1 "
    "if something is wrong."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="directory of the checkpoint, with its safetensors files")


def run(options: argparse.Namespace) -> int:
    report = inspect_checkpoint(options.directory)
    print(report)
    return 1 if report.problems else 0
