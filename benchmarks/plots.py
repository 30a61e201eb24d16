"""Pictures of the results: `python -m benchmarks.plots [--out DIR]`.

Pictures that compare fp8moe with other libraries show validation/peers.json alone, as the tables do; bars where fp8moe
is slower than DeepGEMM have their own colour. If peers.json was measured with other kernels, these pictures are
removed. The other pictures show validation/kernels.json.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from benchmarks import tables  # noqa: E402
from benchmarks.report import geomean, select  # noqa: E402
from benchmarks.shapes import DENSE_M, MODEL_NAMES  # noqa: E402

# A name has the same colour in all pictures. Most colours are Okabe and Ito's, which colour-blind readers can tell
# apart.
OURS, BEHIND, DEEP_GEMM, CUBLAS, CUBLAS_ONE_SCALE = "#0072B2", "#D55E00", "#A6A6A6", "#E69F00", "#7F4A00"
# MARK: dots for single cases, and the line at the bandwidth of a copy
BFLOAT16, VLLM, MARK = "#CC79A7", "#009E73", "#000000"
STAGES = ("#03395C", "#2A6F9E", "#56B4E9", "#9CCBEA", "#D4E7F5")  # blues for the kernels of our layer, in launch order
COLOURS = {"vllm": VLLM, "transformers_bf16": BFLOAT16, "deep_gemm_two_gemms": DEEP_GEMM}
STYLE: dict[str, Any] = {f"axes.spines.{side}": False for side in ("top", "right")}
STYLE |= {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "figure.dpi": 150}


def hash_of(result: dict) -> str:
    """Return the SHA-256 of a stored result; each picture has the hash of its result in its "Source" metadata."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


@contextmanager
def _picture(
    result: dict, path: Path, title: str, size: tuple[float, float], *grid: int, below: float = 0, **options
) -> Iterator:
    """Yield a figure and its axes; finally write the figure to `path`, with the hash of the `result` it shows.

    below: the fraction of the figure's height for the legend.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*grid, figsize=size, squeeze=False, **options)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        yield figure, axes
        figure.tight_layout(rect=(0, below, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Source": hash_of(result)})
        plt.close(figure)


def _legend(figure: plt.Figure, entries: Sequence[tuple[str, str, str]], **options: object) -> None:
    """Put a legend of (label, colour, style) below the figure. style: "" for a bar, else the style of a line."""
    shown = []
    for label, colour, style in entries:
        marker = (
            {"marker": "o", "markersize": 3.5, "linestyle": style.strip("o")} if "o" in style else {"linestyle": style}
        )
        shown.append(Line2D([], [], color=colour, label=label, **marker) if style else Patch(color=colour, label=label))
    figure.legend(handles=shown, loc="lower center", frameon=False, **{"ncols": 4, **options})


def _note(
    axes: plt.Axes, text: str, at: tuple[float, float], shift: tuple[float, float] = (4, 0), **how: object
) -> None:
    """Write text beside the point `at`, in data coordinates."""
    axes.annotate(text, at, shift, textcoords="offset points", **{"va": "center", **how})


def _over(axes: plt.Axes, at: tuple[float, float], text: str, **how: object) -> None:
    """Write text above the point `at`, in data coordinates."""
    _note(axes, text, at, (0, 3), ha="center", va="bottom", color=OURS, **how)


def _colour(ratio: float) -> str:
    return BEHIND if float(f"{ratio:.2f}") < 1 else OURS


def _categories(axes: plt.Axes, labels: Sequence[str]) -> None:
    """Label the categories of horizontal bars, and put the first bar on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _ratio(row: dict) -> float | None:
    """Return the ratio of DeepGEMM's time to ours; None if one of the two times is missing."""
    found = tables.ratios([row], "deep_gemm")
    return found[0] if found else None


def _card(peers: dict) -> str:
    return peers["versions"]["gpu"].removeprefix("NVIDIA ")


