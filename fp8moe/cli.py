"""The command line of `fp8moe`. Parsing arguments needs no PyTorch: only modules of fp8moe.commands import PyTorch."""

import argparse
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fp8moe import __version__
from fp8moe.runtime.sm90 import USUAL_SMS

INTERRUPTED = 130  # exit status after Ctrl-C
_PLACE = "a directory, or a name on the Hugging Face Hub, from where it is downloaded"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Print each error or warning as one line on standard error."""
    options = _parser().parse_args(argv)
    if sys.stdout is None:
        sys.exit(f"{options.prog}: standard output is closed; for no output, redirect it to {os.devnull}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"{options.prog}: warning: {message}", file=sys.stderr)
        try:
            with _ctrl_c_ends():
                run = getattr(import_module(f"fp8moe.commands.{options.module}"), options.function)
            with _ctrl_c_ends():
                import_module("fp8moe.runtime.config").reload()
                status = run(options)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print(f"{options.prog}: interrupted{options.after_interrupt}", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # The reader of the pipe has closed it, as `head` does. Redirect stdout, so that flushing at exit does not
            # fail too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, OSError, RuntimeError, SafetensorError) as error:
            sys.exit(f"{options.prog}: {error}")
    return status


@contextmanager
def _ctrl_c_ends() -> Iterator[None]:
    """Raise KeyboardInterrupt if Ctrl-C is pressed within the block, even if code in the block swallows the exception.

    PyTorch turns a KeyboardInterrupt raised while it checks an element of an argument into a ValueError, and its import
    ignores a KeyboardInterrupt raised while it looks for an optional package.
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
    if pressed:
        raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8moe", description="FP8 layers for mixture-of-experts models on PyTorch")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(after_interrupt="")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add, module, function in (
        (_add_quantize, "checkpoints", "quantize"),
        (_add_convert, "checkpoints", "convert"),
        (_add_inspect, "checkpoints", "inspect"),
        (_add_serve, "serve", "run"),
        (_add_warmup, "warmup", "run"),
        (_add_info, "info", "run"),
    ):
        command = add(commands)
        command.set_defaults(prog=command.prog, module=module, function=function)
    return parser


def _add_quantize(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "quantize",
        help="turn a checkpoint into a DeepSeek-style FP8 checkpoint",
        description="Quantize a checkpoint to E4M3 with one scale for each 128x128 block, then print what was written. "
        "An interrupted run is continued by the same command.",
    )
    add = parser.add_argument
    form = "ue8m0: powers of two, one byte a scale; default: %(default)s"
    add("--scale-format", choices=("float32", "ue8m0"), default="float32", help=form)
    four = "format of experts; four bits are rounded to nearest; default: %(default)s"
    add("--experts", choices=("fp8", "mxfp4", "int4", "int4-32"), default="fp8", help=four)
    skip = (
        "modules to leave unquantized, by name or the last part of it, such as '*.layers.0.*' or 'v_proj'; may be "
        "repeated; default: output layers, embeddings, norms and routers, which are always left out"
    )
    add("--skip", action="append", default=[], metavar="PATTERN", help=skip)
    nonfinite = "go on with weights that hold NaN or infinity; default: an error"
    add("--allow-nonfinite", action="store_true", help=nonfinite)
    _add_writing(parser, "checkpoint with safetensors in bfloat16, float16 or float32")
    return parser


def _add_convert(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "convert",
        help="turn a quantized checkpoint of another format into one of FP8 blocks",
        description="Write a checkpoint with one scale a tensor, MXFP8, MXFP4 or blocks in another layout as E4M3 with "
        "one scale for each 128x128 block and the same values, then print what was written. An interrupted run is "
        "continued by the same command.",
    )
    again = "quantize again what blocks do not hold exactly, such as one scale a channel; the added error is printed"
    parser.add_argument("--requantize", action="store_true", help=again)
    _add_writing(parser, "quantized checkpoint, whose format fp8moe inspect names")
    return parser


def _add_inspect(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "inspect",
        help="what an FP8 checkpoint holds; exit status 1 if something is wrong",
        description="Print what an FP8 checkpoint holds, and list what is wrong with it. Reads headers and scales "
        "only. Exit status 1 if something is wrong.",
    )
    parser.add_argument("directory", metavar="SRC", help=f"checkpoint: {_PLACE}")
    _add_json(parser)
    return parser


