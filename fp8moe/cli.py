"""The command `fp8moe`."""

import argparse
import sys
from collections.abc import Sequence

from fp8moe.commands import info, inspect, quantize
from fp8moe.runtime import config


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fp8moe", description="FP8 layers for mixture-of-experts models on PyTorch")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in {"quantize": quantize, "inspect": inspect, "info": info}.items():
        subparser = subparsers.add_parser(name, help=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(argv)
    try:
        config.reload()
    except ValueError as error:
        sys.exit(f"fp8moe: {error}")
    return options.run(options)
