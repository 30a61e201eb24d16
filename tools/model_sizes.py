"""Sizes and number of GPUs for well-known models: `python -m tools.model_sizes` writes the table of README.

Each model is built from transformers' class on the meta device, with the sizes of its published config.json. Experts
and linear layers count as `fp8moe quantize` writes them: one byte for each weight and a float32 scale for each 128x128
block. Models that are published with experts in four bits are counted a second time, with experts and linear layers as
published. Everything else, such as embeddings, output layer, norms and routers, counts as bfloat16. Layers for
multi-token prediction are not counted, as transformers leaves them out. What works is read from docs/models.md. With
DIR..., it prints the sizes in FP8 of the models in these directories.
"""

import argparse
import functools
import re
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.tables import table, with_tables
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.layers.replaced import DEFAULT_SKIP, matches
from fp8moe.quant.formats import ceil_div
from tools.model_matrix import MARK as MATRIX
from tools.model_matrix import PAGE as MATRIX_PAGE
from tools.model_matrix import read_page

PAGE = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- tools.model_sizes writes what follows -->\n", "<!-- up to here -->\n"
GPUS = {"H100 80 GB": 80e9, "H200 141 GB": 141e9}
FULL = 0.85
"""The fraction of a GPU's memory that weights may take; keys, values and activations need the rest."""
COUNTS = (1, 2, 4, 8, 16)
WORKS = {
    "quantize": "`fp8moe quantize`",
    "load_model": "loading",
    "GraphDecoder": "`GraphDecoder`",
    "train": "training",
}


class Stored(NamedTuple):
    """How a checkpoint with experts in four bits is published: the experts' `weight_format`, and linears' format."""

    experts: str
    linears: str = "bfloat16"


class Published(NamedTuple):
    """A published model. formats: the formats in which it is published.

    billions: billions of parameters according to its authors. numbers: the sizes in its config.json. stored: None for
    a model that is not published with experts in four bits.
    """

    model_type: str
    billions: float
    formats: str
    numbers: dict = {}
    instead: str = ""
    """Text that replaces what docs/models.md says about what works; "" if nothing replaces it."""
    stored: Stored | None = None


