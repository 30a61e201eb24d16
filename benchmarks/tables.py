"""The tables of README.md and of pages in docs/: `python -m benchmarks.tables` writes them.

Comparisons with other libraries come from validation/peers.json alone, one run of `benchmarks.peers`. The other tables
come from validation/kernels.json, models.json and the files named in BESIDE. A result that is missing, or was measured
with other kernels than kernels.json, gets no table. In its file each table stands between the marks BEGIN and END; a
test checks that the tables match the stored results.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.peers import CASES
from benchmarks.report import ROOT, geomean, select
from benchmarks.roofline import MXFP4_BYTES, NODE, dense_least_ms, least_us, predicted, sparse_least_ms
from benchmarks.routines.kernels import STAGES
from benchmarks.shapes import FOUR_BITS, MODEL_NAMES, MODELS, QWEN, WHOLE_MODEL_NAMES
from benchmarks.training import PROFILED

VALIDATION = ROOT / "validation" / "kernels.json"
WHOLE_MODELS = VALIDATION.with_name("models.json")
PEERS, LATENT = VALIDATION.with_name("peers.json"), VALIDATION.with_name("latent.json")
BESIDE = {
    name: VALIDATION.with_name(f"{name}.json")
    for name in (
        *("distributed", "node", "batch_invariance", "policy", "choice", "warmup", "serve_gpu", "titan", "megatron"),
    )
}
"""Maps benchmarks that `tools.validate` does not run to the files of their stored results."""
BEGIN, END = "<!-- benchmarks.tables writes what follows -->\n", "<!-- to here -->\n"
NAMES = {
    "deep_gemm": "DeepGEMM",
    "cublas_block": "cuBLAS, block scales",
    "cublas_one_scale": "cuBLAS, one scale",
    "vllm": "vLLM's Triton experts",
    "transformers_bf16": "transformers in bfloat16",
    "deep_gemm_two_gemms": "DeepGEMM's two GEMMs alone",
    "sonic": "SonicMoE in bfloat16",
}
LAYERS = ("vllm", "transformers_bf16", "deep_gemm_two_gemms")
WHOLE_MODEL = {
    (QWEN, "fp8moe"): "GraphDecoder",
    (QWEN, "vllm_fp8moe"): "vLLM, `--quantization fp8moe`",
    ("gpt-oss-20b", "mxfp4"): "GraphDecoder, GPT-OSS-20b's size",
}
"""Maps models and names in their rows to what README's first table calls them."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. Short rows are padded with empty cells; empty rows and columns are left out."""
    filled = [[*row, *[""] * (len(header) - len(row))] for row in rows if any(row[1:])]
    used = [not column or any(row[column] for row in filled) for column in range(len(header))]
    lines = [[cell for cell, use in zip(line, used, strict=True) if use] for line in (header, *filled)]
    lines.insert(1, ["---"] * sum(used))
    return "".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in lines)


def ratios(rows: Iterable[dict], other: str, ours: str = "fp8moe") -> list[float]:
    """Return the ratio of the time of `other` to ours, for each row that has both times."""
    return [row["us"][other] / row["us"][ours] for row in rows if {other, ours} <= row["us"].keys()]


def mean_and_worst(rows: Sequence[dict], other: str, ours: str = "fp8moe", worst: Callable = min) -> str:
    """Return text with the mean ratio and, if there are several rows, with the worst ratio.

    If some rows lack one of the two times, the text also tells the number of rows that have both.
    """
    found = ratios(rows, other, ours)
    if not found:
        return ""
    some = "" if len(found) == len(rows) else f", {len(found)} of {len(rows)} cases"
    return f"{geomean(found):.2f}" if len(rows) == 1 else f"{geomean(found):.2f} ({worst(found):.2f}{some})"


def measured_with(peers: dict) -> str:
    """Return one sentence about what a run was measured with: GPU, driver, libraries."""
    names = {"vllm": "vLLM", "transformers": "transformers", "torch": "PyTorch", "sonic-moe": "SonicMoE"}
    packaged = {"sgl-deep-gemm": "DeepGEMM as sgl-deep-gemm"}  # the version numbers of sgl-deep-gemm are not DeepGEMM's
    names = (packaged if "sgl-deep-gemm" in peers["versions"] else {"deep_gemm": "DeepGEMM"}) | names
    versions = peers["versions"]
    libraries = [f"{shown} {versions[name]}" for name, shown in names.items() if name in versions]
    found = f"Medians on an {versions['gpu']} (driver {versions['driver']})"
    return f"{found}, both sides of each ratio in one run: {', '.join(libraries)}."


