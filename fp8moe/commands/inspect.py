"""`fp8moe inspect`: describe an FP8 checkpoint and list its problems."""

import argparse

from fp8moe.checkpoints import inspect_checkpoint

HELP = "what an FP8 checkpoint holds; exit status 1 if something is wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR")


def run(options: argparse.Namespace) -> int:
    report = inspect_checkpoint(options.directory)
    print(report)
    return 1 if report.problems else 0