def draw_overview(peers: dict, path: Path) -> None:
    """Draw the ratio of each other library's time to ours for experts layers, by number of tokens.

    Beside the ratios, draw tokens/s of a whole model if one was timed.
    """
    rows, rates = tables.layers(peers), tables.whole_models(peers["rows"], "decode")
    tokens = sorted({row["tokens"] for row in rows})
    series = {name: colour for name, colour in COLOURS.items() if tables.ratios(rows, name)}
    width, title = 0.81 / len(series), f"fp8moe on an {_card(peers)}"
    panels, size, columns = ((3, 2), (10, 4.1), 5) if rates else ((1,), (6.5, 4.1), 2)
    with _picture(peers, path, title, size, 1, len(panels), below=0.1, width_ratios=panels) as (figure, grid):
        left = grid[0][0]
        for index, (name, colour) in enumerate(series.items()):
            for position, count in enumerate(tokens):
                found = tables.ratios([row for row in rows if row["tokens"] == count], name)
                if found:
                    mean, at = geomean(found), position + (index - (len(series) - 1) / 2) * width
                    left.bar(at, mean, 0.92 * width, color=colour)
                    left.plot([at] * len(found), found, "o", color=MARK, markersize=2.5)
                    left.annotate(f"{mean:.2f}", (at, 0.1), ha="center", color="white", size=7, rotation=90)
        left.axhline(1, color=OURS, linewidth=1.6)
        left.set_xticks(range(len(tokens)), [str(count) for count in tokens])
        left.set_xlabel("tokens of a call")
        left.set_ylabel("time over fp8moe's, linear")
        left.set_title("Experts layers of DeepSeek-V3 and Qwen3; above 1 fp8moe is faster")
        if rates:
            _rates_panel(grid[0][1], rates)
        names = tables.NAMES | {"vllm": "vLLM (left its Triton experts)"}
        bars = [(names[name], colour, "") for name, colour in series.items()]
        _legend(figure, [("fp8moe", OURS, ""), *bars, ("one of four layers", MARK, "o")], ncols=columns)


def _rates_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Draw tokens per second of decode steps, ours and vLLM's."""
    beside = any("vllm" in row["tokens_s"] for row in rows)
    for position, row in enumerate(rows):
        for shift, name, colour in ((-0.2 * beside, "fp8moe", OURS), (0.2, "vllm", VLLM)):
            if value := row["tokens_s"].get(name):
                axes.bar(position + shift, value, 0.38, color=colour)
                _note(axes, f"{value:.0f}", (position + shift, value), (0, 2), ha="center", va="bottom", size=8)
    axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows])
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("tokens/s, linear (more is better)")
    axes.set_title("Qwen3-30B-A3B's sizes, decoding")