def gemms(peers: dict) -> str:
    """Make the table of kernels compared with other libraries."""
    rows = peers["rows"]

    def line(what: str, kind: str, belongs: Callable[[dict], bool] = lambda row: True) -> tuple[str, ...]:
        found = [row for row in select(rows, kind) if belongs(row)]
        return what, *(mean_and_worst(found, name) for name in ("deep_gemm", "cublas_block", "cublas_one_scale"))

    few, many = "masked groups of 1 to 20 rows", "masked, 32 groups of 192 rows, 6 of 1024"
    return table(
        ("time over fp8moe's, geometric mean (worst)", *list(NAMES.values())[:3]),
        [
            line("dense GEMM, m = 1, 16, 64", "gemm", lambda row: row["m"] <= 64),
            *(line(f"m = {m}", "gemm", lambda row, m=m: row["m"] == m) for m in (128, 512, 4096)),
            line("contiguous, 4 groups of 8192 rows, 8 of 4096", "contiguous", lambda row: row["groups"] <= 8),
            line("32 groups of 256 rows", "contiguous", lambda row: row["groups"] == 32),
            line("256 groups of 64 rows", "contiguous", lambda row: row["groups"] == 256),
            line(few, "masked", lambda row: row["mean_rows"] <= 20),
            line(many, "masked", lambda row: row["mean_rows"] > 20),
            line("weight gradients, added to `out`", "along_k"),
            line("`mqa_logits`, -inf filled in", "mqa_logits", lambda row: row["fill"]),
            line("the same, `fill_masked=False`", "mqa_logits", lambda row: not row["fill"]),
            line("`paged_mqa_logits`", "paged_mqa_logits"),
        ],
    )


def layer(peers: dict) -> str:
    """Make the table of other libraries' times for the experts layer over fp8moe's: mean and worst of all models."""
    rows = layers(peers)
    if not rows:
        return ""
    tokens = sorted({row["tokens"] for row in rows})
    by_tokens = [[row for row in rows if row["tokens"] == count] for count in tokens]
    inside = "our two GEMMs in the layer / alone", "gemms_in_layer", "fp8moe_two_gemms"
    return table(
        ("experts layer, four models: time over fp8moe's", *map(count_of_tokens, tokens)),
        [
            *((NAMES[name], *(mean_and_worst(some, name) for some in by_tokens)) for name in LAYERS),
            (inside[0], *(mean_and_worst(some, *inside[1:], worst=max) for some in by_tokens)),
        ],
    )


def four_bits(peers: dict) -> str:
    """Make the table of layers in FP8 and NVFP4 beside MXFP4, a line for each model and format that was measured."""
    rows = [row for row in select(peers["rows"], "four_bits") if {"fp8moe", "mxfp4"} <= row["us"].keys()]
    tokens = sorted({row["tokens"] for row in rows})

    def line(model: str, name: str) -> list[str]:
        by_tokens = {row["tokens"]: row["us"] for row in rows if row["model"] == model}
        there = [by_tokens.get(count, {}) for count in tokens]
        return [f"{us[name] / us['mxfp4']:.2f}" if name in us else "" for us in there]

    models = dict.fromkeys(row["model"] for row in rows)
    names = {"fp8moe": "our layer in FP8", "nvfp4": "ours in NVFP4"}
    names |= {"humming": "Humming's GEMMs, without sorting and weighted sum"}
    there = {name: what for name, what in names.items() if any(name in row["us"] for row in rows)}
    lines = [(f"{MODEL_NAMES[model]}: {what}", *line(model, name)) for model in models for name, what in there.items()]
    for model in models:
        of_model = (row for row in rows if row["model"] == model and "gemms_in_mxfp4" in row["us"])
        bounds = {row["tokens"]: f"{share(row, peers['copy_tbps']):.2f}" for row in of_model}
        lines.append(
            (f"{MODEL_NAMES[model]}: least time of our GEMMs / theirs", *(bounds.get(count, "") for count in tokens))
        )
    return table(("experts layer: time over ours in MXFP4", *map(count_of_tokens, tokens)), lines) if lines else ""


def share(row: dict, tbps: float) -> float:
    """Return the least time of both GEMMs of a layer in MXFP4 over the time that they took."""
    model = FOUR_BITS[row["model"]]
    _, *gemms, _ = least_us(model, row["tokens"], row["experts_in_use"], tbps, MXFP4_BYTES)
    return sum(gemms) / row["us"]["gemms_in_mxfp4"]


def copies(row: dict) -> int:
    """Return the bytes of the FP8 weights of a trained layer, without scales."""
    hidden, intermediate, experts, _ = PROFILED[row["model"]][0]
    return 3 * experts * hidden * intermediate


