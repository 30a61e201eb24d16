"""Pictures of the results: `python -m benchmarks.plots [--results FILE | DIR] [--out DIR]`.

What compares fp8moe with DeepGEMM and cuBLAS is drawn from medians of one run, benchmarks/baselines/same_run.json; bars
of what is slower than DeepGEMM have a colour of their own. The rest is read from validation files (default:
validation/kernels.json and, for whole models, models.json), or from a directory of files like `quantize.json` that
the benchmarks wrote; the picture of one without rows there is left alone.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from benchmarks import baselines, mqa, mqa_cases  # noqa: E402
from benchmarks.grouped_gemm import OPS  # noqa: E402
from benchmarks.report import geomean, select  # noqa: E402

# Colours of Okabe and Ito, told apart by every kind of colour vision.
OURS, BEHIND, DEEP_GEMM, CUBLAS, FLOOR = "#0072B2", "#D55E00", "#A6A6A6", "#E69F00", "#000000"
BFLOAT16, DOTS = "#CC79A7", "#E69F00"
STAGES = {
    "sort": ("#CC79A7", "sort by expert"),
    "permute": ("#E69F00", "permute, quantize"),
    "gemm1": ("#0072B2", "GEMM 1, SwiGLU, quantize"),
    "gemm2": ("#56B4E9", "GEMM 2"),
    "combine": ("#009E73", "combine"),
}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "figure.dpi": 150,
}


class Results(NamedTuple):
    """Rows of one benchmark, and the kind of GPU that they are of: "H100" or "H200"."""

    rows: list[dict]
    gpu: str


def load(results: Path, name: str) -> Results | None:
    """Those of one benchmark from a directory of results or from a validation file; None if it is not there."""
    if not results.is_dir():
        content = json.loads(results.read_text())
        parts = (content.get(part, {}) for part in ("benchmarks", "models"))
        found = next((part[name] for part in parts if name in part), None)
    else:
        path = results / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else None
    return Results(found["rows"], baselines.device(found["gpu"])) if found and found.get("rows") else None


@contextmanager
def _picture(path: Path, title: str, size: tuple[float, float], *grid: int, below: float = 0, **options) -> Iterator:
    """A figure and its axes, written to `path` at the end; `below` is the part of its height that a legend takes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*grid, figsize=size, squeeze=False, **options)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        yield figure, axes
        figure.tight_layout(rect=(0, below, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _colour(ratio: float) -> str:
    return BEHIND if float(f"{ratio:.2f}") < 1 else OURS


def _categories(axes: plt.Axes, labels: Sequence[str]) -> None:
    """Names of horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _ratio_bars(axes: plt.Axes, labels: Sequence[str], ratios: Sequence[float], texts: Sequence[str]) -> None:
    """Speed over DeepGEMM's of each case, with a text after its ratio."""
    for position, (ratio, text) in enumerate(zip(ratios, texts, strict=True)):
        axes.barh(position, ratio, 0.62, color=_colour(ratio))
        label = f"{ratio:.2f}×   {text}"
        axes.annotate(label, (0, position), (5, 0), textcoords="offset points", va="center", color="white")
    axes.axvline(1, color=DEEP_GEMM, linewidth=1.6)
    _categories(axes, labels)
    axes.set_xlabel("DeepGEMM's time / ours (more is better)")


def draw_overview(results: Results, path: Path) -> None:
    """How many times faster the experts layer is than others, by tokens; tokens a second of a whole model."""
    cases = baselines.cases("experts")
    tokens = list(dict.fromkeys(case.sizes["tokens"] for case in cases))
    series = {
        "transformers_deep_gemm_graph": (OURS, "than the whole layer of transformers with DeepGEMM"),
        "deep_gemm_two_gemms": ("#56B4E9", "than DeepGEMM's two GEMMs alone"),
    }
    with _picture(path, "fp8moe", (10, 3.9), 1, 2, below=0.12, width_ratios=(3, 2)) as (figure, grid):
        left, right = grid[0]
        for shift, (name, (colour, _)) in zip((-0.2, 0.2), series.items(), strict=True):
            for position, count in enumerate(tokens):
                ratios = [case.ratio(name, "fp8moe_graph") for case in cases if case.sizes["tokens"] == count]
                mean, at = geomean(ratios), position + shift
                left.bar(at, mean, 0.38, color=colour)
                left.plot([at] * len(ratios), ratios, "o", color=FLOOR, markersize=2.5)
                left.annotate(f"{mean:.2f}", (at, 0.12), ha="center", color="white", size=8)
        left.axhline(1, color=DEEP_GEMM, linewidth=1.2)
        left.set_xticks(range(len(tokens)), [str(count) for count in tokens])
        left.set_xlabel("tokens")
        left.set_title("Experts layer of DeepSeek-V3 and Qwen3 models, times faster (c94a80b, H200)")
        _rates_panel(right, *results)
        legend = [Patch(color=colour, label=label) for colour, label in series.values()]
        legend.append(Line2D([], [], color=FLOOR, marker="o", markersize=2.5, linestyle="", label="one of four models"))
        legend.append(Patch(color=BFLOAT16, label="bfloat16"))
        legend.append(Line2D([], [], color=FLOOR, linewidth=1.6, label="reading its bytes alone"))
        figure.legend(handles=legend, loc="lower center", ncols=3, frameon=False)


def _rates_panel(axes: plt.Axes, rows: Sequence[dict], gpu: str) -> None:
    """Tokens a second of decode steps, ours and in bfloat16, and what reading the bytes alone would allow ours."""
    decoded, plain = ({row["batch"]: row for row in select(rows, what)} for what in ("decode", "decode_bf16"))
    batches = [batch for batch in plain if batch in decoded]
    found = {
        batch: next(r for r in select(rows, "decode") if (r["batch"], r["prompt"]) == (batch, plain[batch]["prompt"]))
        for batch in batches
    }
    for position, batch in enumerate(batches):
        row = found[batch]
        for shift, value, colour in ((-0.2, row["tokens_s"], OURS), (0.2, plain[batch]["tokens_s"], BFLOAT16)):
            axes.bar(position + shift, value, 0.38, color=colour)
            axes.annotate(f"{value:.0f}", (position + shift, 34), ha="center", color="white", size=8)
        axes.plot(
            [position - 0.39, position - 0.01], [row["tokens_s"] * row["x_floor"]] * 2, color=FLOOR, linewidth=1.6
        )
    axes.set_yscale("log")
    axes.set_ylim(bottom=30)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("sequences")
    axes.set_title(f"Qwen3-30B-A3B's sizes, tokens/s ({gpu})")


def _gemm_panel(axes: plt.Axes, cases: Sequence[baselines.Case]) -> None:
    """Times of each shape of one m; ours carries its time and its ratio to DeepGEMM."""
    series = {"deep_gemm": DEEP_GEMM, "cublas_block": CUBLAS, "fp8moe": OURS}
    series = {name: colour for name, colour in series.items() if name in cases[0].medians}
    height = 0.84 / len(series)
    for position, case in enumerate(cases):
        for index, (name, colour) in enumerate(series.items()):
            at = position + (index - (len(series) - 1) / 2) * height
            axes.barh(at, case.us(name), 0.92 * height, color=colour)
        ours, end = case.us("fp8moe"), case.us("fp8moe")
        if case.has_yardstick:
            end = max(ours, best := case.us("cublas_per_tensor"))
            axes.plot([best] * 2, [at - height / 2, at + height / 2], color=FLOOR, linewidth=1.6)
        text = f"{ours:.{0 if ours >= 100 else 1}f}   {case.ratio():.2f}×"
        colour = _colour(case.ratio())
        axes.annotate(text, (end, at), (4, -0.5), textcoords="offset points", va="center", color=colour, size=7.5)
    axes.set_xlim(0, 1.26 * max(max(case.medians.values()) for case in cases))
    _categories(axes, [f"{case.sizes['n']} × {case.sizes['k']}" for case in cases])
    axes.set_title(f"m = {cases[0].sizes['m']}   (geomean {geomean(case.ratio() for case in cases):.2f}× DeepGEMM)")
    axes.set_xlabel("GPU time, µs (less is better)")


def draw_gemm(path: Path) -> None:
    """One panel for each m."""
    cases = baselines.cases("gemm")
    with _picture(path, "Dense FP8 GEMM on an H200, cold L2", (13.2, 9.2), 2, 3, below=0.03) as (figure, grid):
        for axes, m in zip(grid.flat, baselines.DENSE_M, strict=True):
            _gemm_panel(axes, [case for case in cases if case.sizes["m"] == m])
        for line in grid:
            line[0].set_ylabel("n × k")
        legend = [
            Patch(color=OURS, label="fp8moe (µs, and times faster than DeepGEMM)"),
            Patch(color=DEEP_GEMM, label="DeepGEMM"),
            Patch(color=CUBLAS, label="cuBLAS, block scales"),
            Line2D([], [], color=FLOOR, label="cuBLAS, one scale per tensor", linewidth=1.6),
        ]
        figure.legend(handles=legend, loc="lower center", ncols=4, frameon=False)


def draw_quantize(results: Results, path: Path) -> None:
    """Bandwidth of the large cases against a copy, and the time of the small ones."""
    rows, gpu = results
    large = [row for row in rows if row["m"] > 64]
    small = [row for row in rows if row["m"] <= 64 and row["op"] == "quantize_1x128"]
    with _picture(path, f"Quantization of bfloat16 on an {gpu}", (9.6, 3.4), 1, 2, width_ratios=(3, 2)) as (_, grid):
        left, right = grid[0]
        values = [row["gbps"] / 1e3 for row in large]
        left.barh(range(len(large)), values, 0.62, color=OURS)
        for position, (value, row) in enumerate(zip(values, large, strict=True)):
            text = f"{value:.2f} TB/s, {100 * row['of_copy']:.0f}%"
            left.annotate(text, (0, position), (5, 0), textcoords="offset points", va="center", color="white")
        copy = values[0] / large[0]["of_copy"]
        left.axvline(copy, color=FLOOR, linewidth=1.6)
        left.annotate(f"copy {copy:.2f}", (copy, -0.5), (-4, 2), textcoords="offset points", ha="right", va="bottom")
        _categories(left, [f"{row['op'].removeprefix('quantize_')}  ({row['m']}, {row['k']})" for row in large])
        left.set_ylim(len(large) - 0.5, -0.9)
        left.set_xlabel("bytes read and written, TB/s (more is better)")
        right.plot([row["m"] for row in small], [row["us"] for row in small], "o-", color=OURS)
        for row in small:
            offset, where = (0, 7), (row["m"], row["us"])
            right.annotate(f"{row['us']:.2f}", where, offset, textcoords="offset points", ha="center", color=OURS)
        right.set_xscale("log", base=2)
        right.set_xticks([row["m"] for row in small], [str(row["m"]) for row in small])
        right.margins(x=0.08)
        right.set_ylim(0, 1.3 * max(row["us"] for row in small))
        right.set_xlabel("rows")
        right.set_ylabel("GPU time, µs")
        right.set_title(f"1x128 of (rows, {small[0]['k']})")


def _grouped_panel(axes: plt.Axes, op: str) -> None:
    """A bar of the geometric mean for each kind of groups, and a dot for each shape of the weights."""
    kinds: dict[tuple, list[float]] = {}
    for case in baselines.cases(op):
        kinds.setdefault((case.sizes["groups"], case.sizes["mean_rows"]), []).append(case.ratio())
    means = [geomean(ratios) for ratios in kinds.values()]
    _ratio_bars(axes, [f"{groups} × {rows}" for groups, rows in kinds], means, [""] * len(kinds))
    for position, ratios in enumerate(kinds.values()):
        axes.plot(ratios, [position] * len(ratios), "o", color=DOTS, markersize=3.5)
    axes.set_title(op)
    axes.set_ylabel("groups × rows of a group")


def draw_grouped(path: Path) -> None:
    """The ratios of the grouped GEMMs to DeepGEMM, one panel for each operation."""
    with _picture(path, "Grouped FP8 GEMMs on an H200, cold L2", (11.2, 4.2), 1, 2, below=0.06) as (figure, grid):
        for axes, op in zip(grid[0], OPS, strict=True):
            _grouped_panel(axes, op)
        legend = [
            Patch(color=OURS, label="fp8moe, geomean"),
            Patch(color=BEHIND, label="the same, slower than DeepGEMM"),
            Line2D([], [], color=DOTS, marker="o", markersize=3.5, linestyle="", label="one shape of the weights"),
            Line2D([], [], color=DEEP_GEMM, label="DeepGEMM", linewidth=1.6),
        ]
        figure.legend(handles=legend, loc="lower center", ncols=4, frameon=False)


LAYER_LINES = {
    "fp8moe_graph": ("o-", OURS, "fp8moe, the whole layer"),
    "transformers_deep_gemm_graph": ("o-", DEEP_GEMM, "transformers + DeepGEMM, the whole layer"),
    "deep_gemm_two_gemms": ("--", FLOOR, "DeepGEMM, the two GEMMs alone"),
    "bf16": ("o-", BFLOAT16, "transformers, bfloat16 (means of another run)"),
}


def _layer_panel(axes: plt.Axes, model: str) -> None:
    """Time of one model's experts over the tokens, ours and the others'."""
    cases = [case for case in baselines.cases("experts") if case.sizes["model"] == model]
    tokens = [case.sizes["tokens"] for case in cases]
    for name, (style, colour, _) in LAYER_LINES.items():
        if name == "bf16":
            times = baselines.bf16_experts(model)
            axes.plot(times.keys(), times.values(), style, color=colour, markersize=3.5)
        else:
            axes.plot(tokens, [case.us(name) for case in cases], style, color=colour, markersize=3.5)
    ratio = geomean(case.ratio("transformers_deep_gemm_graph", "fp8moe_graph") for case in cases)
    axes.set_title(f"{model}   ({ratio:.1f}× transformers + DeepGEMM)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.minorticks_off()


def _stages_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Share of each kernel in the time of a call, one bar for each number of tokens."""
    bottom = [0.0] * len(rows)
    totals = [sum(row[f"{stage}_us"] for stage in STAGES) for row in rows]
    for stage, (colour, _) in STAGES.items():
        shares = [100 * row[f"{stage}_us"] / total for row, total in zip(rows, totals, strict=True)]
        axes.bar(range(len(rows)), shares, 0.72, bottom, color=colour)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    for position, row in enumerate(rows):
        us = row["graph_us"]
        text = f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.1f} ms"
        axes.annotate(text, (position, 100), (0, 3), textcoords="offset points", ha="center", color=OURS, size=7.5)
    axes.set_xticks(range(len(rows)), [str(row["tokens"]) for row in rows])
    axes.set_ylim(0, 108)
    axes.set_xlabel("tokens")


def draw_experts(results: Results, path: Path) -> None:
    """For each model: times of the layer and of others over the tokens, and below where our time goes."""
    rows = [row for row in results.rows if row["routing"] == "random" and row["model"] in baselines.MODELS]
    names = list(dict.fromkeys(row["model"] for row in rows))
    size = (4.2 * len(names), 6.8)
    title = f"Experts layer, cold L2: c94a80b beside others on an H200; below where the time goes now, {results.gpu}"
    with _picture(path, title, size, 2, len(names), below=0.07, height_ratios=(3, 2)) as (figure, grid):
        for name, (above, below) in zip(names, grid.T, strict=True):
            _layer_panel(above, name)
            _stages_panel(below, [row for row in rows if row["model"] == name])
        grid[0, 0].set_ylabel("CUDA graph, µs (less is better)")
        grid[1, 0].set_ylabel("% of the time")
        legend = [
            Line2D([], [], color=colour, marker=style.strip("-") or None, linestyle=style.strip("o"), label=label)
            for style, colour, label in LAYER_LINES.values()
        ]
        stages = [Patch(color=colour, label=label) for colour, label in STAGES.values()]
        figure.legend(handles=legend, loc="lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, 0.03))
        figure.legend(handles=stages, loc="lower center", ncols=5, frameon=False)


def _products_panel(axes: plt.Axes) -> None:
    """Speed of each weight gradient over DeepGEMM's, both added to what is there."""
    cases = baselines.cases("grouped_gemm_k")
    labels = ["{groups} × {m} × {n}".format(**case.sizes) for case in cases]
    operations = [2 * case.sizes["m"] * case.sizes["n"] * case.sizes["total_k"] for case in cases]
    times = [case.us("fp8moe_accumulating") for case in cases]
    rates = [f"{flops / us / 1e6:.0f} TFLOPS" for flops, us in zip(operations, times, strict=True)]
    _ratio_bars(axes, labels, [case.ratio(ours="fp8moe_accumulating") for case in cases], rates)
    axes.set_title("grouped_gemm_k, accumulate=True")


def _pass_panel(axes: plt.Axes, rows: Sequence[dict], title: str) -> None:
    """Forward and backward of each implementation, one bar of time; its activation memory in the label."""
    for position, row in enumerate(rows):
        colour = OURS if row["impl"] == "fp8" else BFLOAT16
        forward, total = row["forward_us"] / 1e3, row["us"] / 1e3
        axes.barh(position, forward, 0.62, color=colour)
        axes.barh(position, total - forward, 0.62, forward, color=colour, alpha=0.6)
        text = f"{total:.2f} ms" + (f"   {row['speedup']:.2f}×" if row["impl"] == "fp8" else "")
        axes.annotate(text, (total, position), (4, 0), textcoords="offset points", va="center", color=colour)
    axes.set_xlim(0, 1.3 * max(row["us"] for row in rows) / 1e3)
    labels = ["bfloat16" if row["impl"] == "bf16" else f"FP8, {row['master']} master" for row in rows]
    if all(row["kept_bytes"] for row in rows):  # a bfloat16 linear layer keeps nothing beside its input
        labels = [f"{label}\n{row['kept_bytes'] / 1e9:.2f} GB kept" for label, row in zip(labels, rows, strict=True)]
    _categories(axes, labels)
    axes.set_xlabel("forward, then backward, ms (less is better)")
    axes.set_title(title)


def draw_training(results: Results, path: Path) -> None:
    """Weight gradients against DeepGEMM, and the passes of the layers against bfloat16 that there are."""
    rows, gpu = results
    passes = []
    if layer := select(rows, "experts"):
        passes.append((layer, "experts of {model}, {tokens} tokens".format(**layer[0])))
    if linear := select(rows, "linear"):
        passes.append((linear, "linear ({rows}, {in_features}) × ({out_features}, {in_features})".format(**linear[0])))
    count = 1 + len(passes)
    with _picture(
        path,
        f"Training, cold L2: weight gradients of c94a80b on an H200, layers on an {gpu}",
        (4.8 * count, 3.4),
        1,
        count,
    ) as (_, grid):
        _products_panel(grid[0, 0])
        for axes, (found, title) in zip(grid[0, 1:], passes, strict=True):
            _pass_panel(axes, found, title)


def draw_mqa(path: Path) -> None:
    """Index scores against DeepGEMM's, of prefill and decoding; -inf filled in."""
    title = "Index scores of sparse attention on an H200, cold L2"
    with _picture(path, title, (11.2, 3.4), 1, 2) as (_, grid):
        left, right = grid[0]
        cases = baselines.cases("mqa_logits")
        flops = [mqa_cases.prefill_work(prefill, True)[0] for prefill in mqa.stored_prefills()]
        rates = [f"{work / case.us('fp8moe') / 1e6:.0f} TFLOPS" for work, case in zip(flops, cases, strict=True)]
        _ratio_bars(left, ["{s} × {t}".format(**case.sizes) for case in cases], [case.ratio() for case in cases], rates)
        left.set_ylabel("queries × keys")
        left.set_title("mqa_logits, causal")
        cases = baselines.cases("paged_mqa_logits")
        moved = [mqa_cases.paged_work(batch)[1] for batch in mqa.stored_batches()]
        rates = [f"{work / case.us('fp8moe') / 1e6:.1f} TB/s" for work, case in zip(moved, cases, strict=True)]
        labels = ["{batch} × {context}, {next_n}".format(**case.sizes) for case in cases]
        _ratio_bars(right, labels, [case.ratio() for case in cases], rates)
        right.set_ylabel("batch × context, next_n")
        right.set_title("paged_mqa_logits")


OF_BASELINES = {"gemm": draw_gemm, "grouped_gemm": draw_grouped, "mqa": draw_mqa}
OF_RESULTS = {
    "overview": ("decode", draw_overview),
    "quantize": ("quantize", draw_quantize),
    "experts": ("experts", draw_experts),
    "training": ("training", draw_training),
}
"""Picture -> the benchmark that it is drawn from, and how."""
VALIDATION = [Path("validation/kernels.json"), Path("validation/models.json")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description="draw the benchmark results")
    parser.add_argument("--results", type=Path, nargs="+", default=VALIDATION, metavar="FILE|DIR")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR")
    args = parser.parse_args(argv)
    for name, draw in OF_BASELINES.items():
        draw(args.out / f"{name}.png")
    for name, (benchmark, draw) in OF_RESULTS.items():
        if found := next(filter(None, (load(results, benchmark) for results in args.results)), None):
            draw(found, args.out / f"{name}.png")


if __name__ == "__main__":
    main()
