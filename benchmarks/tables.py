"""The figures of README.md and of pages in docs/: `python -m benchmarks.tables` writes them.

They are from validation/kernels.json, models.json and the files beside them that BESIDE names: where one of these is
not there, what is written stays. Columns of "one run" are from benchmarks/baselines/same_run.json; ratios of our times
now to those of that run are there only where both are of one kind of GPU. Bold: we are slower. The tables stand between
BEGIN and END in their file; a test keeps them as these files have them.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import baselines
from benchmarks.report import geomean, select
from benchmarks.roofline import NODE, least_us, predicted

ROOT = Path(__file__).parent.parent
VALIDATION = ROOT / "validation" / "kernels.json"
MODELS = VALIDATION.with_name("models.json")
BESIDE = {
    name: VALIDATION.with_name(f"{name}.json")
    for name in ("distributed", "batch_invariance", "choice", "expected_m", "warmup")
}
"""Benchmarks that `tools.validate` does not run."""
BEGIN, END = "<!-- benchmarks.tables writes what follows -->\n", "<!-- to here -->\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown. Cells that a row lacks at its end are empty; rows and columns of nothing else are left out."""
    filled = [[*row, *[""] * (len(header) - len(row))] for row in rows if any(row[1:])]
    used = [not column or any(row[column] for row in filled) for column in range(len(header))]
    lines = [[cell for cell, use in zip(line, used, strict=True) if use] for line in (header, *filled)]
    lines.insert(1, ["---"] * sum(used))
    return "".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in lines)


def format_ratio(ratio: float) -> str:
    """Another's time over ours: bold where we are slower."""
    text = f"{ratio:.2f}"
    return f"**{text}**" if float(text) < 1 else text


def mean_and_least(*groups: Iterable[float]) -> tuple[str, str]:
    """Two cells: the geometric mean of each group of ratios, and its least value; empty where any is missing."""
    values = [list(group) for group in groups]
    if any(not group or None in group for group in values):
        return "", ""
    return tuple(", ".join(format_ratio(of(group)) for group in values) for of in (geomean, min))


def gemm(rows: Sequence[dict], device: str) -> str:
    """rows: as measured now, on this kind of GPU."""
    rows = [row | {"over_cublas": row["cublas_us"] and row["cublas_us"] / row["us"]} for row in rows]

    def line(what: str, m: Iterable[int], now: str, *names: str) -> tuple[str, ...]:
        """What `now` is in the rows; of the fastest of the names in the run of the baselines."""
        found = [row[now] for row in rows if row["m"] in m]
        cases = [case for case in baselines.cases("gemm", device) if case.sizes["m"] in m]
        then = mean_and_least(min(map(case.ratio, names)) for case in cases)
        return what, *mean_and_least(found), *then

    return table(
        (f"dense GEMM on an {device}: DeepGEMM's time / ours", "now", "least", "one run, c94a80b", "least"),
        [
            line("m = 1, 16, 64", (1, 16, 64), "vs_deep_gemm", "deep_gemm"),
            line("m = 128 (the faster of DeepGEMM and cuBLAS)", (128,), "vs_best", "deep_gemm", "cublas_block"),
            line("m = 512", (512,), "vs_deep_gemm", "deep_gemm"),
            line("m = 4096", (4096,), "vs_deep_gemm", "deep_gemm"),
            line(
                "m = 4096: time of cuBLAS with one scale per tensor / ours",
                (4096,),
                "over_cublas",
                "cublas_per_tensor",
            ),
        ],
    )