def beside_sonic(peers: dict) -> str:
    """Make the table of training beside SonicMoE; empty if it was not measured."""
    rows = [row for row in select(peers["rows"], "training") if {"fp8moe", "sonic"} <= row["us"].keys()]
    if not rows:
        return ""
    times = {
        "forward and backward, weights quantized in each": ("sonic", "fp8moe"),
        "forward and backward, weights quantized for four": ("sonic", "fp8moe_shared"),
        "forward": ("sonic_forward", "fp8moe_forward"),
        "forward, weights quantized for four": ("sonic_forward", "fp8moe_shared_forward"),
    }
    lines = [
        (f"{what}: time of SonicMoE / ours", *(f"{row['us'][sonic] / row['us'][ours]:.2f}" for row in rows))
        for what, (sonic, ours) in times.items()
    ]
    figures = {
        "kept for the backward": lambda row, of: row["kept_bytes"][of],
        "peak": lambda row, of: row["peak_bytes"][of],
        "peak without the FP8 copies of weights": lambda row, of: (
            row["peak_bytes"][of] - (of == "fp8moe") * copies(row)
        ),
        "largest error": lambda row, of: row["error"][of],
    }
    for what, of in figures.items():
        lines.append((f"{what}: ours / SonicMoE's", *(f"{of(row, 'fp8moe') / of(row, 'sonic'):.2f}" for row in rows)))
    called = MODEL_NAMES | {"olmoe": "OLMoE"}
    names = (f"{called[row['model']]}, {row['tokens']} tokens" for row in rows)
    return table(("training of experts, ours in FP8 beside SonicMoE in bfloat16", *names), lines)


def count_of_tokens(count: int) -> str:
    """Return "1 token", "2 tokens" and so on."""
    return f"{count} token{'s' * (count > 1)}"


def whole_model(peers: dict, model: str) -> str:
    """Make the table that compares GraphDecoder with vLLM's engine; empty if neither was measured."""
    rows = [row for what in ("decode", "prefill") for row in whole_models(peers["rows"], what, model)]

    def line(row: dict) -> tuple[str, ...]:
        batch, prompt, ms = row["batch"], row["prompt"], row["ms"]
        what = f"a step, batch {batch}" if row["what"] == "decode" else f"prompts of {batch} x {prompt} tokens"
        ours = "fp8moe" if "fp8moe" in ms else "mxfp4"
        compared = (("vllm", ours), ("vllm", "vllm_fp8moe"), ("fp8moe", "mxfp4"))
        times = [f"{ms[name]:.1f} ms" if name in ms else "" for name in names]
        ratios = [f"{ms[one] / ms[other]:.2f}" if {one, other} <= ms.keys() else "" for one, other in compared]
        return what, *times, *ratios, str(row["kernels_a_step"].get(ours, ""))

    names = {"fp8moe": "fp8moe", "mxfp4": "fp8moe, experts in MXFP4", "vllm": "vLLM", "vllm_fp8moe": "vLLM with fp8moe"}
    ratios = ("vLLM's time / ours", "vLLM's time / that with fp8moe", "our time in FP8 / in MXFP4")
    header = (f"{WHOLE_MODEL_NAMES[model]}'s sizes, random weights", *names.values(), *ratios, "our kernels a step")
    return table(header, map(line, rows)) if rows else ""


def training(rows: Sequence[dict]) -> str:
    """Make the table of training compared with bfloat16."""

    def fp8(what: str, name: str) -> list[float]:
        found = {row["master"]: row[name] for row in select(rows, what) if row["impl"] == "fp8"}
        return [found["bfloat16"], found["float32"]]

    experts = "experts of DeepSeek-V3 (32 local), 8192 tokens: time of transformers in bfloat16 / ours"
    linear = "`FP8Linear`, (8192, 7168) x (4096, 7168): time of bfloat16 / ours"
    return table(
        ("training, forward and backward, master weights in bfloat16 (float32)", ""),
        [
            (experts, "{:.2f} ({:.2f})".format(*fp8("experts", "speedup"))),
            ("the same, activation memory: ours / that of bfloat16", f"{fp8('experts', 'kept_ratio')[0]:.2f}"),
            (linear, "{:.2f} ({:.2f})".format(*fp8("linear", "speedup"))),
        ],
    )


def others(benchmarks: dict) -> str:
    """Make the table of small kernels, CPU time and first calls."""
    quantizers, transposing, host = (benchmarks[name]["rows"] for name in ("quantize", "transpose", "host"))
    large = [f"{row['of_copy']:.0%}" for row in quantizers if row["m"] == 65536]
    (both_ways,) = (row["of_copy"] for row in transposing if row["case"] == "one group")
    small = max(row["us"] for row in quantizers if row["op"] == "quantize_1x128" and row["m"] <= 64)
    calls = [max(row["us"] for row in select(host, what)) for what in ("gemm", "FP8Linear", "GroupedExperts")]
    kinds = (f"first call, {source}" for source in ("empty cache", "from the disk cache"))
    first, cached = (max(row["ms"] for row in select(host, kind)) for kind in kinds)
    over = [1 + row["regret"] for row in benchmarks["choice"]["rows"]] if "choice" in benchmarks else []
    on_cpu = ", ".join(f"{us:.0f} us" for us in calls)
    rows = {
        "`quantize_1x128`, `quantize_128x128` of (65536, 7168) bfloat16": f"{', '.join(large)} of the copy bandwidth",
        "the same by rows and by columns at once": f"{both_ways:.0%}",
        "`quantize_1x128` of 1 to 64 rows of 7168": f"at most {small:.1f} us",
        "CPU time of an eager `gemm`, `FP8Linear`, `GroupedExperts`, at most": on_cpu,
        "first call of a new kernel, and from the disk cache": f"{first / 1000:.2f} s, {cached:.1f} ms",
    }
    if over:
        what = f"{len(over)} shapes that the choice of tiles has not seen: time over that of the fastest tile"
        rows[what] = f"{sum(over) / len(over):.3f} on average, at most {max(over):.2f}"
    return table(("", ""), rows.items())


