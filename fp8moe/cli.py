"""The command `fp8moe`."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from safetensors import SafetensorError

from fp8moe import __version__
from fp8moe.commands import info, inspect, quantize, warmup
from fp8moe.runtime import config

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Errors and warnings become one line each on standard error."""
    parser = argparse.ArgumentParser(prog="fp8moe", description="FP8 layers for mixture-of-experts models on PyTorch")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in {"quantize": quantize, "inspect": inspect, "warmup": warmup, "info": info}.items():
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.DESCRIPTION)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, prog=subparser.prog)
    options = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"{options.prog}: warning: {message}", file=sys.stderr)
        try:
            config.reload()
            status = options.run(options)
            sys.stdout.flush()
        except KeyboardInterrupt as interrupt:
            print(f"{options.prog}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # Whoever read has gone, as `head` does; nothing is left to say, at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, OSError, RuntimeError, SafetensorError) as error:
            sys.exit(f"{options.prog}: {error}")
    return status