def _add_serve(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP with the API of OpenAI",
        description="Serve a model to many clients at once: POST /v1/chat/completions and /v1/completions, GET "
        "/v1/models, /health and /metrics. Ctrl-C ends it when the answers that run have ended, or after 10 s.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"checkpoint, in FP8 or not: {_PLACE}")
    add("--host", default="127.0.0.1", help="address to listen at; default: %(default)s, for this machine alone")
    add("--port", type=_port, default=8000, help="0 for a free one, which is printed; default: %(default)s")
    add("--slots", type=_count, default=64, metavar="N", help="answers that run at once; default: %(default)s")
    most = "most tokens of a prompt with its answer; default: 4096, or the model's positions"
    add("--max-length", type=_count, metavar="L", help=most)
    _add_dtypes(parser)
    add("--device", metavar="D", help="such as cuda:1 or cpu; default: a GPU if there is one")
    add("--served-model-name", metavar="NAME", help="what clients call the model; default: MODEL")
    add("--api-key", metavar="KEY", help="what clients must bring as their bearer token; default: none is asked for")
    code = "run code of its own that the checkpoint has (auto_map in its files); default: refuse what needs it"
    add("--trust-remote-code", action="store_true", help=code)
    _add_json(parser, "when clients can come, ")
    _add_quiet(parser)
    return parser


def _add_warmup(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "warmup",
        help="compile the kernels of a model before it runs; needs no GPU",
        description="Compile the kernels that GraphDecoder and prompts of a model may need. Reads config.json only; "
        "needs neither a GPU nor a driver.",
    )
    add = parser.add_argument
    add("source", nargs="?", type=Path, metavar="SRC", help="a checkpoint, or its config.json")
    add("--model-type", metavar="TYPE", help="instead of SRC: a model type of transformers, such as qwen3_moe")
    value = "a value of the configuration, such as hidden_size=2048; may be repeated"
    add("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help=value)
    sizes = partial(_count, most=65535)
    add("--batch-sizes", type=sizes, nargs="+", default=[1], metavar="B", help="those of GraphDecoder; default: 1")
    add("--max-length", type=_count, default=4096, metavar="L", help="that of GraphDecoder; default: %(default)s")
    tokens = partial(_count, most=1 << 20)
    add("--tokens", type=tokens, default=8192, metavar="T", help="most tokens of a prefill; default: %(default)s")
    stored = "how load_model keeps experts in four bits: as stored, or in FP8; default: %(default)s"
    add("--experts", choices=("stored", "fp8"), default="stored", help=stored)
    _add_dtypes(parser)
    sms = f"SMs of the target GPU; default: those of the GPU here, or {USUAL_SMS}"
    add("--sms", type=_count, metavar="N", help=sms)
    add("--output", type=Path, metavar="DIR", help="where to keep the kernels; default: FP8MOE_CACHE_DIR")
    jobs = len(os.sched_getaffinity(0))
    add("--jobs", type=_count, default=jobs, metavar="N", help="processes that compile; default: one for each CPU")
    add("--check", action="store_true", help="compile nothing; list what is missing, and exit with status 1 if any is")
    _add_json(parser, "with --check: ")
    _add_quiet(parser)
    return parser


def _add_info(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "info",
        help="versions, settings, and what can run here",
        description="Print versions, the values of the FP8MOE_* variables, what each device runs, and whether a kernel "
        "can be compiled.",
    )
    _add_json(parser)
    return parser


def _add_writing(parser: argparse.ArgumentParser, source: str) -> None:
    """Add the arguments of a command that reads one checkpoint and writes another.

    source: beginning of the help text for the argument SRC, the checkpoint to read.
    """
    parser.set_defaults(after_interrupt="; the same command goes on behind the last finished shard")
    add = parser.add_argument
    add("source", metavar="SRC", help=f"{source}: {_PLACE}")
    add("target", metavar="DST", help="directory to write; an interrupted run there is resumed")
    where = "where to quantize, with the same result; default: %(default)s, a GPU if there is one"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=where)
    force = "write to a DST that holds other files, and overwrite those of the same names; default: an error"
    add("--force", action="store_true", help=force)
    _add_quiet(parser)


def _add_dtypes(parser: argparse.ArgumentParser) -> None:
    """Add the dtypes of GraphDecoder."""
    kept = "how keys and values are kept: in FP8 they take half of the memory; default: in the model's dtype"
    parser.add_argument("--cache-dtype", choices=("fp8",), help=kept)
    output = "how the output layer runs: in FP8 a step reads half of its bytes; default: as the model has it"
    parser.add_argument("--output-dtype", choices=("fp8",), help=output)


def _add_json(parser: argparse.ArgumentParser, when: str = "") -> None:
    parser.add_argument("--json", action="store_true", help=f"{when}print one JSON object instead of text")


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print errors and warnings only, and no progress")


def _count(text: str, most: int | None = None) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    if most is not None and int(text) > most:
        raise argparse.ArgumentTypeError(f"expected at most {most}, got {text}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535, got {text!r}")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