def decode(rows: Sequence[dict], requests: Sequence[dict]) -> str:
    """Make the table of a whole model under GraphDecoder."""
    plain = {(row["batch"], row["prompt"]): f"{row['ms']:.1f} ms" for row in select(rows, "decode_bf16")}
    steps = "a step, batch {batch}, prompts of {prompt}", "{ms:.1f} ms", "{tokens_s:.0f}", "{x_floor:.1f}"
    drawn = "the same drawn with top_k, top_p, a penalty, batch {batch}", "{ms:.1f} ms", "{tokens_s:.0f}"
    cache = "keys and values in FP8, batch {batch}, prompts of {prompt}", *steps[1:]
    output = "output layer in FP8, batch {batch}, prompts of {prompt}", *steps[1:]
    prompts = "{batch} x {prompt} tokens of prompt", "{ms:.0f} ms", "{tokens_s:.0f}"
    fa3 = "the same in FlashAttention-3, {batch} x {prompt}", *prompts[1:]
    many = "{requests} requests over {slots} slots, new tokens", "{seconds:.0f} s", "{tokens_s:.0f}"
    found = [
        (*(cell.format(**row) for cell in steps), plain.get((row["batch"], row["prompt"]), ""))
        for row in select(rows, "decode")
    ]
    others = {
        "decode_fp8_cache": cache,
        "decode_fp8_output": output,
        "sampling": drawn,
        "prefill": prompts,
        "prefill_fa3": fa3,
    }
    found += [
        tuple(cell.format(**row) for cell in cells) for what, cells in others.items() for row in select(rows, what)
    ]
    found += [tuple(cell.format(**row) for cell in many) for row in requests]
    for row in select(rows, "first"):
        found.append(("constructor, three batch sizes, to the first token", f"{row['new_s']:.0f} s"))
        found.append(("the same with compiled kernels on the disk", f"{row['again_s']:.0f} s"))
        found.append(("GPU memory beside weights and keys and values", f"{row['beside_gb']:.1f} GB"))
    header = ("Qwen3-30B-A3B's sizes, 48 layers", "time", "tokens/s", "time over that of the bytes read", "bfloat16")
    return table(header, found)


def whole_models(rows: Sequence[dict], what: str, model: str = QWEN) -> list[dict]:
    """Return a model's rows of kind `what`, decode steps or prefill, with times under "us", as `ratios` expects."""
    return [row | {"us": row["ms"]} for row in select(rows, what) if row.get("model", QWEN) == model]


def not_measured(peers: dict) -> str:
    """Return a sentence that names the cases of a run which have no row, or nothing."""
    missing = sorted({case.name for case in CASES} - {row["case"] for row in peers["rows"]})
    return f"Not measured with these kernels yet: {', '.join(f'`{name}`' for name in missing)}.\n" if missing else ""


def not_beside_vllm(rows: Sequence[dict]) -> str:
    """Return a sentence that says which whole models were not timed beside vLLM's, or nothing."""
    missing = [
        shown
        for model, shown in WHOLE_MODEL_NAMES.items()
        if not any("vllm" in row["ms"] for row in whole_models(rows, "decode", model))
    ]
    if not missing:
        return ""
    models = f"A model of {missing[0]}'s size" if len(missing) == 1 else f"Models of {' and '.join(missing)}'s sizes"
    return f"{models} {'was' if len(missing) == 1 else 'were'} not timed beside vLLM's with these kernels yet."


NUMBERS = ("no", "one", "two", "three", "four")


def headline(benchmarks: dict) -> str:
    """Make README's first table: a whole model, the layer and the GEMMs; mean ratios with the worst case."""
    peers = benchmarks["peers"]
    rows = peers["rows"]
    grouped = [row for row in rows if row["what"] in ("contiguous", "masked")]
    trained = select(rows, "training")
    compared = (
        ("experts layer of four models, 1 to 8192 tokens", layers(peers), LAYERS),
        ("dense FP8 GEMMs", select(rows, "gemm"), ("deep_gemm", "cublas_block")),
        ("grouped FP8 GEMMs", grouped, ("deep_gemm",)),
        (
            f"experts layer of {NUMBERS[len({row['model'] for row in trained})]} models trained, forward and backward",
            trained,
            ("sonic",),
        ),
    )
    work = {"decode": "generating, 1, 8, 64 sequences at once", "prefill": "reading prompts, 4 of 4096 tokens"}
    found = [
        (f"{shown}: {does}", "vLLM's default", mean_and_worst(timed, "vllm", name))
        for what, does in work.items()
        for (model, name), shown in WHOLE_MODEL.items()
        if ratios(timed := whole_models(rows, what, model), "vllm", name)
    ]
    found += [
        (what, NAMES[name], mean_and_worst(some, name))
        for what, some, names in compared
        for name in names
        if ratios(some, name)
    ]
    qwen = whole_models(rows, "decode")
    steps = [row["ms"]["fp8moe"] for row in qwen if "fp8moe" in row["ms"]]
    whole = (
        "Whole models are of Qwen3-30B-A3B's size where no other is named: a token for each of 1, 8, 64 sequences takes"
    )
    whole = f"{whole} {', '.join(f'{ms:.1f}' for ms in steps)} ms." if len(steps) == 3 else ""
    whole = f"{whole} {not_beside_vllm(rows)}".strip()
    shown = pictures("docs/images/", "overview") if layers(peers) else []
    head = ("", "beside", "their time over ours, mean (worst)")
    return "\n".join([measured_with(peers), f"{whole}\n", table(head, found), *shown])