def _gemm_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Draw each library's time for each shape, all with the same m.

    The label of our bar shows our time and the ratio of DeepGEMM's time to ours.
    """
    series = {"deep_gemm": DEEP_GEMM, "cublas_block": CUBLAS, "fp8moe": OURS}
    height = 0.84 / len(series)
    for position, row in enumerate(rows):
        us, ratio = row["us"], _ratio(row)
        for index, (name, colour) in enumerate(series.items()):
            at = position + (index - (len(series) - 1) / 2) * height
            axes.barh(at, us.get(name, 0), 0.92 * height, color=colour)
        one_scale = us.get("cublas_one_scale", 0)
        if one_scale:
            axes.plot([one_scale] * 2, [at - height / 2, at + height / 2], color=CUBLAS_ONE_SCALE, linewidth=1.6)
        text = f"{us['fp8moe']:.{0 if us['fp8moe'] >= 100 else 1}f}" + (f"   {ratio:.2f}×" if ratio else "")
        _note(axes, text, (max(us["fp8moe"], one_scale), at), (4, -0.5), color=_colour(ratio or 1), size=7.5)
    axes.set_xlim(0, 1.26 * max(max(row["us"].values()) for row in rows))
    _categories(axes, [f"{row['n']} × {row['k']}" for row in rows])
    axes.set_title(f"m = {rows[0]['m']}")
    axes.set_xlabel("GPU time, µs, linear (less is better)")


def draw_gemm(peers: dict, path: Path) -> None:
    """Draw the dense GEMMs, one panel for each m."""
    rows = [row for row in select(peers["rows"], "gemm") if "fp8moe" in row["us"]]
    title = f"Dense FP8 GEMM on an {_card(peers)}, cold L2"
    with _picture(peers, path, title, (13.2, 9.2), 2, 3, below=0.03) as (figure, grid):
        for axes, m in zip(grid.flat, DENSE_M, strict=True):
            if some := [row for row in rows if row["m"] == m]:
                _gemm_panel(axes, some)
        for line in grid:
            line[0].set_ylabel("n × k")
        ours = ("fp8moe (µs, and times faster than DeepGEMM)", OURS, "")
        others = ("DeepGEMM", DEEP_GEMM, ""), ("cuBLAS, block scales", CUBLAS, "")
        _legend(figure, [ours, *others, ("cuBLAS, one scale per tensor", CUBLAS_ONE_SCALE, "-")])


def draw_quantize(result: dict, path: Path) -> None:
    """Draw the bandwidth of each case with many rows, and a line at a copy's bandwidth.

    Beside the bandwidths, draw the time of each case with few rows.
    """
    rows, title = result["rows"], f"Quantization of bfloat16 on an {result['gpu'].removeprefix('NVIDIA ')}"
    large = [row for row in rows if row["m"] > 64]
    small = [row for row in rows if row["m"] <= 64 and row["op"] == "quantize_1x128"]
    with _picture(result, path, title, (9.6, 3.4), 1, 2, width_ratios=(3, 2)) as (_, grid):
        left, right = grid[0]
        for position, row in enumerate(large):
            value = row["gbps"] / 1e3
            left.barh(position, value, 0.62, color=OURS)
            _note(left, f"{value:.2f} TB/s, {100 * row['of_copy']:.0f}%", (0, position), (5, 0), color="white")
        copy = large[0]["gbps"] / 1e3 / large[0]["of_copy"]
        left.axvline(copy, color=MARK, linewidth=1.6)
        _note(left, f"copy {copy:.2f}", (copy, -0.5), (-4, 2), ha="right", va="bottom")
        _categories(left, [f"{row['op'].removeprefix('quantize_')}  ({row['m']}, {row['k']})" for row in large])
        left.set_ylim(len(large) - 0.5, -0.9)
        left.set_xlabel("bytes read and written, TB/s, linear (more is better)")
        right.plot([row["m"] for row in small], [row["us"] for row in small], "o-", color=OURS)
        for row in small:
            _over(right, (row["m"], row["us"]), f"{row['us']:.2f}")
        right.set_xscale("log", base=2)
        right.set_xticks([row["m"] for row in small], [str(row["m"]) for row in small])
        right.margins(x=0.08)
        right.set_ylim(0, 1.3 * max(row["us"] for row in small))
        right.set_xlabel("rows, logarithmic")
        right.set_ylabel("GPU time, µs, linear (less is better)")
        right.set_title(f"1x128 of (rows, {small[0]['k']})")


def _ratios_panel(axes: plt.Axes, rows: Sequence[dict], label: str, with_time: bool = False) -> None:
    """Draw for each kind of row a bar, the mean ratio of DeepGEMM's time to ours, and a dot for each row's ratio.

    label: a format string. Rows are of one kind if their sizes, filled into `label`, give the same text. with_time:
    also write our time for a kind with only one row.
    """
    kinds: dict[str, list[dict]] = {}
    for row in rows:
        if _ratio(row):
            kinds.setdefault(label.format(**row), []).append(row)
    for position, some in enumerate(kinds.values()):
        ratios = [_ratio(row) for row in some]
        axes.barh(position, mean := geomean(ratios), 0.62, color=_colour(mean))
        time = f"{some[0]['us']['fp8moe']:.0f} µs" if with_time and len(some) == 1 else ""
        _note(axes, f"{mean:.2f}×   {time}", (0, position), (5, 0), color="white")
        if len(some) > 1:
            axes.plot(ratios, [position] * len(some), "o", color=MARK, markersize=3.5)
    axes.axvline(1, color=DEEP_GEMM, linewidth=1.6)
    _categories(axes, list(kinds))
    axes.set_xlabel("DeepGEMM's time over fp8moe's, linear (more is better)")


def draw_grouped(peers: dict, path: Path) -> None:
    """Draw ratios of DeepGEMM's times to ours for grouped GEMMs, one panel for each operation."""
    title = f"Grouped FP8 GEMMs on an {_card(peers)}, cold L2"
    panels = {
        "contiguous": ("grouped_gemm", "{groups} × {mean_rows}", "groups × rows of a group"),
        "masked": ("grouped_gemm_masked", "{groups} × {mean_rows}", "groups × rows of a group"),
        "along_k": ("grouped_gemm_k, accumulate=True", "{groups} × {m} × {n}", "groups × m × n"),
    }
    there = [what for what in panels if tables.ratios(select(peers["rows"], what), "deep_gemm")]
    with _picture(peers, path, title, (4.7 * len(there), 4.2), 1, len(there), below=0.06) as (figure, grid):
        for axes, what in zip(grid[0], there, strict=True):
            shown, label, sizes = panels[what]
            _ratios_panel(axes, select(peers["rows"], what), label)
            axes.set_title(shown)
            axes.set_ylabel(sizes)
        bars = ("fp8moe, geomean", OURS, ""), ("the same, slower than DeepGEMM", BEHIND, "")
        _legend(figure, [*bars, ("one shape of the weights", MARK, "o"), ("DeepGEMM", DEEP_GEMM, "-")])


