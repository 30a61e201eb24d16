"""`python -m tools.format_matrix`: which functions read each published checkpoint layout, and with what result.

Writes a tiny Qwen3-MoE with random weights in each of `tests.checkpoint_formats.LAYOUTS`. Everything that reads
checkpoints is tried on it, on the CPU and in the default dtype, and every model that results is run. The result is
validation/formats.json. With names of layouts it prints their rows and writes nothing. Cells are as in
`tools.model_matrix`: "yes", "refused: " or "wrong: " with the reason.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8moe import FP8Linear, GroupedExperts, PackedTensor, dequantize
from fp8moe.hf import load_model, report
from fp8moe.weights import convert_checkpoint, find_format, inspect_checkpoint, load_fp8_checkpoint, quantize_checkpoint
from tests.checkpoint_formats import LAYOUTS, Source
from tests.tiny_moe_models import MODELS, TinyModel
from tools.matrices import Wrong
from tools.model_matrix import ROOT, Refusal, cell, check_close, check_decoder, logits_of, prepare

FILE = ROOT / "validation" / "formats.json"
COLUMNS = ("inspect", "load_model", "load_fp8_checkpoint", "from_pretrained", "decode", "quantize", "convert")
PACKAGES = ("fp8moe", "torch", "transformers", "compressed-tensors")
LARGEST_ERROR = 4.1e-6  # limit of a weight's largest error / largest value; MXFP8 converted to blocks has this ratio
LARGEST_ERROR_OF_NVFP4 = 2**-4  # that of E4M3, to which a code times its group's scale is rounded in linears
LEAST_COSINE = 0.99  # least cosine between the median token's logits and the logits of the checkpoint's exact values
SIZES = {"hidden_size": 160, "moe_intermediate_size": 96, "num_hidden_layers": 1, "tie_word_embeddings": False}
"""The model's sizes: multiples of 32, but not of 128; `source_of` rounds them up for layouts that need it."""


def source_of(layout: str, directory: Path) -> Source:
    """Build the model whose weights are written in a layout: a text model, one with a text_config, or GPT-OSS."""
    if "text_config" in layout:
        tiny = MODELS["Qwen3VLMoeForConditionalGeneration"]
    elif LAYOUTS[layout].experts == "gpt-oss":
        sizes = {"hidden_size": 160, "intermediate_size": 160, "num_hidden_layers": 2, "num_local_experts": 4}
        tiny = TinyModel("gpt_oss", "AutoModelForCausalLM", sizes)
    else:
        multiple = LAYOUTS[layout].multiple
        sizes = {name: SIZES[name] - SIZES[name] % -multiple for name in ("hidden_size", "moe_intermediate_size")}
        tiny = TinyModel("qwen3_moe", "AutoModelForCausalLM", SIZES | sizes)
    return Source.of_random(directory, tiny.build())