def figures(benchmarks: dict) -> str:
    """Make all tables of docs/benchmarks.md, and links to the pictures of the same run."""
    peers = benchmarks["peers"]
    others_there = []
    if peers:
        parts = not_measured(peers), gemms(peers), layer(peers), four_bits(peers), beside_sonic(peers)
        of_models = (whole_model(peers, model) for model in WHOLE_MODEL_NAMES)
        others_there = [f"{measured_with(peers)}\n", *filter(None, (*parts, *of_models))]
    passes = training(benchmarks["training"]["rows"])
    model = decode(benchmarks["decode"]["rows"], benchmarks["requests"]["rows"])
    return "\n".join(
        [*others_there, passes, model, others(benchmarks), *(pictures("images/", *drawn(peers)) if peers else ())]
    )


PICTURES = {
    "overview": "Experts layers in short",
    "experts": "Experts layers",
    "gemm": "Dense GEMMs",
    "grouped_gemm": "Grouped GEMMs",
    "mqa": "Index scores",
}


def layers(peers: dict) -> list[dict]:
    """Return the rows of experts layers that were measured with random routing."""
    return [row for row in select(peers["rows"], "layer") if "routing" not in row and row["us"]]


def drawn(peers: dict) -> list[str]:
    """Return the names of the pictures that have data."""
    of_layers = ("overview", "experts")
    return [name for name in PICTURES if name not in of_layers or layers(peers)]


def pictures(folder: str, *names: str) -> list[str]:
    """Return Markdown links to the named pictures of `benchmarks.plots`, which compare fp8moe with other libraries."""
    return [f"![{PICTURES[name]} beside others]({folder}{name}.png)\n" for name in names]


def on(result: dict) -> str:
    """Return the line that names the GPU on which a benchmark ran."""
    return f"On an {result['gpu']}:\n\n"


def lora(benchmarks: dict) -> str:
    """Make the table of LoRA adapters on frozen experts."""
    result = benchmarks["lora"]
    goal = next(one["limit"] for one in result["thresholds"] if "frozen experts" in one["name"])
    found = table(
        (
            *("", "tokens", "rank", "forward and backward", "over frozen experts", "forward alone"),
            *("peft's time in bfloat16 / ours", "memory of a step"),
        ),
        [
            (
                *(row["model"], str(row["tokens"]), str(row["rank"]), f"{row['us'] / 1e3:.1f} ms"),
                *(f"{row[name]:.2f}" if name in row else "" for name in ("ratio", "forward_ratio", "speedup")),
                f"{row['step_bytes'] / 1e9:.2f} GB",
            )
            for row in result["rows"]
            if row["impl"] == "lora"
        ],
    )
    return f"{on(result)}{found}\nThe goal is at most {goal:g} times the time of frozen experts.\n"


def batch_invariance(benchmarks: dict) -> str:
    """Make two tables of the cost of batch-invariant mode: for each shape of weights, and over all shapes."""
    result = benchmarks["batch_invariance"]
    rows = result["rows"]
    tokens = sorted({row["m"] for row in select(rows, "gemm")})
    ratios: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        dense = row["what"] == "gemm"
        what = (f"{row['n']} x {row['k']}", str(row["parts"])) if dense else (f"experts, {row['model']}", "1")
        ratios.setdefault(what, []).append(f"{row['ratio']:.2f}")
    goals = [
        (one["name"].removeprefix("batch invariance, "), f"{one['value']:.2f}", f"{one['limit']:g}")
        for one in result["thresholds"]
    ]
    found = table(("weights", "parts of K", *map(count_of_tokens, tokens)), [(*k, *v) for k, v in ratios.items()])
    means = table(("over all", "measured", "goal"), goals)
    return f"Time in the mode over the time without it. {on(result)}{found}\n{means}"


def policy(benchmarks: dict) -> str:
    """Make the table of what equal bits and recorded routing cost."""
    result = benchmarks["policy"]
    names = {
        "step": "a decode step in the mode, batch {batch}",
        "recording": "a decode step that records routing, batch {batch}",
        "layers": "a training forward of four layers in `on_policy`, {batch} x 1024 tokens",
        "forward": "the same with the output layer",
    }
    lines = [
        (names[row["what"]].format(**row), f"{row['usual_ms']:.2f} ms", f"{row['ms']:.2f} ms", f"{row['ratio']:.3f}")
        for row in result["rows"]
    ]
    return on(result) + table(("Qwen3-30B-A3B's sizes", "usually", "measured", "ratio"), lines)


