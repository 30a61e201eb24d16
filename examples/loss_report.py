"""The comparison of the two runs of train_moe.py: means of their losses, a table, JSON and a picture."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

TAIL = 0.1  # share of the losses whose mean is compared
COLOURS = {"bf16": "#CC79A7", "fp8": "#0072B2"}


class Result(NamedTuple):
    """Results of one run: losses of all steps, loss of the validation text, tokens/s (None for very short runs)."""

    losses: list[float]
    validation: float
    tokens_per_second: float | None


def tail_mean(losses: Sequence[float]) -> float:
    """The mean of the last tenth of the losses."""
    count = max(1, round(TAIL * len(losses)))
    return math.fsum(losses[-count:]) / count


def summarize(results: dict[str, Result]) -> dict[str, Any]:
    """Return the contents of losses.json. `ratio`: FP8's mean of the last tenth of the losses over bfloat16's."""
    runs = {label: result._asdict() | {"tail_mean": tail_mean(result.losses)} for label, result in results.items()}
    return {"ratio": runs["fp8"]["tail_mean"] / runs["bf16"]["tail_mean"], "runs": runs}


def smooth(losses: Sequence[float], width: int) -> Tensor:
    """Return running means over `width` losses, for every step from the `width`-th on."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, width, 1).mean(-1)


def draw(results: dict[str, Result], path: Path) -> None:
    """Plot both losses over the steps, and below the smoothed difference of FP8's loss from bfloat16's."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), height_ratios=(3, 2), sharex=True)
    curves = {}
    for label, result in results.items():
        width = max(1, len(result.losses) // 50)
        curves[label] = smooth(result.losses, width)
        steps = range(width, len(result.losses) + 1)
        above.plot(range(1, len(result.losses) + 1), result.losses, color=COLOURS[label], alpha=0.2, linewidth=0.6)
        name = f"{label}, {tail_mean(result.losses):.4f} in the last tenth"
        above.plot(steps, curves[label], color=COLOURS[label], label=name)
    difference = 100 * (curves["fp8"] / curves["bf16"] - 1)
    below.axhline(0, color=COLOURS["bf16"])
    below.plot(steps, difference, color=COLOURS["fp8"])
    below.set_ylabel("FP8 against bf16, %")
    below.set_xlabel(f"step (lines: means over {width} steps)")
    above.set_ylabel("training loss, nats a byte")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)


def table(content: dict[str, Any]) -> str:
    """Return the results as a table."""
    lines = [f"{'':6}{'last tenth':>12}{'validation':>12}{'tokens/s':>12}"]
    for label, run in content["runs"].items():
        speed = "-" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:.0f}"
        lines.append(f"{label:6}{run['tail_mean']:12.4f}{run['validation']:12.4f}{speed:>12}")
    return "\n".join((*lines, f"FP8 against bf16, mean loss of the last tenth: {content['ratio'] - 1:+.3%}"))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` in one step after it is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    yield temporary
    temporary.replace(path)


def write_json(content: dict[str, Any], path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
