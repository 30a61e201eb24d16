"""The figures of README.md and docs/mqa.md: `python -m benchmarks.tables` writes them from validation/h200.json.

Each stands between BEGIN and END in its file; a test keeps them as the validation file has them.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.report import geomean, select

ROOT = Path(__file__).parent.parent
VALIDATION = ROOT / "validation" / "h200.json"
BEGIN, END = "<!-- benchmarks.tables writes what follows -->\n", "<!-- to here -->\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown. Cells that a row lacks at its end are empty."""
    lines = [header, ["---"] * len(header), *([*row, *[""] * (len(header) - len(row))] for row in rows)]
    return "".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in lines)


def mean_and_least(label: str, *groups: Iterable[float]) -> tuple[str, str, str]:
    """A row: the geometric mean of each group, and its least value."""
    values = [list(group) for group in groups]
    return label, ", ".join(f"{geomean(group):.2f}" for group in values), ", ".join(f"{min(g):.2f}" for g in values)


def gemm(rows: Sequence[dict]) -> str:
    def ratios(ratio: str, *m: int) -> list[float]:
        return [row[ratio] for row in rows if row["m"] in m]

    return table(
        ("dense GEMM", "DeepGEMM's time / ours", "least"),
        [
            mean_and_least("m = 1, 16, 64", ratios("vs_deep_gemm", 1, 16, 64)),
            mean_and_least("m = 128 (the faster of DeepGEMM and cuBLAS)", ratios("vs_best", 128)),
            mean_and_least("m = 512", ratios("vs_deep_gemm", 512)),
            mean_and_least("m = 4096", ratios("vs_deep_gemm", 4096)),
        ],
    )


def grouped_gemm(rows: Sequence[dict]) -> str:
    def ratios(op: str, groups: int, mean_m: int) -> list[float]:
        case = (op, groups, mean_m)
        return [row["vs_deep_gemm"] for row in rows if (row["op"], row["groups"], row["mean_m"]) == case]

    plain, masked = "grouped_gemm", "grouped_gemm_masked"
    few = [row["vs_deep_gemm"] for row in rows if row["op"] == masked and row["mean_m"] <= 20]
    return table(
        ("grouped GEMMs", "our TFLOPS over valid rows / DeepGEMM's", "least"),
        [
            mean_and_least(
                "contiguous, 4 groups of 8192 rows, 8 of 4096", ratios(plain, 4, 8192), ratios(plain, 8, 4096)
            ),
            mean_and_least("contiguous, 32 groups of 256 rows", ratios(plain, 32, 256)),
            mean_and_least("contiguous, 256 groups of 64 rows", ratios(plain, 256, 64)),
            mean_and_least(
                "masked, 32 groups of 192 rows, 6 of 1024", ratios(masked, 32, 192), ratios(masked, 6, 1024)
            ),
            mean_and_least("masked, 1 to 20 rows (DeepGEMM's time / ours)", few),
        ],
    )


def experts(rows: Sequence[dict]) -> str:
    def ratios(name: str) -> list[float]:
        return [row[name] for row in rows if row["routing"] == "random" and row[name] is not None]

    (one_token,) = (row["graph_us"] for row in rows if (row["model"], row["tokens"]) == ("dsv3", 1))
    slowest = max(row["host_us"] for row in rows if row["host_us"] is not None)
    return table(
        ("experts layer, CUDA graph, four models, 1 to 8192 tokens", "", "least"),
        [
            mean_and_least("time of transformers with DeepGEMM / ours", ratios("vs_deep_gemm")),
            mean_and_least("time of transformers in bfloat16 / ours", ratios("vs_bf16")),
            mean_and_least("time of DeepGEMM's two GEMMs alone / our whole layer", ratios("vs_two_gemms")),
            ("1 token of DeepSeek-V3 (8 of 256 experts)", f"{one_token:.0f} us"),
            ("CPU time of an eager call, 1 to 128 tokens", f"at most {slowest:.0f} us"),
        ],
    )


def training(rows: Sequence[dict]) -> str:
    def fp8(what: str, name: str) -> dict[str, float]:
        return {row["master"]: row[name] for row in select(rows, what) if row["impl"] == "fp8"}

    layer, linear = fp8("experts", "speedup"), fp8("linear", "speedup")
    products = geomean(row["vs_deep_gemm"] for row in select(rows, "grouped_gemm_k"))
    return table(
        ("training, forward and backward, master weights in bfloat16 (float32)", ""),
        [
            (
                "experts of DeepSeek-V3 (32 local), 8192 tokens: time of transformers in bfloat16 / ours",
                f"{layer['bfloat16']:.2f} ({layer['float32']:.2f})",
            ),
            (
                "the same, activation memory: ours / that of bfloat16",
                f"{fp8('experts', 'kept_ratio')['bfloat16']:.2f}",
            ),
            (
                "`FP8Linear`, (8192, 7168) x (4096, 7168): time of bfloat16 / ours",
                f"{linear['bfloat16']:.2f} ({linear['float32']:.2f})",
            ),
            ("`grouped_gemm_k`, four shapes: DeepGEMM's time / ours", f"{products:.2f}"),
        ],
    )