def roofline(benchmarks: dict) -> str:
    """Make the table of lower bounds of the experts layer's time, next to measured times."""
    peers, lines = benchmarks["peers"], []
    names = ("fp8moe", "vllm", "transformers_bf16", "deep_gemm_two_gemms", "fp8moe_two_gemms", "gemms_in_layer")
    for row in select(peers["rows"], "layer"):
        if "routing" not in row and "experts_in_use" in row:
            name, tokens, us = row["model"], row["tokens"], row["us"]
            parts = least_us(MODELS[name], tokens, row["experts_in_use"], peers["copy_tbps"])
            times = (*parts, sum(parts), *(us.get(other) for other in names))
            cells = ["" if time is None else f"{time:.0f}" for time in times]
            lines.append((name if tokens == 1 else "", str(tokens), *cells))
    least = ("permute", "GEMM 1", "GEMM 2", "combine", "all")
    shown = ("fp8moe", *(NAMES[name] for name in names[1:4]), "our two GEMMs alone", "in the layer")
    return f"{measured_with(peers)}\n\n" + table(("", "tokens", *least, *shown), lines)


def mqa(benchmarks: dict) -> str:
    """Make the table of paged indexer logits, `append_kv` and top-k, followed by a link to the picture."""
    rows = benchmarks["mqa"]["rows"]
    uneven = {row["fill_masked"]: row for row in select(rows, "uneven")}
    append = {row["tokens"]: row for row in select(rows, "append_kv")}
    (overlap,) = (row["overlap"] for row in select(rows, "overlap"))
    to_bytes, to_even = (f"{uneven[True][name]:.2f}, {uneven[False][name]:.2f}" for name in ("over_bytes", "over_even"))
    long = "131072 among 63 of 512, with -inf and without: time over that of its bytes at the rate of 64 x 8192"
    found = {
        long: to_bytes,
        "the same: time over that of as many tokens in equal contexts": to_even,
        "`append_kv`, 1 and 128 tokens": f"{append[1]['us']:.1f} us, {append[128]['us']:.1f} us",
        "`append_kv`, 65536 tokens": f"{append[65536]['of_copy']:.0%} of the copy bandwidth",
    }
    found["top 2048 of 16384 shared with float32 scores"] = f"{overlap:.0%}"
    own = table(("", ""), found.items())
    latent = of("sparse_latent", sparse_latent)(benchmarks)
    return own + "\n" + latent + ("\n" + "\n".join(pictures("images/", "mqa")) if benchmarks["peers"] else "")


def sparse_latent(benchmarks: dict) -> str:
    """Make the tables of the choice of index scores, and of sparse attention in a layer beside dense attention."""
    choice, layer = benchmarks["top_k"]["rows"], benchmarks["sparse_latent"]["rows"]
    chosen = [
        (
            f"{row['rows']} x {row['columns']}",
            f"{row['us']:.0f} us",
            f"{row['of_copy']:.0%}",
            f"{row['over_pytorch']:.1f}",
        )
        for row in choice
    ]
    stages = [
        (
            str(row["tokens"]),
            *(
                f"{row[f'{stage}_ms']:.2f} ({least:.2f})"
                for stage, least in zip(STAGES, sparse_least_ms(row["tokens"]), strict=True)
            ),
            *(
                f"{row['ms']:.2f}",
                f"{row['dense_ms']:.2f} ({dense_least_ms(row['tokens']):.2f})",
                f"{row['dense_over']:.2f}",
            ),
            f"{row['scratch_gb']:.2f} GB",
        )
        for row in layer
    ]
    header = ("tokens", *STAGES, "all", "dense, cuDNN", "dense over ours", "scratch")
    return (
        on(benchmarks["top_k"])
        + table(("`mqa_top_k`, 2048 of rows x columns", "", "of the copy bandwidth", "torch.topk over it"), chosen)
        + "\nA layer of DeepSeek-V3.2, a prompt, ms; in brackets the least that operations and bytes allow:\n\n"
        + table(header, stages)
    )


