"""Pictures of the results: `python -m benchmarks.plots [--results FILE | DIR] [--out DIR]`.

Reads all from a validation file (default: validation/h200.json), or `gemm.json`, `quantize.json`, `grouped_gemm.json`,
`experts.json`, `training.json` and `mqa.json` from a directory that the benchmarks wrote. The picture of a benchmark
without rows there is left alone.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from benchmarks import experts, grouped_gemm, peers  # noqa: E402
from benchmarks.report import geomean, select  # noqa: E402

# Colours of Okabe and Ito, told apart by every kind of colour vision.
OURS, DEEP_GEMM, CUBLAS, FLOOR = "#0072B2", "#A6A6A6", "#E69F00", "#000000"
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


def load(results: Path, name: str) -> list[dict]:
    """Rows of one benchmark from a directory of results or from a validation file; none if it is not there."""
    if not results.is_dir():
        return json.loads(results.read_text()).get("benchmarks", {}).get(name, {}).get("rows", [])
    path = results / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _gemm_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Horizontal bars of time for each shape of one m; ours carries its time and its ratio to DeepGEMM."""
    (m,) = {row["m"] for row in rows}
    deep_gemm, cublas, floors = peers.dense("deep_gemm"), peers.dense("cublas_block"), peers.stream_floor()
    series = [(deep_gemm, DEEP_GEMM), (cublas, CUBLAS)]
    series = [(times, colour) for times, colour in series if any((m, row["n"], row["k"]) in times for row in rows)]
    height = 0.84 / (len(series) + 1)
    right = 0.0
    for position, row in enumerate(rows):
        n, k, us = row["n"], row["k"], row["us"]
        bars = [(times[m, n, k], colour) for times, colour in series if (m, n, k) in times] + [(us, OURS)]
        for index, (time, colour) in enumerate(bars):
            axes.barh(position + (index - (len(bars) - 1) / 2) * height, time, 0.92 * height, color=colour)
        ours = position + (len(bars) - 1) / 2 * height
        end = us
        if row["over_floor"]:
            axes.plot([floors[n, k]] * 2, [ours - height / 2, ours + height / 2], color=FLOOR, linewidth=1.6)
            end = max(us, floors[n, k])
        text = f"{us:.{0 if us >= 100 else 1}f}" + (f"   {row['vs_deep_gemm']:.2f}×" if row["vs_deep_gemm"] else "")
        axes.annotate(text, (end, ours), (4, -0.5), textcoords="offset points", va="center", color=OURS, size=7.5)
        right = max(right, 1.22 * us, *(time for time, _ in bars))
    axes.set_xlim(0, 1.03 * right)
    axes.set_yticks(range(len(rows)), [f"{row['n']} × {row['k']}" for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    ratios = [row["vs_deep_gemm"] for row in rows if row["vs_deep_gemm"]]
    axes.set_title(f"m = {m}" + (f"   (geomean {geomean(ratios):.2f}× DeepGEMM)" if ratios else ""))
    axes.set_xlabel("GPU time, µs (less is better)")


def draw_gemm(rows: Sequence[dict], path: Path) -> None:
    """One panel for each m: times of fp8moe and of the stored peers, and the time of reading the weight."""
    sizes = list(dict.fromkeys(row["m"] for row in rows))
    columns = min(3, len(sizes))
    lines = -(-len(sizes) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(lines, columns, figsize=(4.4 * columns, 4.6 * lines), squeeze=False)
        for axes, m in zip(grid.flat, sizes, strict=False):
            _gemm_panel(axes, [row for row in rows if row["m"] == m])
        for axes in grid.flat[len(sizes) :]:
            axes.set_visible(False)
        for line in grid:
            line[0].set_ylabel("n × k")
        legend = [
            Patch(color=OURS, label="fp8moe (µs, and how many times faster than DeepGEMM)"),
            Patch(color=DEEP_GEMM, label="DeepGEMM"),
            Patch(color=CUBLAS, label="cuBLAS, block-scaled"),
            Line2D([], [], color=FLOOR, label="reading the weight alone", linewidth=1.6),
        ]
        figure.suptitle("Dense FP8 GEMM on an H200, cold L2", x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.legend(handles=legend, loc="lower center", ncols=4, frameon=False)
        figure.tight_layout(rect=(0, 0.03, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def draw_quantize(rows: Sequence[dict], path: Path) -> None:
    """Bandwidth of the large cases against a copy, and the time of the small ones."""
    large = [row for row in rows if row["m"] > 64]
    small = [row for row in rows if row["m"] <= 64 and row["op"] == "quantize_1x128"]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.2), width_ratios=(3, 2))
        labels = [f"{row['op'].removeprefix('quantize_')}  ({row['m']}, {row['k']})" for row in large]
        values = [row["gbps"] / 1e3 for row in large]
        left.barh(range(len(large)), values, 0.62, color=OURS)
        for position, (value, row) in enumerate(zip(values, large, strict=True)):
            text = f"{value:.2f} TB/s, {100 * row['of_copy']:.0f}%"
            left.annotate(text, (0, position), (5, 0), textcoords="offset points", va="center", color="white")
        copy = peers.copy_tbps()
        left.axvline(copy, color=FLOOR, linewidth=1.6)
        left.annotate(f"copy {copy:.2f}", (copy, -0.5), (-4, 2), textcoords="offset points", ha="right", va="bottom")
        left.set_yticks(range(len(large)), labels)
        left.set_ylim(len(large) - 0.5, -0.9)
        left.tick_params(axis="y", length=0)
        left.set_xlabel("bytes read and written, TB/s (more is better)")
        left.set_title("Quantization of bfloat16 on an H200")
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
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _grouped_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """A bar of the geometric mean for each kind of groups, and a dot for each shape of the weights."""
    kinds = list(dict.fromkeys((row["groups"], row["mean_m"]) for row in rows))
    right = 1.0
    for position, kind in enumerate(kinds):
        same = [row for row in rows if (row["groups"], row["mean_m"]) == kind]
        ratios = [row["vs_deep_gemm"] for row in same]
        right = max(right, *ratios)
        few = kind[1] <= grouped_gemm.FEW_ROWS
        best = max(row["gbps"] / 1e3 if few else row["tflops"] for row in same)
        text = f"{geomean(ratios):.2f}×   up to " + (f"{best:.1f} TB/s" if few else f"{best:.0f} TFLOPS")
        axes.barh(position, geomean(ratios), 0.62, color=OURS)
        axes.plot(ratios, [position] * len(ratios), "o", color=DOTS, markersize=3.5)
        axes.annotate(text, (0, position), (5, 0), textcoords="offset points", va="center", color="white")
    axes.axvline(1, color=DEEP_GEMM, linewidth=1.6)
    axes.set_xlim(0, 1.04 * right)
    axes.set_yticks(range(len(kinds)), [f"{groups} × {mean_m}" for groups, mean_m in kinds])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_title(rows[0]["op"])
    axes.set_ylabel("groups × rows of a group")
    axes.set_xlabel("speed over DeepGEMM's (more is better)")


def draw_grouped(rows: Sequence[dict], path: Path) -> None:
    """The ratios of the grouped GEMMs to DeepGEMM, one panel for each operation; cases without a peer are left out."""
    rows = [row for row in rows if row["vs_deep_gemm"] is not None]
    panels = [[row for row in rows if row["op"] == op] for op in dict.fromkeys(row["op"] for row in rows)]
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 4.2), squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=True):
            _grouped_panel(axes, panel)
        legend = [
            Patch(color=OURS, label="fp8moe, geomean"),
            Line2D([], [], color=DOTS, marker="o", markersize=3.5, linestyle="", label="one shape of the weights"),
            Line2D([], [], color=DEEP_GEMM, label="DeepGEMM", linewidth=1.6),
        ]
        figure.suptitle("Grouped FP8 GEMMs on an H200, cold L2", x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.legend(handles=legend, loc="lower center", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0.06, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _layer_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Time of one model's experts over the tokens, ours and the peers'."""
    name, tokens = rows[0]["model"], [row["tokens"] for row in rows]
    deep_gemm, bf16 = (peers.experts(impl) for impl in experts.PEERS.values())
    for peer, field, style, colour in (
        (bf16, "graph_us", "o-", BFLOAT16),
        (deep_gemm, "graph_us", "o-", DEEP_GEMM),
        (deep_gemm, "two_gemms_us", "--", FLOOR),
    ):
        known = [count for count in tokens if (name, count) in peer]
        axes.plot(known, [peer[name, count][field] for count in known], style, color=colour, markersize=3.5)
    axes.plot(tokens, [row["graph_us"] for row in rows], "o-", color=OURS, markersize=3.5, linewidth=2)
    ratios = [row["vs_deep_gemm"] for row in rows if row["vs_deep_gemm"]]
    axes.set_title(name + (f"   ({geomean(ratios):.1f}× transformers + DeepGEMM)" if ratios else ""))
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


def draw_experts(rows: Sequence[dict], path: Path) -> None:
    """For each model: times of the layer and of its peers over the tokens, and below where our time goes."""
    rows = [row for row in rows if row["routing"] == "random"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, len(names), figsize=(4.2 * len(names), 6.8), height_ratios=(3, 2), squeeze=False)
        for name, (above, below) in zip(names, grid.T, strict=True):
            of_model = [row for row in rows if row["model"] == name]
            _layer_panel(above, of_model)
            _stages_panel(below, of_model)
        grid[0, 0].set_ylabel("CUDA graph, µs (less is better)")
        grid[1, 0].set_ylabel("% of the time")
        legend = [
            Line2D([], [], color=OURS, marker="o", markersize=3.5, linewidth=2, label="fp8moe, the whole layer"),
            Line2D(
                [], [], color=DEEP_GEMM, marker="o", markersize=3.5, label="transformers + DeepGEMM, the whole layer"
            ),
            Line2D([], [], color=FLOOR, linestyle="--", label="DeepGEMM, the two GEMMs alone"),
            Line2D([], [], color=BFLOAT16, marker="o", markersize=3.5, label="transformers, bfloat16"),
        ]
        figure.suptitle("Experts layer on an H200, cold L2", x=0.01, ha="left", fontsize=13, fontweight="bold")
        stages = [Patch(color=colour, label=label) for colour, label in STAGES.values()]
        figure.legend(handles=legend, loc="lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, 0.03))
        figure.legend(handles=stages, loc="lower center", ncols=5, frameon=False)
        figure.tight_layout(rect=(0, 0.07, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _ratios_panel(axes: plt.Axes, ratios: Sequence[float], labels: Sequence[str], rates: Sequence[str]) -> None:
    """Speed of each case over DeepGEMM's, with the rate that it reaches."""
    for position, (ratio, rate) in enumerate(zip(ratios, rates, strict=True)):
        axes.barh(position, ratio, 0.62, color=OURS)
        text = f"{ratio:.2f}×   {rate}"
        axes.annotate(text, (0, position), (5, 0), textcoords="offset points", va="center", color="white")
    axes.axvline(1, color=DEEP_GEMM, linewidth=1.6)
    axes.annotate("DeepGEMM", (1, -0.5), (-4, 2), textcoords="offset points", ha="right", va="bottom", color=DEEP_GEMM)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.5, -0.9)
    axes.set_xlabel("DeepGEMM's time / ours (more is better)")


def _products_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Speed of each weight gradient over DeepGEMM's."""
    labels = [f"{row['groups']} × {row['m']} × {row['n']}" for row in rows]
    _ratios_panel(axes, [row["vs_deep_gemm"] for row in rows], labels, [f"{row['tflops']:.0f} TFLOPS" for row in rows])
    axes.set_title("grouped_gemm_k")


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
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("forward, then backward, ms (less is better)")
    axes.set_title(title)


def draw_training(rows: Sequence[dict], path: Path) -> None:
    """Weight gradients against DeepGEMM and passes of the layers against bfloat16, those that there are."""
    products = [row for row in select(rows, "grouped_gemm_k") if row["vs_deep_gemm"] is not None]
    panels = [lambda axes: _products_panel(axes, products)] if products else []
    if layer := select(rows, "experts"):
        title = f"experts of {layer[0]['model']}, {layer[0]['tokens']} tokens"
        panels.append(lambda axes: _pass_panel(axes, layer, title))
    if linear := select(rows, "linear"):
        name = "linear ({rows}, {in_features}) × ({out_features}, {in_features})".format(**linear[0])
        panels.append(lambda axes: _pass_panel(axes, linear, name))
    if not panels:
        return
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.4), squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes)
        figure.suptitle("Training on an H200, cold L2", x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.tight_layout(rect=(0, 0, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _prefill_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Speed of index scores of a prefill over DeepGEMM's."""
    labels = [f"{row['q_tokens']} × {row['kv_tokens']}" for row in rows]
    _ratios_panel(axes, [row["vs_deep_gemm"] for row in rows], labels, [f"{row['tflops']:.0f} TFLOPS" for row in rows])
    axes.set_ylabel("queries × keys")
    axes.set_title("mqa_logits, causal")


def _paged_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """The same of decoding steps."""
    labels = [f"{row['batch']} × {row['context']}, {row['next_n']}" for row in rows]
    rates = [f"{row['gbps'] / 1e3:.1f} TB/s" for row in rows]
    _ratios_panel(axes, [row["vs_deep_gemm"] for row in rows], labels, rates)
    axes.set_ylabel("batch × context, next_n")
    axes.set_title("paged_mqa_logits")


def draw_mqa(rows: Sequence[dict], path: Path) -> None:
    """Index scores against DeepGEMM's, of prefill and decoding, those that there are; -inf filled in."""
    panels = []
    for what, panel in (("mqa_logits", _prefill_panel), ("paged_mqa_logits", _paged_panel)):
        found = [row for row in select(rows, what) if row["fill_masked"] and row["vs_deep_gemm"] is not None]
        if found:
            panels.append((panel, found))
    if not panels:
        return
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 3.2), squeeze=False)
        for axes, (panel, found) in zip(grid.flat, panels, strict=True):
            panel(axes, found)
        title = "Index scores of sparse attention on an H200, cold L2"
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.tight_layout(rect=(0, 0, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


PICTURES = {
    "gemm": draw_gemm,
    "quantize": draw_quantize,
    "grouped_gemm": draw_grouped,
    "experts": draw_experts,
    "training": draw_training,
    "mqa": draw_mqa,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description="draw the benchmark results")
    parser.add_argument("--results", type=Path, default=Path("validation/h200.json"), metavar="FILE|DIR")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR")
    args = parser.parse_args(argv)
    for name, draw in PICTURES.items():
        if rows := load(args.results, name):
            draw(rows, args.out / f"{name}.png")


if __name__ == "__main__":
    main()