class Trial:
    """One checkpoint layout; for each column of the table a method tries the layout."""

    def __init__(self, layout: str, directory: Path):
        source = source_of(layout, directory / "source")
        self.kind, self.directory, self.other = source.kind, directory / "checkpoint", directory / "other"
        self.expected = source.write(LAYOUTS[layout], self.directory, wanted(layout))
        other = "GPT-OSS" if LAYOUTS[layout].experts == "gpt-oss" else "block"
        source.write(LAYOUTS[other], self.other, wanted(other))
        self.tokens = torch.arange(3, 27).view(2, 12)
        self.models: list[nn.Module] = []  # models that were loaded; the first is run by GraphDecoder

    def inspect(self) -> str:
        report = inspect_checkpoint(self.directory)
        if not report.format.loads:
            raise Refusal("; ".join(report.problems))
        return "; ".join(report.problems)

    def load_model(self) -> str:
        model = load_model(self.directory)
        self._check_logits(model)
        self.models.append(model)
        return self._error(model)

    def load_fp8_checkpoint(self) -> str:
        model = self.models[0] if self.models else load_model(self.other)
        for value in (*model.parameters(), *model.state_dict().values()):
            value.data.fill_(0.5)
        before = {name: value.float() for name, value in model.state_dict().items()}
        try:
            load_fp8_checkpoint(model, self.directory)
        except ValueError:
            if any(not torch.equal(value.float(), before[name]) for name, value in model.state_dict().items()):
                raise Wrong("it changes the model, and refuses") from None
            raise
        self._check_logits(model)
        return self._error(model)

    def from_pretrained(self) -> str:
        model = self.kind.from_pretrained(self.directory, experts_implementation="fp8moe", dtype=torch.bfloat16)
        self._check_logits(model)
        others = {row.why for row in report(model) if row.name.endswith("experts") and row.runs_on != "fp8moe"}
        if others:
            raise Refusal("; ".join(others))
        self.models.append(model)
        return ""

    def decode(self) -> str:
        if not self.models:
            raise Refusal("there is no model of it")
        check_decoder(self.models[0], self.tokens[:, :8])
        return ""

    def quantize(self) -> str:
        quantize_checkpoint(self.directory, self.directory / "quantized")
        raise Wrong("it writes a checkpoint of codes")

    def convert(self) -> str:
        converted = self.directory / "converted"
        convert_checkpoint(self.directory, converted)
        if find_format(converted).scales != "128x128":
            raise Wrong("it does not write blocks")
        model = load_model(converted)
        self._check_logits(model)
        return self._error(model)

    def _check_logits(self, model: nn.Module) -> None:
        check_close(logits_of(model, self.tokens), logits_of(self.expected, self.tokens), LEAST_COSINE)

    @torch.no_grad()
    def _error(self, model: nn.Module) -> str:
        """Return as text how far weights are from the checkpoint's values; raise Wrong if they are too far."""
        largest, count = 0.0, 0
        for name, module in model.named_modules():
            if not isinstance(module, FP8Linear | GroupedExperts):
                continue
            stored, form = module.state_dict(), getattr(module, "weight_format", "fp8")
            for weight, scale in zip(module.weight_names[::2], module.weight_names[1::2], strict=True):
                matrices = 2 if weight == "gate_up_proj" else 1
                scales = stored[scale], stored.get(f"{weight}_tensor_scale")
                value = _dequantized(stored[weight], *scales, form, matrices)
                expected = _in_rows(self.expected.get_submodule(name), weight, matrices)
                largest = max(largest, float((value - expected).abs().max() / expected.abs().max()))
                count += 1
        nvfp4 = find_format(self.directory).name == "nvfp4"
        if not count or largest > (LARGEST_ERROR_OF_NVFP4 if nvfp4 else LARGEST_ERROR):
            raise Wrong(f"{count} weights, with an error of {largest:.1e}")
        return f"within {largest:.1e}" if largest else "exact"


def wanted(layout: str) -> Callable[[str], bool]:
    """Return a function that tells from a weight's name whether to quantize the weight.

    True for linear layers and experts of the language model, or only for experts if the layout has no others.
    """
    only_experts = LAYOUTS[layout].experts != "separate"

    def quantized(name: str) -> bool:
        if "visual" in name or (only_experts and "experts" not in name):
            return False
        return name.removesuffix(".weight").endswith("_proj")

    return quantized


def _in_rows(module: nn.Module, weight: str, matrices: int) -> Tensor:
    """Return a weight of a transformers module as (..., N, K), with gate before up instead of interleaved."""
    value = module.get_parameter(weight)
    if getattr(module, "is_transposed", False):
        value = value.mT
    if getattr(module, "is_concatenated", True):
        return value
    return torch.cat([value[:, first::matrices] for first in range(matrices)], 1)


def _dequantized(data: Tensor, scale: Tensor, tensor_scale: Tensor | None, form: str, matrices: int) -> Tensor:
    """Return the values of a weight; an expert's gate and up projections have separate scale blocks."""
    if tensor_scale is not None:  # for each row
        tensor_scale = tensor_scale.view(len(data), -1).repeat_interleave(data.shape[1] // matrices, 1)
    if form != "fp8":
        return dequantize(PackedTensor(data, scale, form.partition("-")[0], tensor_scale))
    parts = zip(data.chunk(matrices, -2), scale.chunk(matrices, -2), strict=True)
    return torch.cat([dequantize(part) for part in parts], -2)


def row_of(layout: str, directory: Path, columns: Iterable[str] = COLUMNS) -> dict:
    """Return the result of `find_format` for a layout's checkpoint, and the cells of the layout's row by column."""
    torch.manual_seed(0)
    trial = Trial(layout, directory)
    cells = {column: cell(getattr(trial, column)).replace(f"{trial.directory}: ", "") for column in columns}
    return {"format": find_format(trial.directory)._asdict(), "cells": cells}


@cache
def versions() -> dict[str, str]:
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


def main() -> None:
    """Print the rows of the named layouts, or write the file."""
    parser = argparse.ArgumentParser(prog="python -m tools.format_matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("layouts", nargs="*", help="print the rows of these layouts; without any, all go to the file")
    names = parser.parse_args().layouts
    prepare()
    found = {}
    for name in names or LAYOUTS:
        with tempfile.TemporaryDirectory() as directory:
            found[name] = row = row_of(name, Path(directory))
        if names:
            print(json.dumps({name: row}, indent=1))
        else:
            print(f"{name:<36}", *(f"{text.partition(':')[0]:<14}" for text in row["cells"].values()), flush=True)
    if not names:
        FILE.write_text(json.dumps({"versions": versions(), "layouts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