def by_method(title: str, rows: Sequence[dict], names: dict[str, str]) -> str:
    """Make a table of times in microseconds, and of their ratios to `local`, by tokens and measured methods.

    names: maps methods to their headings.
    """
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
    """Make the table of two GPUs: how results agree with those of one GPU, memory, training and decode."""
    layers = [row for row in select(rows, "layer") if "equal" in row]
    rounded, exact = (
        min(row["equal"] for row in layers if ("exact" in row["method"]) == kind) for kind in (False, True)
    )
    trained = [row for row in select(rows, "training") if row["method"] != "local"]
    scratch = "scratch memory, {tokens} tokens a rank, over that of its even share"
    passes = "training, {method}, {tokens} tokens a rank, forward and backward, over the experts alone"
    step = "a step of {model}, batch {batch} in all: two GPUs, one GPU"
    times = "{ms:.1f} ms, {one_gpu_ms:.1f} ms ({over_one_gpu:.2f})"
    kinds = (
        *((scratch, "{over_share:.2f}", select(rows, "scratch")), (passes, "{over_local:.2f}", trained)),
        (step, times, select(rows, "decode")),
    )
    lines = [
        ("values equal to one GPU's, worst of all methods", f"{rounded:.4%}"),
        ("the same, `exact=True`", f"{exact:.4%}"),
    ]
    lines += [(what.format(**row), cell.format(**row)) for what, cell, some in kinds for row in some]
    return table(("two GPUs", ""), lines)


def distributed(benchmarks: dict) -> str:
    """Make the tables of two GPUs (measured) and of more GPUs (predicted)."""
    rows = benchmarks["distributed"]["rows"]
    sent = {"gather": "gather", "all_to_all, eager": "all_to_all", "all_to_all, exact, eager": "exact"}
    alone = {"local": "experts alone"}
    measured = {"one_gpu": "all on one GPU", **alone, "gather": "gather", "gather, NCCL": "over NCCL"}
    measured |= {"replicated": "replicated, all tokens"} | sent
    parts = [by_method("2 GPUs, tokens a rank", select(rows, "layer"), measured), others_of_two(rows)]
    found = predicted(rows, MODELS["dsv3"])
    for ranks in sorted({row["ranks"] for row in found}):
        shown = alone | sent | ({} if ranks <= NODE else {"gather": "gather, NCCL"})
        title = f"{ranks} GPUs, predicted"
        parts.append(by_method(title, [row for row in found if row["ranks"] == ranks], shown))
    return f"{OF_DISTRIBUTED}\n{on(benchmarks['distributed'])}" + "\n".join(parts)


OF_DISTRIBUTED = """\
DeepSeek-V3's layer (256 experts, 8 for each token), with even routing: microseconds of a call, by the number of tokens
on each rank. In brackets: the ratio to "experts alone", the experts of one rank on the tokens of all ranks, without
communication. all_to_all is eager, `exact` is all_to_all with `exact=True`; the others are replays of a CUDA graph. The
last two tables are predictions. The measurements are kept in
[validation/distributed.json](../validation/distributed.json), from one run.
"""
"""Text before the tables of times on several GPUs."""


def warmup(benchmarks: dict) -> str:
    """Make the table of what `fp8moe warmup` costs and how much it compiles."""
    header = ("batches of 1, 8, 64", "CPUs", "kernels", "time", "on disk", "compiled by the model afterwards")
    cells = "{model}", "{cpus}", "{kernels}", "{seconds:.0f} s", "{mb:.0f} MB", "{compiled}"
    found = table(header, [[cell.format(**row) for cell in cells] for row in benchmarks["warmup"]["rows"]])
    return f"What it takes, for prompts of up to 8192 tokens:\n\n{found}"


def serving(benchmarks: dict) -> str:
    """Make the table of the server compared with `GraphDecoder.run`."""
    result = benchmarks["serve_gpu"]
    *rows, clients = result["rows"]
    ways = {"run": "`GraphDecoder.run`", "whole": "the server's scheduler, whole answers", "stream": "token by token"}
    header = (f"{rows[0]['requests']} requests, {rows[0]['slots']} slots", "new tokens/s", "of `run`")
    done = table(header, [(ways[row["how"]], f"{row['tokens_s']:.0f}", f"{row['of_run']:.2f}") for row in rows])
    equal = f"{clients['equal']} of {clients['clients']} clients, {clients['gone']} of which left early"
    return f"{on(result)}{done}\nBatch-invariant, {equal}, got the tokens of `generate`.\n"


def titan(benchmarks: dict) -> str:
    """Make the table of torchtitan's modules."""
    rows = {row["variant"]: row for row in benchmarks["titan"]["rows"] if not row.get("failed")}
    names = {"bf16": "bfloat16", "torchao": "torchao's rowwise FP8", "fp8moe": "fp8moe"}
    header = ("four layers of Qwen3-30B-A3B's size, compiled", "tokens/s", "of bfloat16", "memory")
    lines = [
        (
            *(name, f"{row['tokens_s']:.0f}", f"{row['tokens_s'] / rows['bf16']['tokens_s']:.2f}"),
            f"{row['peak_gib']:.0f} GiB",
        )
        for kind, name in names.items()
        if (row := rows.get(kind))
    ]
    return on(rows["bf16"]) + table(header, lines)