def grouped_gemm(rows: Sequence[dict], along_k: Sequence[dict], guesses: Sequence[dict]) -> str:
    """rows: of the GEMMs over groups of rows; along_k: of those that are added to `out`; guesses: of `expected_m`."""
    plain, masked = "grouped_gemm", "grouped_gemm_masked"

    def ratios(op: str, belongs: Callable[[int, int], bool]) -> tuple[list[float], list[float]]:
        """Now and in the run of the baselines, of the numbers of groups and rows that belong."""
        now = [row for row in rows if row["op"] == op and belongs(row["groups"], row["mean_m"])]
        cases = [case for case in baselines.cases(op) if belongs(case.sizes["groups"], case.sizes["mean_rows"])]
        return [row["vs_deep_gemm"] for row in now], [case.ratio() for case in cases]

    def line(what: str, *kinds: tuple[list[float], list[float]]) -> tuple[str, ...]:
        now, then = zip(*kinds, strict=True)
        return what, *mean_and_least(*now), *mean_and_least(*then)

    def of(op: str, groups: int, mean_rows: int) -> tuple[list[float], list[float]]:
        return ratios(op, lambda g, m: (g, m) == (groups, mean_rows))

    added = [row["vs_deep_gemm"] for row in along_k]
    written = [ratio and ratio * row["accumulate_us"] / row["us"] for ratio, row in zip(added, along_k, strict=True)]
    cases = baselines.cases("grouped_gemm_k")
    what = "masked, the same groups, `expected_m` of 0.7 to 1.5 times the mean: over the time with the mean, at most"
    guessed = [(what, f"{max(row['over_mean'] for row in guesses):.2f}")] if guesses else []
    return table(
        ("grouped GEMMs: DeepGEMM's time / ours", "now", "least", "one run, c94a80b", "least"),
        [
            line("4 groups of 8192 rows, 8 of 4096", of(plain, 4, 8192), of(plain, 8, 4096)),
            line("32 groups of 256 rows", of(plain, 32, 256)),
            line("256 groups of 64 rows", of(plain, 256, 64)),
            line("masked, all", ratios(masked, lambda g, m: True)),
            line(
                "masked, 32 groups of 192 rows, 6 of 1024, `expected_m` 20% too high",
                *(of(masked, 32, 192), of(masked, 6, 1024)),
            ),
            *guessed,
            line("masked, 1 to 20 rows", ratios(masked, lambda g, m: m <= 20)),
            line(
                "weight gradients, added to `out`, as DeepGEMM does",
                (added, [case.ratio(ours="fp8moe_accumulating") for case in cases]),
            ),
            line("weight gradients, written", (written, [case.ratio() for case in cases])),
        ],
    )


def beside_cublas(rows: Sequence[dict]) -> str:
    """Contiguous groups beside the same product of one matrix by cuBLAS with one scale, both as measured now."""

    def line(what: str, *kinds: tuple[int, int]) -> tuple[str, ...]:
        groups = [
            [
                row["cublas_us"] and row["cublas_us"] / row["us"]
                for row in rows
                if (row["op"], row["groups"], row["mean_m"]) == ("grouped_gemm", *kind)
            ]
            for kind in kinds
        ]
        return what, *mean_and_least(*groups)

    return table(
        ("contiguous groups: time of cuBLAS, one scale and as many rows of one matrix / ours", "now", "least"),
        [
            line("4 groups of 8192 rows, 8 of 4096", (4, 8192), (8, 4096)),
            line("32 groups of 256 rows", (32, 256)),
        ],
    )


def layer_times(rows: Sequence[dict]) -> str:
    """The experts layer of each model as a CUDA graph, as measured now."""
    us = {(row["model"], row["tokens"]): row["graph_us"] for row in rows if row["routing"] == "random"}
    tokens = [count for count in (1, 8, 64, 512, 8192) if all((name, count) in us for name in baselines.MODELS)]
    return table(
        ("experts layer, CUDA graph, us", *(f"{count} token{'s' * (count > 1)}" for count in tokens)),
        [(name, *(f"{us[name, count]:.0f}" for count in tokens)) for name in baselines.MODELS],
    )


def experts(rows: Sequence[dict]) -> str:
    slowest = max(row["host_us"] for row in rows if row["host_us"] is not None)
    rows = [row for row in rows if row["routing"] == "random"]
    cases = baselines.cases("experts")

    def cells(now: str, then: str, *tokens: int) -> tuple[str, str, str, str]:
        """Of a ratio in the rows, and of an implementation's time over ours in the run of the baselines."""
        ours = [row[now] for row in rows if row[now] is not None and row["tokens"] in tokens]  # none on another GPU
        theirs = [case.ratio(then, "fp8moe_graph") for case in cases if case.sizes["tokens"] in tokens]
        return *mean_and_least(ours), *mean_and_least(theirs)

    few, many = (1, 8, 64, 512), (8192,)
    two_gemms = "vs_two_gemms", "deep_gemm_two_gemms"
    us = {(row["model"], row["tokens"]): row["graph_us"] for row in rows}
    weights = [case for case in cases if case.sizes["tokens"] in (8, 64)]
    floors = [case.us("weight_read_floor") for case in weights]
    reading = geomean(us[tuple(case.sizes.values())] / floor for case, floor in zip(weights, floors, strict=True))
    known = any(row["vs_two_gemms"] for row in rows)  # the floors are of the H200
    before = geomean(case.us("fp8moe_graph") / floor for case, floor in zip(weights, floors, strict=True))
    return table(
        ("experts layer, CUDA graph, four models, 1 to 8192 tokens", "now", "least", "one run, c94a80b", "least"),
        [
            (
                "time of transformers with DeepGEMM / ours",
                *cells("vs_deep_gemm", "transformers_deep_gemm_graph", *few, *many),
            ),
            (
                "time of transformers in bfloat16 (a mean) / ours",
                *mean_and_least(row["vs_bf16"] for row in rows if row["vs_bf16"] is not None),
            ),
            ("time of DeepGEMM's two GEMMs alone / our whole layer, 1 to 512 tokens", *cells(*two_gemms, *few)),
            ("the same, 8192 tokens", *cells(*two_gemms, *many)),
            (
                "8 and 64 tokens: our time / reading the weights in use at 4.2 TB/s",
                *(f"{reading:.2f}" if known else "", "", f"{before:.2f}"),
            ),
            ("1 token of DeepSeek-V3 (8 of 256 experts)", f"{us['dsv3', 1]:.0f} us"),
            ("CPU time of an eager call, 1 to 128 tokens", f"at most {slowest:.0f} us"),
        ],
    )