_GLM = {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552}
_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
MODELS = {
    "Qwen3-30B-A3B": Published(
        *("qwen3_moe", 30.5, "bfloat16, FP8"),
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768}
        | _QWEN3,
    ),
    "Qwen3-235B-A22B": Published(
        *("qwen3_moe", 235, "bfloat16, FP8"),
        {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536}
        | _QWEN3,
    ),
    "Qwen3-Next-80B-A3B": Published("qwen3_next", 80, "bfloat16, FP8"),
    "DeepSeek-V3, R1": Published("deepseek_v3", 671, "FP8"),
    "DeepSeek-V3.2": Published("deepseek_v32", 671, "FP8"),
    "DeepSeek-V4-Flash": Published("deepseek_v4", 284, "FP8 with MXFP4 experts", stored=Stored("mxfp4", "fp8")),
    "DeepSeek-V4-Pro": Published(
        *("deepseek_v4", 1600, "FP8 with MXFP4 experts"),
        {
            **{"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536},
            **{"n_routed_experts": 384, "moe_intermediate_size": 3072, "o_groups": 16},
        },
        stored=Stored("mxfp4", "fp8"),
    ),
    "GLM-4.5, 4.6": Published(
        *("glm4_moe", 355, "bfloat16, FP8"),
        {
            **{"hidden_size": 5120, "num_hidden_layers": 92, "intermediate_size": 12288, "first_k_dense_replace": 3},
            **{"n_routed_experts": 160, "moe_intermediate_size": 1536, "attention_bias": True, "use_qk_norm": True},
        }
        | _GLM,
    ),
    "GLM-4.5-Air": Published(
        *("glm4_moe", 106, "bfloat16, FP8"),
        {
            **{"hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944, "first_k_dense_replace": 1},
            **{"n_routed_experts": 128, "moe_intermediate_size": 1408, "attention_bias": True, "use_qk_norm": False},
        }
        | _GLM,
    ),
    "GPT-OSS-20b": Published(
        *("gpt_oss", 20.9, "MXFP4", {"num_hidden_layers": 24, "num_local_experts": 32}), stored=Stored("mxfp4")
    ),
    "GPT-OSS-120b": Published("gpt_oss", 116.8, "MXFP4", stored=Stored("mxfp4")),
    "MiniMax-M2": Published("minimax_m2", 229, "FP8"),
    "Mixtral-8x7B": Published("mixtral", 46.7, "bfloat16"),
    "Mixtral-8x22B": Published(
        *("mixtral", 141, "bfloat16"),
        {"hidden_size": 6144, "num_hidden_layers": 56, "num_attention_heads": 48, "intermediate_size": 16384},
    ),
    "Kimi-K2, K2-Thinking": Published(
        *("deepseek_v3", 1026, "FP8, Thinking in INT4"),
        {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
        | {"vocab_size": 163840, "n_group": 1, "topk_group": 1},
        "transformers has no `kimi_k2`",
        Stored("int4-32"),
    ),
}


class Sizes(NamedTuple):
    """Bytes of a model (routed experts, everything else) and the number of its parameters."""

    experts: int
    rest: int
    parameters: int

    def gpus(self, memory: float) -> int | None:
        """Return the smallest number of GPUs, of those in COUNTS, that holds the model; None if the largest does not.

        Each GPU holds its share of the experts, and all other weights. memory: bytes of one GPU.
        """
        return next((count for count in COUNTS if self.experts / count + self.rest <= FULL * memory), None)


def config_of(name: str) -> PreTrainedConfig:
    """Return the configuration of a model in MODELS: transformers' defaults, with the model's published sizes."""
    model = MODELS[name]
    return AutoConfig.for_model(model.model_type, **model.numbers)


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a bfloat16 model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@functools.cache
def published(name: str, stored: Stored | None = None) -> Sizes:
    """Return the bytes and parameters of a model in MODELS, with its published sizes. stored: see `sizes`."""
    return sizes(on_meta(config_of(name)), stored)


def sizes(model: nn.Module, stored: Stored | None = None) -> Sizes:
    """Count the bytes of a model and its parameters. stored: None for a model as `fp8moe quantize` writes it."""
    experts = rest = parameters = 0
    fp8_linears = stored is None or stored.linears == "fp8"
    for name, weight in model.named_parameters():
        module, _, last = name.rpartition(".")
        fused = weight.dim() == 3 and bool(re.search(r"\bexperts\.(gate_up|up|down)_proj$", name))
        linear = last == "weight" and type(model.get_submodule(module)) is nn.Linear
        size = 2 * weight.numel()
        if fused and stored is not None:
            form, group = PACKED_WEIGHTS[stored.experts]  # scales are E8M0 or bfloat16
            size = weight.numel() // 2 + weight.numel() // group * (1 if form == "mxfp4" else 2)
        elif fused or (fp8_linears and linear and not matches(module, DEFAULT_SKIP)):
            *lead, rows, columns = weight.shape
            parts = 2 if fused and last == "gate_up_proj" else 1  # gate and up projections have separate scale blocks
            blocks = prod(lead) * parts * ceil_div(rows // parts, 128) * ceil_div(columns, 128)
            size = weight.numel() + 4 * blocks
        experts, rest = (experts + size, rest) if fused else (experts, rest + size)
        parameters += weight.numel()
    return Sizes(experts, rest, parameters)


def works(name: str, matrix: dict[str, dict[str, str]]) -> str:
    """Return, in words, what works for a model's class according to docs/models.md."""
    if MODELS[name].instead:
        return MODELS[name].instead
    kind = AutoModelForCausalLM._model_mapping[type(config_of(name))].__name__
    missing = [words for column, words in WORKS.items() if not matrix[kind][column].startswith("yes")]
    return f"all but {' and '.join(missing)}" if missing else "all"


def cells(size: Sizes) -> list[str]:
    """Return GB and GPUs, as text."""
    count = [str(size.gpus(memory) or f"more than {COUNTS[-1]}") for memory in GPUS.values()]
    return [f"{(size.experts + size.rest) / 1e9:.0f}", *count]


HEADER = ["", "billions", "GB in FP8", *(f"GPUs: {name}" for name in GPUS)]
LLAMA_4 = ["Llama-4-Scout, Maverick", "109, 400", "", "", "", "bfloat16, FP8", "refused by name"]


def readme() -> str:
    """Return the table for README, as text."""
    _, matrix = read_page(MATRIX_PAGE.read_text(encoding="utf-8").partition(MATRIX)[2])
    rows = []
    for name, model in MODELS.items():
        counted = cells(published(name))
        if model.stored is not None:
            pairs = zip(counted, cells(published(name, model.stored)), strict=True)
            counted = [one if one == other else f"{one} ({other})" for one, other in pairs]
        rows.append([name, f"{model.billions:g}", *counted, model.formats, works(name, matrix)])
    header = [*HEADER, "published in", "what works"]
    header[2] += " (experts in four bits, as published)"
    return table(header, [*rows, LLAMA_4])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.model_sizes", description=__doc__.partition("\n")[0])
    parser.add_argument("directories", nargs="*", metavar="DIR", help="with a config.json that transformers knows")
    directories = parser.parse_args().directories
    if directories:
        found = [(name, sizes(on_meta(AutoConfig.from_pretrained(name)))) for name in directories]
        print(table(HEADER, [[name, f"{one.parameters / 1e9:.0f}", *cells(one)] for name, one in found]), end="")
    else:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_tables(text, readme(), BEGIN, END), encoding="utf-8")


if __name__ == "__main__":
    main()