LAYER_LINES = {
    "fp8moe": ("fp8moe", OURS, "o-"),
    **{name: (tables.NAMES[name], colour, "o-") for name, colour in COLOURS.items()},
}


def _layer_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Draw the time of one model's experts layer by number of tokens, for fp8moe and for other libraries."""
    for name, (_, colour, style) in LAYER_LINES.items():
        times = {row["tokens"]: row["us"][name] for row in rows if name in row["us"]}
        axes.plot(times.keys(), times.values(), style, color=colour, markersize=3.5)
    axes.set_title(MODEL_NAMES[rows[0]["model"]])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row["tokens"] for row in rows], [str(row["tokens"]) for row in rows])
    axes.minorticks_off()
    axes.set_xlabel("tokens of a call, logarithmic")


def _stages_panel(axes: plt.Axes, rows: Sequence[dict]) -> None:
    """Draw each kernel's share of a call's time, counted from the end of the kernel before it."""
    for position, row in enumerate(rows):
        ends = [0.0, *(end for *_, end in row["kernels"])]
        for start, end, colour in zip(ends, ends[1:], STAGES, strict=False):
            axes.bar(position, 100 * (end - start) / ends[-1], 0.72, 100 * start / ends[-1], color=colour)
        us = row["us"]["fp8moe"]
        _over(axes, (position, 100), f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.1f} ms", size=7.5)
    axes.set_xticks(range(len(rows)), [str(row["tokens"]) for row in rows])
    axes.set_ylim(0, 108)
    axes.set_xlabel("tokens of a call")


def draw_experts(peers: dict, path: Path) -> None:
    """Draw, for each model, the time of its experts layer by number of tokens, for fp8moe and other libraries.

    Below, draw the share of each of our kernels in our time.
    """
    rows = [row for row in tables.layers(peers) if "kernels" in row]
    names = list(dict.fromkeys(row["model"] for row in rows))
    title, size = f"Experts layer on an {_card(peers)}, cold L2; below where our time goes", (4.2 * len(names), 6.8)
    with _picture(peers, path, title, size, 2, len(names), below=0.07, height_ratios=(3, 2)) as (figure, grid):
        for name, (above, below) in zip(names, grid.T, strict=True):
            some = [row for row in rows if row["model"] == name]
            _layer_panel(above, some)
            _stages_panel(below, some)
        grid[0, 0].set_ylabel("CUDA graph, µs, logarithmic (less is better)")
        grid[1, 0].set_ylabel("% of our time")
        lines = [line for name, line in LAYER_LINES.items() if any(name in row["us"] for row in rows)]
        _legend(figure, lines, bbox_to_anchor=(0.5, 0.03))
        stages = [name for name, *_ in rows[-1]["kernels"]]
        gemms = (f"GEMM {number}" for number in (1, 2))
        stages = [next(gemms) if name == "gemm" else name for name in stages]
        _legend(figure, [(name, colour, "") for colour, name in zip(STAGES, stages, strict=False)], ncols=5)