def training(rows: Sequence[dict]) -> str:
    def fp8(what: str, name: str) -> dict[str, float]:
        return {row["master"]: row[name] for row in select(rows, what) if row["impl"] == "fp8"}

    layer, linear = fp8("experts", "speedup"), fp8("linear", "speedup")
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
        ],
    )


def index_scores() -> str:
    def cells(op: str, suffix: str = "") -> tuple[str, str]:
        return mean_and_least(case.ratio(f"deep_gemm{suffix}", f"fp8moe{suffix}") for case in baselines.cases(op))

    return table(
        ("index scores of sparse attention", "DeepGEMM's time / ours", "least"),
        [
            ("`mqa_logits`, three shapes, -inf filled in", *cells("mqa_logits")),
            ("the same, `fill_masked=False`", *cells("mqa_logits", "_no_fill")),
            ("`paged_mqa_logits`, six shapes", *cells("paged_mqa_logits")),
        ],
    )


def others(benchmarks: dict) -> str:
    """What is small or of the CPU."""
    gemms, quantizers, transposing, host = (
        benchmarks[name]["rows"] for name in ("gemm", "quantize", "transpose", "host")
    )
    reading = [row["of_copy"] for row in gemms if row["m"] == 1]
    of_copy = {row["op"]: row["of_copy"] for row in quantizers if row["m"] == 65536}
    (both_ways,) = (row["of_copy"] for row in transposing if row["case"] == "one group")
    small = max(row["us"] for row in quantizers if row["op"] == "quantize_1x128" and row["m"] <= 64)
    calls = [max(row["us"] for row in select(host, what)) for what in ("gemm", "FP8Linear")]
    first, cached = (
        max(row["ms"] for row in select(host, f"first call, {source}"))
        for source in ("empty cache", "from the disk cache")
    )
    over = [1 + row["regret"] for row in benchmarks["choice"]["rows"]] if "choice" in benchmarks else []
    what = f"{len(over)} shapes that the choice of tiles has not seen: time over that of the fastest tile"
    unseen = [(what, f"{sum(over) / len(over):.3f} on average, at most {max(over):.2f}")] if over else []
    return table(
        ("", ""),
        [
            (
                "dense GEMM, m = 1: weights of 4 MB to 117 MB",
                f"{min(reading):.0%} to {max(reading):.0%} of the copy bandwidth",
            ),
            (
                "`quantize_1x128`, `quantize_128x128` of (65536, 7168) bfloat16",
                f"{of_copy['quantize_1x128']:.0%}, {of_copy['quantize_128x128']:.0%} of the copy bandwidth",
            ),
            ("the same by rows and by columns at once", f"{both_ways:.0%}"),
            ("`quantize_1x128` of 1 to 64 rows of 7168", f"at most {small:.1f} us"),
            ("CPU time of an eager `gemm`, `FP8Linear`", f"at most {calls[0]:.0f} us, {calls[1]:.0f} us"),
            ("first call of a new kernel, and from the disk cache", f"{first / 1000:.2f} s, {cached:.1f} ms"),
            *unseen,
        ],
    )