def node(benchmarks: dict) -> str:
    """Make the table of a model that no card holds."""
    result = benchmarks["node"]
    name, cards = MODEL_NAMES["qwen3_235b"], f"{result['ranks']} {result['gpu']}"
    lines = [
        (
            f"step, {row['batch']} sequence{'s' * (row['batch'] > 1)}, {row['method']}",
            f"{row['ms']:.1f} ms",
            f"{row['floor_ms']:.1f} ms",
            f"{row['tokens_s']:.0f}",
        )
        for row in select(result["rows"], "decode")
    ]
    lines += [
        (f"{row['batch']} prompts of {row['prompt']} tokens", f"{row['ms']:.0f} ms", "", f"{row['tokens_s']:.0f}")
        for row in select(result["rows"], "prefill")
    ]
    return table((f"{name} on {cards}, {result['gb']:.0f} GB on each", "", "its bytes allow", "tokens/s"), lines)


def megatron(benchmarks: dict) -> str:
    """Make the table of Megatron-Core's model, trained on several numbers of GPUs."""
    runs = benchmarks["megatron"]["runs"]
    spread = [f", experts over {run['expert_parallel']}" if run["expert_parallel"] > 1 else "" for run in runs]
    names = (f"{run['world']} GPU{'s' * (run['world'] > 1)}{over}" for run, over in zip(runs, spread, strict=True))
    rows = [{row["variant"]: row for row in run["speed"]["rows"]} for run in runs]
    parts = {"experts": "experts alone in FP8", "fp8": "experts and linears in FP8"}
    lines = [
        (f"tokens/s of bfloat16's, {what}", *(f"{run['speed']['over_bf16'][part]:.2f}" for run in runs))
        for part, what in parts.items()
    ]
    lines += [
        (
            "memory, FP8 and bfloat16",
            *(f"{row['fp8']['peak_gib']:.0f}, {row['bf16']['peak_gib']:.0f} GiB" for row in rows),
        )
    ]
    lines += [
        (f"loss of the small model beside bfloat16's, {what}", *(_apart(run, part) for run in runs))
        for part, what in (*parts.items(), ("control", "bfloat16 rounded in another way"))
    ]
    layers = runs[0]["speed"]["sizes"]["layers"]
    header = (f"Megatron-Core {runs[0]['versions']['megatron-core']}, {layers} layers of Qwen3-30B-A3B's size", *names)
    return on({"gpu": runs[0]["device"]}) + table(header, lines)


def _apart(run: dict, part: str) -> str:
    """Return how far a variant's losses are from bfloat16's, with the standard error; "-" if they were not measured."""
    if "loss" not in run:
        return "-"
    apart = run["loss"]["apart"][part]
    return f"{100 * apart['last_ten']:+.2f} ± {100 * apart['error']:.2f}%, {run['loss']['seeds']} seeds"


def of(name: str, tables: Callable[[dict], str]) -> Callable[[dict], str]:
    """Wrap a function that makes tables, to return a sentence if benchmark `name` was not run with these kernels."""
    return lambda benchmarks: tables(benchmarks) if benchmarks.get(name) else "Not measured with these kernels yet.\n"


FILES: dict[str, Callable[[dict], str]] = {
    "README.md": of("peers", headline),
    "docs/benchmarks.md": figures,
    "docs/batch-invariance.md": of("batch_invariance", batch_invariance),
    "docs/experts.md": of("peers", roofline),
    "docs/rl.md": of("policy", policy),
    "docs/finetuning.md": lora,
    "docs/mqa.md": mqa,
    "docs/distributed.md": lambda benchmarks: (
        of("distributed", distributed)(benchmarks) + "\n" + of("node", node)(benchmarks)
    ),
    "docs/warmup.md": of("warmup", warmup),
    "docs/serving.md": of("serve_gpu", serving),
    "docs/engines.md": lambda benchmarks: of("titan", titan)(benchmarks) + "\n" + of("megatron", megatron)(benchmarks),
}


def of_these_kernels(path: Path) -> dict | None:
    """Read a stored result; None if there is none, or if its kernels differ from those of validation/kernels.json."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("digest") == json.loads(VALIDATION.read_text())["digest"] else None


def stored() -> dict:
    """Return the stored results by benchmark name; "peers" may be None."""
    beside = {name: found for name, path in BESIDE.items() if (found := of_these_kernels(path))}
    kernels, models = (json.loads(path.read_text()) for path in (VALIDATION, WHOLE_MODELS))
    latent = json.loads(LATENT.read_text()) if LATENT.exists() else {}
    measured = kernels["benchmarks"] | models["models"] | latent.get("benchmarks", {})
    return measured | beside | {"peers": of_these_kernels(PEERS)}


def with_tables(text: str, tables: str, begin: str = BEGIN, end: str = END) -> str:
    """Put tables between the two marks in a file's text. ValueError unless each mark appears once."""
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended) or begin in rest or end in before + after:
        raise ValueError(f"expected {begin.strip()!r} and then {end.strip()!r}, once each")
    return before + begin + tables + end + after


def main() -> None:
    description = f"write the figures of {', '.join(FILES)}"
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=description).parse_args()
    benchmarks = stored()
    for name, tables in FILES.items():
        path = ROOT / name
        path.write_text(with_tables(path.read_text(encoding="utf-8"), tables(benchmarks)), encoding="utf-8")


if __name__ == "__main__":
    main()
