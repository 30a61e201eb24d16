"""`fp8moe quantize`: turn a checkpoint into an FP8 checkpoint, then describe what was written."""

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8moe.integrations.checkpoints import DEFAULT_SKIP, inspect_checkpoint, quantize_checkpoint

HELP = "turn a checkpoint into a DeepSeek-style FP8 checkpoint"
DESCRIPTION = (
    "Quantize a checkpoint to E4M3 with one scale for each 128x128 block, then print what was written. An interrupted "
    "run is continued by the same command."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="directory with safetensors in bfloat16, float16 or float32")
    parser.add_argument("target", metavar="DST", help="directory to write; an interrupted run there is resumed")
    parser.add_argument(
        "--scale-format",
        choices=("float32", "ue8m0"),
        default="float32",
        help="ue8m0: powers of two, one byte a scale; default: %(default)s",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules to leave unquantized, by name or the last part of it, such as '*.layers.0.*' or 'v_proj'; may be "
        "repeated; default: output layers, embeddings, norms and routers, which are always left out",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to quantize, with the same result; default: %(default)s, a GPU if there is one",
    )
    parser.add_argument(
        "--allow-nonfinite", action="store_true", help="go on with weights that hold NaN or infinity; default: an error"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="write to a DST that holds other files, and overwrite those of the same names; default: an error",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read finished shards and their sources again; default: compare their sizes and times only",
    )


@contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """Within it Ctrl-C is a KeyboardInterrupt, whatever becomes of it on the way out.

    PyTorch takes one that comes while it looks at an element of an argument for a wrong argument: a ValueError.
    """
    before, pressed = signal.getsignal(signal.SIGINT), False
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def press(*_) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def run(options: argparse.Namespace) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch finds no GPU that it can use; --device cpu works too")
    try:
        with ctrl_c_ends():
            quantize_checkpoint(
                options.source,
                options.target,
                skip=(*DEFAULT_SKIP, *options.skip),
                scale_format=options.scale_format,
                device=None if options.device == "auto" else options.device,
                allow_nonfinite=options.allow_nonfinite,
                force=options.force,
                verify=options.verify,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on behind the last finished shard") from None
    report = inspect_checkpoint(options.target)
    print(report)
    return 1 if report.problems else 0