def decode(rows: Sequence[dict], requests: Sequence[dict]) -> str:
    plain = {(row["batch"], row["prompt"]): f"{row['ms']:.1f} ms" for row in select(rows, "decode_bf16")}
    found = [
        (
            f"a step, batch {row['batch']}, prompts of {row['prompt']}",
            f"{row['ms']:.1f} ms",
            f"{row['tokens_s']:.0f}",
            f"{row['x_floor']:.1f}",
            plain.get((row["batch"], row["prompt"]), ""),
        )
        for row in select(rows, "decode")
    ]
    found += [
        (
            f"the same drawn with top_k, top_p, a penalty, batch {row['batch']}",
            f"{row['ms']:.1f} ms",
            f"{row['tokens_s']:.0f}",
            "",
            "",
        )
        for row in select(rows, "sampling")
    ]
    found += [
        (f"{row['batch']} x {row['prompt']} tokens of prompt", f"{row['ms']:.0f} ms", f"{row['tokens_s']:.0f}", "", "")
        for row in select(rows, "prefill")
    ]
    found += [
        (
            f"{row['requests']} requests over {row['slots']} slots, new tokens",
            f"{row['seconds']:.0f} s",
            f"{row['tokens_s']:.0f}",
            "",
            "",
        )
        for row in requests
    ]
    for row in select(rows, "first"):
        found.append(("constructor, three batch sizes, to the first token", f"{row['new_s']:.0f} s", "", "", ""))
        found.append(("the same with compiled kernels on the disk", f"{row['again_s']:.0f} s", "", "", ""))
        found.append(("GPU memory beside weights and keys and values", f"{row['beside_gb']:.1f} GB", "", "", ""))
    header = ("Qwen3-30B-A3B's sizes, 48 layers", "time", "tokens/s", "time over that of the bytes read", "bfloat16")
    return table(header, found)


def readme(benchmarks: dict) -> str:
    gpu = baselines.device(benchmarks["gpu"])
    layer, passes = (part(benchmarks[part.__name__]["rows"]) for part in (experts, training))
    model = decode(benchmarks["decode"]["rows"], benchmarks["requests"]["rows"])
    groups = grouped_gemm(
        benchmarks["grouped_gemm"]["rows"],
        select(benchmarks["training"]["rows"], "grouped_gemm_k"),
        benchmarks["expected_m"]["rows"] if "expected_m" in benchmarks else (),
    )
    now = [gemm(benchmarks["gemm"]["rows"], gpu), beside_cublas(benchmarks["grouped_gemm"]["rows"])]
    now.append(layer_times(benchmarks["experts"]["rows"]))
    return "\n".join([*now, groups, layer, index_scores(), passes, model, others(benchmarks)])


def lora(benchmarks: dict) -> str:
    rows = [row for row in benchmarks["lora"]["rows"] if row["impl"] == "lora"]
    return table(
        ("", "tokens", "rank", "forward and backward", "over frozen experts", "forward alone", "memory of a step"),
        [
            (
                *(row["model"], str(row["tokens"]), str(row["rank"]), f"{row['us'] / 1e3:.1f} ms"),
                *(f"{row['ratio']:.2f}", f"{row['forward_ratio']:.2f}", f"{row['step_bytes'] / 1e9:.2f} GB"),
            )
            for row in rows
        ],
    )


def batch_invariance(benchmarks: dict) -> str | None:
    if "batch_invariance" not in benchmarks:
        return None
    rows = benchmarks["batch_invariance"]["rows"]
    tokens = sorted({row["m"] for row in select(rows, "gemm")})
    ratios: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        dense = row["what"] == "gemm"
        what = f"{row['n']} x {row['k']}" if dense else f"experts, {row['model']}"
        ratios.setdefault((what, str(row["parts"]) if dense else "1"), []).append(f"{row['ratio']:.2f}")
    header = ("weights", "parts of K", *(f"{count} token{'s' * (count > 1)}" for count in tokens))
    return table(header, [(*what, *found) for what, found in ratios.items()])


def roofline(benchmarks: dict) -> str:
    rows = []
    for case in baselines.cases("experts"):
        (name, tokens), medians = case.sizes.values(), case.medians
        parts = least_us(baselines.MODELS[name], tokens, baselines.active_experts(name, tokens))
        names = ("fp8moe_graph", "deep_gemm_two_gemms", "transformers_deep_gemm_graph")
        times = (*parts, sum(parts), *(medians[one] for one in names))
        rows.append((name if tokens == 1 else "", str(tokens), *(f"{us:.0f}" for us in times)))
    parts = ("permute", "GEMM 1", "GEMM 2", "combine", "all")
    return table(("", "tokens", *parts, "fp8moe", "DeepGEMM, two GEMMs alone", "transformers + DeepGEMM"), rows)


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


def by_method(title: str, rows: Sequence[dict], names: dict[str, str]) -> str:
    """A line for each number of tokens, a column for each of `names` that was measured: us, and over `local`."""
    us = {(row["tokens"], row["method"]): row["us"] for row in rows}
    names = {name: shown for name, shown in names.items() if name in {method for _, method in us}}

    def cell(tokens: int, name: str) -> str:
        if (tokens, name) not in us:
            return ""
        ratio = us[tokens, name] / us[tokens, "local"]
        return f"{us[tokens, name]:.0f}" + ("" if name in ("local", "one_gpu") else f" ({ratio:.2f})")

    lines = ([str(tokens), *(cell(tokens, name) for name in names)] for tokens in sorted({tokens for tokens, _ in us}))
    return table((title, *names.values()), lines)