def index_scores(rows: Sequence[dict]) -> str:
    def ratios(what: str) -> list[float]:
        return [row["vs_deep_gemm"] for row in select(rows, what) if row["fill_masked"] and row["vs_deep_gemm"]]

    return table(
        ("index scores of sparse attention, -inf filled in", "DeepGEMM's time / ours", "least"),
        [
            mean_and_least("`mqa_logits`, three shapes", ratios("mqa_logits")),
            mean_and_least("`paged_mqa_logits`, six shapes", ratios("paged_mqa_logits")),
        ],
    )


def others(benchmarks: dict) -> str:
    """What is small or of the CPU."""
    gemms, quantizers, transposing, host = (
        benchmarks[name]["rows"] for name in ("gemm", "quantize", "transpose", "host")
    )
    reading = geomean(row["over_floor"] for row in gemms if row["m"] <= 64)
    of_copy = {row["op"]: row["of_copy"] for row in quantizers if row["m"] == 65536}
    (both_ways,) = (row["of_copy"] for row in transposing if row["case"] == "one group")
    small = max(row["us"] for row in quantizers if row["op"] == "quantize_1x128" and row["m"] <= 64)
    calls = [max(row["us"] for row in select(host, what)) for what in ("gemm", "FP8Linear")]
    first, cached = (
        max(row["ms"] for row in select(host, f"first call, {source}"))
        for source in ("empty cache", "from the disk cache")
    )
    return table(
        ("", ""),
        [
            ("m = 1, 16, 64: our time / reading the weight alone", f"{reading:.2f}"),
            (
                "`quantize_1x128`, `quantize_128x128` of (65536, 7168) bfloat16",
                f"{of_copy['quantize_1x128']:.0%}, {of_copy['quantize_128x128']:.0%} of the copy bandwidth",
            ),
            ("the same by rows and by columns at once", f"{both_ways:.0%}"),
            ("`quantize_1x128` of 1 to 64 rows of 7168", f"at most {small:.1f} us"),
            ("CPU time of an eager `gemm`, `FP8Linear`", f"at most {calls[0]:.0f} us, {calls[1]:.0f} us"),
            ("first call of a new kernel, and from the disk cache", f"{first / 1000:.2f} s, {cached:.1f} ms"),
        ],
    )


def readme(benchmarks: dict) -> str:
    parts = (gemm, grouped_gemm, experts, training)
    tables = [part(benchmarks[part.__name__]["rows"]) for part in parts]
    return "\n".join([*tables, index_scores(benchmarks["mqa"]["rows"]), others(benchmarks)])


def mqa(benchmarks: dict) -> str:
    rows = benchmarks["mqa"]["rows"]
    uneven = {row["fill_masked"]: row for row in select(rows, "uneven")}
    append = {row["tokens"]: row for row in select(rows, "append_kv")}
    top_k = {(row["rows"], row["sorted"]): row["us"] for row in select(rows, "topk")}
    (overlap,) = (row["overlap"] for row in select(rows, "overlap"))

    def both(name: str) -> str:
        return f"{uneven[True][name]:.2f}, {uneven[False][name]:.2f}"

    return table(
        ("", ""),
        [
            (
                "131072 among 63 of 512, with -inf and without: time over that of its bytes at the rate of 64 x 8192",
                both("over_bytes"),
            ),
            ("the same: time over that of as many tokens in equal contexts", both("over_even")),
            ("`append_kv`, 1 and 128 tokens", f"{append[1]['us']:.1f} us, {append[128]['us']:.1f} us"),
            ("`append_kv`, 65536 tokens", f"{append[65536]['of_copy']:.0%} of the copy bandwidth"),
            (
                "torch.topk, 2048 of 65536, 128 rows, sorted and not",
                f"{top_k[128, True]:.0f} us, {top_k[128, False]:.0f} us",
            ),
            (
                "torch.topk, 2048 of 16384, 2048 rows, sorted and not",
                f"{top_k[2048, True]:.0f} us, {top_k[2048, False]:.0f} us",
            ),
            ("top 2048 of 16384 shared with float32 scores", f"{overlap:.0%}"),
        ],
    )


FILES: dict[str, Callable[[dict], str]] = {"README.md": readme, "docs/mqa.md": mqa}


def with_tables(text: str, tables: str) -> str:
    """The text of a file, with these tables between its marks. ValueError unless it has each mark once."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"expected {BEGIN.strip()!r} and then {END.strip()!r}, once each")
    return before + begin + tables + end + after


def main() -> None:
    description = f"write the figures of {' and '.join(FILES)}"
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=description).parse_args()
    benchmarks = json.loads(VALIDATION.read_text())["benchmarks"]
    for name, tables in FILES.items():
        path = ROOT / name
        path.write_text(with_tables(path.read_text(encoding="utf-8"), tables(benchmarks)), encoding="utf-8")


if __name__ == "__main__":
    main()
