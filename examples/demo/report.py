"""The output of the demo: texts side by side, a table of measurements, and the changes of the model."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from examples.demo import smollm2


class Count(NamedTuple):
    part: int
    total: int


class Weights(NamedTuple):
    """Sizes of a model: elements of its linears and experts, how many of them are FP8, and all stored bytes.

    Embedding, output layer and routers are in the bytes only. What is not FP8, nor a scale, is counted as bfloat16.
    """

    projections: int
    fp8: int
    nbytes: int


@dataclass(frozen=True)
class Measurement:
    """Results of one version of the model: greedy answer, perplexity of the passage, decode speed in tokens/s.

    graph_tokens_per_second: with CUDA graphs, and graph_tokens_equal: how many of the answer's first tokens they gave
    too; None where no graph was captured, as by the reference backend.
    """

    label: str
    text: str
    perplexity: float
    tokens_per_second: float
    graph_tokens_per_second: float | None
    graph_tokens_equal: Count | None
    weights: Weights


def weights(model: nn.Module) -> Weights:
    projections = fp8 = nbytes = 0
    for name, tensor in stored_tensors(model):
        is_fp8, is_scale = tensor.dtype == torch.float8_e4m3fn, name.endswith("_scale_inv")
        nbytes += tensor.numel() * (1 if is_fp8 else 4 if is_scale else 2)
        if "_proj" in name and not is_scale:
            projections += tensor.numel()
            fp8 += tensor.numel() * is_fp8
    return Weights(projections, fp8, nbytes)


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the named parameters and buffers of a checkpoint; tied ones once."""
    seen = set()
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def legend(layers: int, mixture: Path) -> str:
    """Describe the three versions, and why some weights stay in bfloat16."""
    *first, last = (str(index % layers) for index in smollm2.KEPT_LAYERS)
    kept = f"layers {', '.join(first)} and {last}, and {', '.join(smollm2.KEPT_PROJECTIONS)} in all of them"
    parts = {
        "bf16": "the model as it is",
        "FP8": f"its linears in FP8, except those of {kept}, which stay in bf16: with them in FP8 too the perplexity "
        "of a model this small would rise by 3%, since E4M3 has 3 mantissa bits; larger models are less sensitive",
        "FP8 MoE": f"each MLP copied into {smollm2.NUM_EXPERTS} experts, {smollm2.TOP_K} of which a random router "
        "chooses for each token: a Mixtral model of the same function, with the same parts in FP8. Loaded from the FP8 "
        f"checkpoint {mixture}",
    }
    width = max(map(len, parts)) + 2
    return "\n".join(
        textwrap.fill(
            text,
            max(60, min(shutil.get_terminal_size().columns, 120)),
            initial_indent=label.ljust(width),
            subsequent_indent=" " * width,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in parts.items()
    )


def results(columns: Sequence[Measurement]) -> str:
    """Return the table and the differences of perplexities. Columns: dense in bfloat16, dense in FP8, mixture."""
    bf16, fp8, mixture = columns
    captured = all(column.graph_tokens_per_second is not None for column in columns)
    shares = [column.weights.fp8 / column.weights.projections for column in columns]
    rows = [
        ("", *(column.label for column in columns)),
        ("perplexity of the passage", *(f"{column.perplexity:.3f}" for column in columns)),
        ("linears and experts, million weights", *(f"{column.weights.projections / 1e6:.1f}" for column in columns)),
        ("of these in FP8", *(f"{share:.1%}" for share in shares)),
        ("all weights, MB", *(f"{column.weights.nbytes / 1e6:.1f}" for column in columns)),
        (
            "decode, tokens/s" if captured else "decode, tokens/s (reference: no measure of speed)",
            *(f"{column.tokens_per_second:.1f}" for column in columns),
        ),
    ]
    if captured:
        rows += [
            ("decode with CUDA graphs, tokens/s", *(f"{column.graph_tokens_per_second:.1f}" for column in columns)),
            (
                "first tokens equal with CUDA graphs",
                *(f"{column.graph_tokens_equal.part} of {column.graph_tokens_equal.total}" for column in columns),
            ),
        ]
    return (
        f"{table(rows)}\n\n"
        f"Against bf16, FP8 changes the perplexity by {change(fp8, bf16)} and the FP8 MoE by {change(mixture, bf16)}; "
        f"the two differ by {change(mixture, fp8)}."
    )


def change(new: Measurement, old: Measurement) -> str:
    return f"{new.perplexity / old.perplexity - 1:+.2%}"


def side_by_side(texts: Sequence[str]) -> str:
    """Texts as columns that fill the terminal."""
    width = max(20, (min(shutil.get_terminal_size().columns, 120) - 3 * (len(texts) - 1)) // len(texts))

    def wrap(text: str) -> list[str]:
        return [line for part in text.splitlines() for line in textwrap.wrap(part, width) or [""]]

    rows = zip_longest(*map(wrap, texts), fillvalue="")
    return "\n".join(" | ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells with aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "   ".join(cells).rstrip()

    return "\n".join(line(row) for row in rows)