def others_of_two(rows: Sequence[dict]) -> str:
    layers = [row for row in select(rows, "layer") if "equal" in row]
    rounded, exact = ([row["equal"] for row in layers if ("exact" in row["method"]) == kind] for kind in (False, True))
    lines = [
        ("values equal to one GPU's, the least of all methods", f"{min(rounded):.4%}"),
        ("the same, `exact=True`", f"{min(exact):.4%}"),
    ]
    lines += [
        (f"scratch memory, {row['tokens']} tokens a rank, over that of its even share", f"{row['over_share']:.2f}")
        for row in select(rows, "scratch")
    ]
    lines += [
        (
            f"training, {row['method']}, {row['tokens']} tokens a rank, forward and backward, over the experts alone",
            f"{row['over_local']:.2f}",
        )
        for row in select(rows, "training")
        if row["method"] != "local"
    ]
    lines += [
        (
            f"a step of {row['model']}, batch {row['batch']} in all: two GPUs, one GPU",
            f"{row['ms']:.1f} ms, {row['one_gpu_ms']:.1f} ms ({row['over_one_gpu']:.2f})",
        )
        for row in select(rows, "decode")
    ]
    return table(("two GPUs", ""), lines)


def distributed(benchmarks: dict) -> str | None:
    if "distributed" not in benchmarks:
        return None
    rows = benchmarks["distributed"]["rows"]
    sent = {"gather": "gather", "all_to_all, eager": "all_to_all", "all_to_all, exact, eager": "exact"}
    alone = {"local": "experts alone"}
    measured = {"one_gpu": "all on one GPU", **alone, "gather": "gather", "gather, NCCL": "over NCCL"}
    measured |= {"replicated": "replicated, all tokens"} | sent
    parts = [by_method("2 GPUs, tokens a rank", select(rows, "layer"), measured), others_of_two(rows)]
    found = predicted(rows, baselines.MODELS["dsv3"])
    for ranks in sorted({row["ranks"] for row in found}):
        shown = alone | sent | ({} if ranks <= NODE else {"gather": "gather, NCCL"})
        title = f"{ranks} GPUs, predicted"
        parts.append(by_method(title, [row for row in found if row["ranks"] == ranks], shown))
    return "\n".join(parts)


def warmup(benchmarks: dict) -> str | None:
    if "warmup" not in benchmarks:
        return None
    header = ("batches of 1, 8, 64", "CPUs", "kernels", "time", "on disk", "compiled by the model afterwards")
    return table(
        header,
        [
            (
                *(row["model"], str(row["cpus"]), str(row["kernels"]), f"{row['seconds']:.0f} s"),
                *(f"{row['mb']:.0f} MB", str(row["compiled"])),
            )
            for row in benchmarks["warmup"]["rows"]
        ],
    )


FILES: dict[str, Callable[[dict], str | None]] = {
    "README.md": readme,
    "docs/batch-invariance.md": batch_invariance,
    "docs/experts.md": roofline,
    "docs/finetuning.md": lora,
    "docs/mqa.md": mqa,
    "docs/distributed.md": distributed,
    "docs/warmup.md": warmup,
}


def stored() -> dict[str, dict]:
    """The results of the benchmarks by their names, and the GPU of those that `tools.validate` runs."""
    beside = {name: json.loads(path.read_text()) for name, path in BESIDE.items() if path.exists()}
    kernels, models = (json.loads(path.read_text()) for path in (VALIDATION, MODELS))
    gpu = kernels["benchmarks"]["versions"]["gpu"]
    return kernels["benchmarks"] | models["models"] | beside | {"gpu": gpu}


def with_tables(text: str, tables: str | None) -> str:
    """The text of a file, with these tables between its marks, or those it has. ValueError unless it has each once."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"expected {BEGIN.strip()!r} and then {END.strip()!r}, once each")
    return text if tables is None else before + begin + tables + end + after


def main() -> None:
    description = f"write the figures of {', '.join(FILES)}"
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=description).parse_args()
    benchmarks = stored()
    for name, tables in FILES.items():
        path = ROOT / name
        path.write_text(with_tables(path.read_text(encoding="utf-8"), tables(benchmarks)), encoding="utf-8")


if __name__ == "__main__":
    main()