def _pass_panel(axes: plt.Axes, rows: Sequence[dict], title: str) -> None:
    """Draw the forward and backward times of each implementation as one bar, labelled with its activation memory."""
    for position, row in enumerate(rows):
        colour = OURS if row["impl"] == "fp8" else BFLOAT16
        forward, total = row["forward_us"] / 1e3, row["us"] / 1e3
        axes.barh(position, forward, 0.62, color=colour)
        axes.barh(position, total - forward, 0.62, forward, color=colour, alpha=0.6)
        text = f"{total:.2f} ms" + (f"   {row['speedup']:.2f}×" if row["impl"] == "fp8" else "")
        _note(axes, text, (total, position), color=colour)
    axes.set_xlim(0, 1.3 * max(row["us"] for row in rows) / 1e3)
    labels = ["bfloat16" if row["impl"] == "bf16" else f"FP8, {row['master']} master" for row in rows]
    # kept_bytes is 0 for a bfloat16 linear layer, which keeps only its input.
    if all(row["kept_bytes"] for row in rows):
        labels = [f"{label}\n{row['kept_bytes'] / 1e9:.2f} GB kept" for label, row in zip(labels, rows, strict=True)]
    _categories(axes, labels)
    axes.set_xlabel("forward, then backward, ms, linear (less is better)")
    named = {"model": MODEL_NAMES[rows[0]["model"]]} if "model" in rows[0] else {}
    axes.set_title(title.format(**rows[0] | named))


def draw_training(result: dict, path: Path) -> None:
    """Draw the times of forward and backward of our FP8 layers and of bfloat16 layers."""
    title = f"Training on an {result['gpu'].removeprefix('NVIDIA ')}, cold L2"
    with _picture(result, path, title, (9.6, 3.4), 1, 2) as (_, grid):
        left, right = grid[0]
        _pass_panel(left, select(result["rows"], "experts"), "experts of {model}, {tokens} tokens")
        linear = "linear ({rows}, {in_features}) × ({out_features}, {in_features})"
        _pass_panel(right, select(result["rows"], "linear"), linear)


def draw_mqa(peers: dict, path: Path) -> None:
    """Draw the ratios of DeepGEMM's times to ours for indexer logits, for prefill and for decode."""
    title = f"Index scores of sparse attention on an {_card(peers)}, cold L2"
    with _picture(peers, path, title, (11.2, 3.4), 1, 2) as (_, grid):
        left, right = grid[0]
        scores = [row for row in select(peers["rows"], "mqa_logits") if row["fill"]]
        _ratios_panel(left, scores, "{queries} × {tokens}", with_time=True)
        left.set_ylabel("queries × keys")
        left.set_title("mqa_logits, causal, -inf filled in")
        paged = select(peers["rows"], "paged_mqa_logits")
        _ratios_panel(right, paged, "{batch} × {context}, {next_n}", with_time=True)
        right.set_ylabel("batch × context, next_n")
        right.set_title("paged_mqa_logits")


OF_PEERS = {"overview": draw_overview, "gemm": draw_gemm, "grouped_gemm": draw_grouped}
OF_PEERS |= {"experts": draw_experts, "mqa": draw_mqa}
OF_KERNELS = {"quantize": draw_quantize, "training": draw_training}


def shown(benchmarks: dict) -> dict[str, dict]:
    """Map the name of each picture that has data to the result it shows. benchmarks: from `tables.stored`."""
    peers = benchmarks["peers"]
    of_peers = {name: peers for name in OF_PEERS if peers and name in tables.drawn(peers)}
    return of_peers | {name: benchmarks[name] for name in OF_KERNELS}


def draw(out: Path, benchmarks: dict) -> None:
    """Draw all pictures that have data; remove the files of pictures without data."""
    results = shown(benchmarks)
    pictures: dict[str, Callable[[dict, Path], None]] = OF_PEERS | OF_KERNELS
    for name, picture in pictures.items():
        path = out / f"{name}.png"
        if name in results:
            picture(results[name], path)
        else:
            path.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures of the stored results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description="draw the stored results")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR")
    draw(parser.parse_args(argv).out, tables.stored())


if __name__ == "__main__":
    main()
