"""fp8moe beside the libraries that its users would take: `python -m benchmarks.peers [--only PATTERN] [--out FILE]`.

In one process every case runs whatever is installed, on the same operands and in turn: in each repeat ours, then each
of the others, after a fill that empties the L2 cache. Times are medians in microseconds of the kernels of a call;
`layer` are replays of CUDA graphs, from before one to after it; `host` is CPU time of an eager call.

- `deep_gemm`: DeepGEMM. It pads contiguous groups to 128 rows, and has the metadata of paged scores beforehand.
- `cublas_block`: torch.nn.functional.scaled_mm with scales of 1x128 and 128x128; `cublas_one_scale`: with one scale for
  each operand, of groups as many rows of one matrix: what no block scales would allow.
- `vllm`: vLLM's Triton kernels for experts. `transformers_bf16`: transformers' experts in bfloat16 on its "grouped_mm".
- `layer` has kernel times besides: `gemms_in_layer`, from the start of our GEMM 1 in the layer to the end of GEMM 2;
  `fp8moe_two_gemms` and `deep_gemm_two_gemms`, grouped GEMMs of the same sizes alone; `kernels`, where those of our
  layer begin and end.

Results are compared with ours: `difference`. One that is off counts as failed, as does one that raises.

With `--whole-model` instead: decode steps and a prefill of Qwen3-30B-A3B's sizes with random weights in milliseconds,
of this checkout (`fp8moe`), of another revision of it (`--against DIRECTORY`: `before`), and, where they are installed,
of vLLM's engine and of the same with integrations/vllm (`vllm_fp8moe`), one process after the other.

The file has the digest of what the GPU runs, card, clocks and versions. Rows of the same digest, card and versions stay
in it unless --only names them: a run can be made in pieces.
"""

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import adapters, command, mqa_cases, operands, roofline, shapes, timing
from benchmarks.adapters import Call
from benchmarks.calls import group_sizes
from benchmarks.report import digest, format_value, write_json
from benchmarks.shapes import MODELS, Model
from fp8moe import (
    FP8Tensor,
    GroupedExperts,
    gemm,
    grouped_gemm,
    grouped_gemm_k,
    grouped_gemm_masked,
    mqa_logits,
    paged_mqa_logits,
)
from fp8moe.quant.formats import BLOCK, ceil_div, empty_mn_major

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "validation" / "peers.json"
REPEATS, REST_S = 12, 0.2
HOST_BATCHES = 10
PROCESSES = {"gemm": 5, "contiguous": 3, "masked": 3}  # that compile ahead; one for others
SAMPLED_ROWS = 1024  # of the GEMMs of a layer, for comparison
MAX_DIFFERENCE = 1e-2  # relative Frobenius norm
MAX_LAYER_DIFFERENCE = 0.1  # activations between the GEMMs are rounded to FP8 elsewhere, or not at all
HEADS, HEAD_DIM = 64, 128  # of DeepSeek-V3.2's indexer
TOKENS = (1, 8, 64, 512, 2048, 8192)
GROUPED = ((4096, 7168), (7168, 2048))  # (n, k) of groups: DeepGEMM compiles for each, for seconds
SKEW, SKEWED = 0.6, ("dsv3_ep8", 2048)  # of the assignments; model and tokens
STEPS = ((1, 512), (8, 512), (64, 512))  # sequences and tokens of each prompt
PREFILL = (4, 4096)

Makers = dict[str, Callable[[], Call]]
"""By implementation, "fp8moe" first: makes the call to be timed."""


class Case(NamedTuple):
    """What is measured, a key of `MAKE`, and its sizes."""

    what: str
    sizes: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.what, *(f"{name}={value}" for name, value in self.sizes.items())])

    @property
    def row(self) -> dict:
        """What its row begins with."""
        return {"case": self.name, "what": self.what, **self.sizes}


def same(out: Tensor) -> Tensor:
    return out


def make_gemm(m: int, n: int, k: int, *, device: str = "cuda") -> Makers:
    a, b = operands.activation(m, k, device=device), operands.weight(n, k, device=device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return {
        "fp8moe": lambda: Call(partial(gemm, a, b, out=out), same),
        "deep_gemm": lambda: adapters.deep_gemm(a, b),
        "cublas_block": lambda: adapters.cublas_block(a, b),
        "cublas_one_scale": lambda: adapters.cublas_one_scale(a.data, b.data),
    }


def make_contiguous(groups: int, mean_rows: int, n: int, k: int, *, device: str = "cuda") -> Makers:
    sizes = group_sizes(groups, mean_rows)
    a = operands.random_rows(sum(sizes), k, device=device)
    b = operands.random_experts(groups, n, k, device=device)
    return {
        "fp8moe": lambda: plain_groups(a, b, sizes),
        "deep_gemm": lambda: adapters.deep_gemm_contiguous(a, b, sizes),
        "cublas_one_scale": lambda: adapters.cublas_one_scale(a.data, b.data[0]),
    }


def plain_groups(a: FP8Tensor, b: FP8Tensor, sizes: Sequence[int]) -> Call:
    """`grouped_gemm` of rows (R, K) in groups of these sizes."""
    offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=a.data.device)
    out = a.data.new_empty(len(a.data), b.data.shape[1], dtype=torch.bfloat16)
    return Call(partial(grouped_gemm, a, b, offsets, out=out), same)


def make_masked(
    groups: int, mean_rows: int, n: int, k: int, expected_m: int, *, max_m: int = 0, device: str = "cuda"
) -> Makers:
    """max_m: rows that a group has room for; 0: those of `shapes.room`."""
    max_m = max_m or shapes.room(mean_rows)
    sizes = group_sizes(groups, mean_rows)
    data = operands.random_rows(groups * max_m, k, device=device).data.view(groups, max_m, k)
    scale = empty_mn_major((groups, max_m, ceil_div(k, BLOCK)), device=device).uniform_(0.005, 0.015)
    a, b = FP8Tensor(data, scale), operands.random_experts(groups, n, k, device=device)
    masked_m = torch.tensor(sizes, dtype=torch.int32, device=device)
    rows = torch.cat([torch.arange(size) + max_m * group for group, size in enumerate(sizes)]).to(device)
    out = torch.empty(groups, max_m, n, dtype=torch.bfloat16, device=device)
    ours = partial(grouped_gemm_masked, a, b, masked_m, expected_m=expected_m, out=out)
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.flatten(0, 1)[rows]),
        "deep_gemm": lambda: adapters.deep_gemm_masked(a, b, masked_m, expected_m, rows),
    }


def make_along_k(groups: int, m: int, n: int, total_k: int, *, device: str = "cuda") -> Makers:
    ends = [0, *accumulate(group_sizes(groups, total_k))]
    offsets = [BLOCK * round(total_k / BLOCK * end / ends[-1]) for end in ends]
    a, b = (operands.random_rows(rows, total_k, device=device) for rows in (m, n))
    groups_there = torch.tensor(offsets, dtype=torch.int32, device=device)
    out = torch.zeros(groups, m, n, device=device)
    ours = partial(grouped_gemm_k, a, b, groups_there, out=out)
    sizes = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    return {
        "fp8moe": lambda: Call(partial(ours, accumulate=True), same),
        "deep_gemm": lambda: adapters.deep_gemm_k(a, b, sizes),
        "fp8moe_written": lambda: Call(ours, same),
    }


def make_mqa(queries: int, tokens: int, fill: bool, *, device: str = "cuda") -> Makers:
    q, weights = mqa_cases.quantized_queries(queries, HEADS, HEAD_DIM, device=device)
    kv = mqa_cases.quantized_keys(torch.randn(tokens, HEAD_DIM, device=device, dtype=torch.bfloat16))
    starts = torch.zeros(queries, dtype=torch.int32, device=device)
    ends = torch.arange(queries, dtype=torch.int32, device=device) + (tokens - queries + 1)
    seen = torch.arange(tokens, device=device) < ends[:, None]
    ours = partial(mqa_logits, q, kv, weights, starts, ends, fill_masked=fill)
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.masked_fill(~seen, 0)),
        "deep_gemm": lambda: adapters.deep_gemm_mqa(q, kv, weights, starts, ends, fill, seen),
    }


def make_paged(batch: int, context: int, next_n: int, *, device: str = "cuda") -> Makers:
    step = mqa_cases.Batch((context,) * batch, next_n, HEADS, HEAD_DIM, context)
    cache = mqa_cases.filled_cache(batch * mqa_cases.blocks_of(context), HEAD_DIM, device=device)
    table = mqa_cases.block_table(step, len(cache), device=device)
    q, weights = mqa_cases.quantized_queries(batch, next_n, HEADS, HEAD_DIM, device=device)
    visible = torch.tensor(step.visible, dtype=torch.int32, device=device).view(batch, next_n)
    seen = torch.arange(context, device=device) < visible.view(-1, 1)
    ours = partial(paged_mqa_logits, q, cache, weights, visible, table, max_context_len=context, fill_masked=False)
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.masked_fill(~seen, 0)),
        "deep_gemm": lambda: adapters.deep_gemm_paged(q, cache, weights, visible, table, context, seen),
    }


def peers_there(makers: Makers) -> Makers:
    """Those whose library is installed."""
    needs = {"deep_gemm": adapters.deep_gemms, "vllm": lambda: adapters.installed("vllm")}
    needs["transformers_bf16"] = lambda: adapters.installed("transformers")
    return {
        name: make
        for name, make in makers.items()
        if all(there() for peer, there in needs.items() if name.startswith(peer))
    }


def sentence(error: Exception) -> str:
    """The beginning of an exception, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:100]


def compared(makers: Makers, largest: float, row: dict, then: Callable[[Callable], Callable] | None = None) -> dict:
    """The calls of those whose results agree with ours, by name; `row` gets the others' errors and all differences.

    then: what is timed in place of a call that has run, such as its CUDA graph.
    """
    calls: dict[str, Callable] = {}
    expected = None
    for name, make in peers_there(makers).items():
        try:
            run, result = make()
            out = run()
            if name == next(iter(makers)):
                expected = result(out).double()
            elif result is not None:
                difference = row["difference"][name] = operands.relative_error(result(out), expected)
                if not difference <= largest:
                    raise ValueError(f"its result is {difference:.2g} from ours, must be <= {largest}")
            calls[name] = run if then is None else then(run)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            row["failed"][name] = sentence(error)
    return calls


def measure_kernels(makers: Makers, largest: float) -> dict:
    """Times of kernels."""
    row: dict = {"us": {}, "difference": {}, "failed": {}}
    calls = compared(makers, largest, row)
    timed = timing.measure_in_turn(list(calls.values()), repeats=REPEATS, rest=REST_S)
    row["us"] = {name: one.median_us for name, one in zip(calls, timed, strict=True)}
    return row


def measure_host(m: int, n: int, k: int, *, device: str = "cuda") -> dict:
    """CPU time of eager calls into memory that is there."""
    row: dict = {"us": {}, "difference": {}, "failed": {}}
    makers = make_gemm(m, n, k, device=device)
    calls = compared({name: makers[name] for name in ("fp8moe", "deep_gemm")}, MAX_DIFFERENCE, row)
    row["us"] = {name: statistics.median(timing.host_times(call, HOST_BATCHES)) for name, call in calls.items()}
    return row


@functools.lru_cache(maxsize=1)
def layer_of(model: Model, device: str) -> GroupedExperts:
    return operands.experts_layer(model, device=device)


@functools.lru_cache(maxsize=1)
def bfloat16_of(model: Model, device: str) -> torch.nn.Module:
    """transformers' experts with the values of `layer_of`."""
    return adapters.dequantized_experts(layer_of(model, device), model)


def route(model: Model, tokens: int, routing: str) -> Tensor:
    """Experts (tokens, top_k) of tokens: "random", or "skewed" with SKEW of all assignments on the first expert."""
    if routing == "random":
        return operands.route(model, tokens)
    rows = tokens * model.top_k
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    others = 1 + order % (model.experts - 1)
    return torch.where(order < round(SKEW * rows), 0, others).view(tokens, model.top_k)


def both(first: Call, second: Call) -> Call:
    """The two GEMMs of a layer, each on operands of its own."""

    def results(outs: tuple[Any, Any]) -> Tensor:
        parts = [call.result(out) for call, out in zip((first, second), outs, strict=True)]
        some = [part[:: ceil_div(len(part), SAMPLED_ROWS)].double() for part in parts]
        return torch.cat([(part / part.norm()).flatten() for part in some])

    return Call(lambda: (first.run(), second.run()), results)


def make_layer(model: str, tokens: int, routing: str = "random", *, device: str = "cuda") -> Makers:
    """A whole layer, and ("_two_gemms") grouped GEMMs of the same sizes alone."""
    shape = MODELS[model]
    layer = layer_of(shape, device)
    x, index, weights = operands.experts_inputs(shape, route(shape, tokens, routing), device=device)
    sizes = torch.bincount(index.flatten().cpu(), minlength=shape.experts).tolist()
    up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    pairs = [
        (operands.random_rows(sum(sizes), weight.data.shape[-1], device=device), weight)
        for weight in (FP8Tensor(up, up_scale), FP8Tensor(down, down_scale))
    ]
    return {
        "fp8moe": lambda: Call(partial(layer, x, index, weights), same),
        "vllm": lambda: adapters.vllm_experts(layer, x, index, weights),
        "transformers_bf16": lambda: Call(partial(bfloat16_of(shape, device), x, index, weights), same),
        "fp8moe_two_gemms": lambda: both(*(plain_groups(a, b, sizes) for a, b in pairs)),
        "deep_gemm_two_gemms": lambda: both(*(adapters.deep_gemm_contiguous(a, b, sizes) for a, b in pairs)),
    }


@torch.no_grad()
def measure_layer(model: str, tokens: int, routing: str = "random", *, device: str = "cuda") -> dict:
    """A whole layer as a CUDA graph, and kernels: those of our layer, and its GEMMs alone."""
    row: dict = {"us": {}, "difference": {}, "failed": {}}
    makers = make_layer(model, tokens, routing, device=device)
    whole, alone = ({k: v for k, v in makers.items() if k.endswith("_two_gemms") == kind} for kind in (False, True))
    graphs = compared(whole, MAX_LAYER_DIFFERENCE, row, timing.capture)
    elapsed = timing.elapsed_in_turn(list(graphs.values()), repeats=REPEATS, rest=REST_S)
    row["us"] |= dict(zip(graphs, elapsed, strict=True))
    row["experts_in_use"] = len(route(MODELS[model], tokens, routing).unique())
    try:
        gemms = compared(alone, MAX_DIFFERENCE, row)
        ours, *timed = timing.measure_in_turn([graphs["fp8moe"], *gemms.values()], repeats=REPEATS, rest=REST_S)
        row["us"] |= {name: one.median_us for name, one in zip(gemms, timed, strict=True)}
        row["kernels"] = [[name, *place] for name, place in zip(ours.kernels, ours.places_us, strict=True)]
        row["us"]["gemms_in_layer"] = gemms_in_layer(row["kernels"])
    except Exception as error:
        row["failed"]["gemms"] = sentence(error)
    return row


def gemms_in_layer(kernels: Sequence[tuple[str, float, float]]) -> float:
    """From the start of GEMM 1 to the end of GEMM 2; kernels: names, starts, ends. RuntimeError unless two."""
    found = [(start, end) for name, start, end in kernels if re.match(r"gemm\b", name)]
    if len(found) != 2:
        raise RuntimeError(f"expected two GEMMs in the layer, recorded {', '.join(name for name, *_ in kernels)}")
    return found[1][1] - found[0][0]


def _masked(sizes: Mapping[str, int]) -> Sequence[tuple[int, int]]:
    """(n, k) that are measured of masked groups of so many rows."""
    return {1024: GROUPED[:1], 192: GROUPED[1:]}.get(sizes["mean_rows"], GROUPED)


CASES = [
    *(
        Case(what, sizes)
        for what, many in {
            "gemm": shapes.GEMM,
            "contiguous": [one for one in shapes.GROUPED if one["groups"] < 256 and (one["n"], one["k"]) in GROUPED],
            "masked": [one for one in shapes.MASKED if one["groups"] < 256 and (one["n"], one["k"]) in _masked(one)],
            "along_k": shapes.ALONG_K,
            "mqa_logits": [{**sizes, "fill": fill} for sizes in shapes.SCORES for fill in (True, False)],
            "paged_mqa_logits": shapes.PAGED_SCORES,
            "layer": [
                {"model": model, "tokens": tokens, **more}
                for model in MODELS
                for tokens in TOKENS
                for more in ({}, *([{"routing": "skewed"}] if (model, tokens) == SKEWED else []))
            ],
            "host": [{"m": 1, "n": n, "k": k} for n, k in ((7168, 2048), (4096, 7168))],
        }.items()
        for sizes in many
    )
]


MAKE: dict[str, Callable[..., Makers]] = {
    "gemm": make_gemm,
    "contiguous": make_contiguous,
    "masked": make_masked,
    "along_k": make_along_k,
    "mqa_logits": make_mqa,
    "paged_mqa_logits": make_paged,
    "layer": make_layer,
    "host": make_gemm,
}
MEASURE: dict[str, Callable[..., dict]] = {"layer": measure_layer, "host": measure_host}
"""Those that are not measured by `measure_kernels`."""
WHOLE_MODEL = [
    Case(what, {"batch": batch, "prompt": prompt})
    for what, sizes in {"decode": STEPS, "prefill": (PREFILL,)}.items()
    for batch, prompt in sizes
]


def whole_model(tree: Path) -> list[dict]:
    """Rows of `benchmarks.decode` with the fp8moe and the benchmarks of a checkout, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        batches = map(str, (batch for batch, _ in STEPS))
        _run_in(tree, "benchmarks.decode", "--batch", *batches, "--prompt", str(STEPS[0][1]), "--out", out)
        return json.loads((Path(out) / "decode.json").read_text())["rows"]


def vllm_engine(*options: str) -> list[dict]:
    """The same rows of vLLM's engine, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        file = Path(out) / "rows.json"
        _run_in(ROOT, "benchmarks.vllm_engine", str(file), *options)
        return json.loads(file.read_text())


def _run_in(tree: Path, module: str, *arguments: str) -> None:
    """Runs a module of a checkout. If it fails, the end of what it printed is printed, and RuntimeError raised."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path, "KINETO_LOG_LEVEL": "99"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        raise RuntimeError(f"{module} ended with exit code {done.returncode}: {done.stdout.splitlines()[-1:]}")


class File:
    """The rows of a run, written after each of them."""

    def __init__(self, path: Path, head: Mapping[str, Any]):
        """Rows that the file has stay if it has the same digest, card and versions; if it has others, it says so.

        Of fp8moe it is the digest that counts, not the version's name.
        """
        self.path = path
        stored = json.loads(path.read_text()) if path.exists() else {}
        known = stored.get("versions", {})
        both = (known.keys() & head["versions"].keys()) - {"fp8moe"}
        changed = {name for name in both if known[name] != head["versions"][name]}
        if stored and (stored["digest"] != head["digest"] or changed):
            what = ", ".join(sorted(changed)) or "the digest"
            print(f"{path}: the rows there are of other sources or versions ({what}) and are dropped", flush=True)
            stored, known = {}, {}
        self.rows: dict[str, dict] = {row["case"]: row for row in stored.get("rows", ())}
        self.head = {**stored, **head, "versions": known | head["versions"]}

    def put(self, row: dict) -> None:
        self.rows[row["case"]] = row
        order = {case.name: place for place, case in enumerate([*CASES, *WHOLE_MODEL])}
        rows = sorted(self.rows.values(), key=lambda row: order.get(row["case"], len(order)))
        write_json(self.path, self.head | {"rows": rows})
        print(line(row), flush=True)


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    unit = "us" if "us" in row else "ms"
    times = [f"{name} {format_value(value)}" for name, value in row[unit].items()]
    failed = [f"{name} failed: {why}" for name, why in row["failed"].items()]
    return f"{row['case']}: {', '.join(times)} {unit}" + "".join(f"\n    {one}" for one in failed)


@torch.no_grad()
def run_once(chosen: Sequence[Case]) -> None:
    """Runs cases so that their kernels are compiled, and kept on the disk; what fails will fail where it counts too."""
    for case in chosen:
        for name, make in peers_there(MAKE[case.what](**case.sizes)).items():
            if name != "transformers_bf16":  # which compiles nothing, and has no room beside others
                with suppress(Exception):
                    make().run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def compile_ahead(chosen: Sequence[Case]) -> None:
    """`run_once` in processes side by side, those of a model's layers in one: most of a first run is compiling."""
    begin = time.perf_counter()
    parts: dict[tuple, list[str]] = {}
    for place, case in enumerate(chosen):
        parts.setdefault((case.what, case.sizes.get("model", place % PROCESSES.get(case.what, 1))), []).append(
            case.name
        )
    command_line = [sys.executable, "-m", "benchmarks.peers", "--once", "--only"]
    patterns = ["^(" + "|".join(map(re.escape, names)) + ")$" for names in parts.values()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = [*pool.map(lambda one: subprocess.run([*command_line, one], cwd=ROOT).returncode, patterns)]
    failed = f", {len(done) - done.count(0)} processes failed" if any(done) else ""
    print(f"compiled ahead: {time.perf_counter() - begin:.0f} s{failed}", flush=True)


def measure(chosen: Sequence[Case], file: File) -> None:
    """Measures cases; one that raises is stored with its error, and the others still run."""
    for case in chosen:
        begin = time.perf_counter()
        try:
            if case.what in MEASURE:
                row = MEASURE[case.what](**case.sizes)
            else:
                row = measure_kernels(MAKE[case.what](**case.sizes), MAX_DIFFERENCE)
        except Exception as error:
            row = {"us": {}, "difference": {}, "failed": {"case": sentence(error)}}
        file.put(case.row | row)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # also what a graph had for itself
        if (spent := time.perf_counter() - begin) > 5:
            print(f"    {spent:.0f} s", flush=True)


def measure_whole_models(file: File, sources: Mapping[str, Callable[[], list[dict]]]) -> None:
    """Runs each source and puts what it measured into the rows of WHOLE_MODEL."""
    for name, source in sources.items():
        begin = time.perf_counter()
        found, why = [], "it did not measure this"
        try:
            found = source()
        except Exception as error:
            why = sentence(error)
        measured = {tuple(row.get(key) for key in ("what", "batch", "prompt")): row for row in found}
        for case in WHOLE_MODEL:
            empty = {"ms": {}, "tokens_s": {}, "kernels_a_step": {}, "failed": {}}
            row = file.rows.get(case.name) or case.row | empty
            for values in (row[key] for key in empty):
                values.pop(name, None)
            if one := measured.get((case.what, *case.sizes.values())):
                row["ms"][name], row["tokens_s"][name] = one["ms"], one["tokens_s"]
                if "kernels" in one:
                    row["kernels_a_step"][name] = one["kernels"]
                if one.get("compiled"):
                    row["failed"][name] = f"{one['compiled']} kernels were compiled while it was measured"
            else:
                row["failed"][name] = why
            file.put(row)
        print(f"    {name}: {time.perf_counter() - begin:.0f} s", flush=True)


def clocks() -> dict[str, str]:
    """Clocks and power limit of the GPU, as nvidia-smi says them."""
    fields = ("clocks.max.sm", "clocks.max.memory", "clocks.sm", "power.limit", "temperature.gpu")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return dict(zip(fields, map(str.strip, done.stdout.split(",")), strict=True))


def wanted(names: Sequence[str], pattern: str | None, there: Mapping[str, dict]) -> Iterator[str]:
    """Those that the pattern names, or without one those that the file does not have whole."""
    for name in names:
        if (
            re.search(pattern, name)
            if pattern
            else name not in there or {"case", "gemms"} & there[name]["failed"].keys()
        ):
            yield name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="fp8moe beside other libraries")
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name, as it is printed, matches this")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--once", action="store_true", help="run the cases without timing, to compile their kernels")
    parser.add_argument("--whole-model", action="store_true", help="decode steps and prefill instead of kernels")
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help="of another revision, with --whole-model")
    args = parser.parse_args(argv)
    if args.against and not args.whole_model:
        parser.error("--against needs --whole-model")
    command.start()
    if args.once:
        run_once([case for case in CASES if re.search(args.only or "", case.name)])
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    head = {
        "digest": digest(ROOT),
        "date": now,
        "versions": command.versions() | adapters.versions(),
        "clocks": clocks(),
    }
    head["copy_tbps"] = roofline.copy_tbps()
    file = File(args.out, head)
    if not args.whole_model:
        chosen = set(wanted([case.name for case in CASES], args.only, file.rows))
        cases = [case for case in CASES if case.name in chosen]
        compile_ahead(cases)
        measure(cases, file)
        return
    sources: dict[str, Callable[[], list[dict]]] = {"fp8moe": partial(whole_model, ROOT)}
    if args.against:
        file.head |= {"before": {"directory": args.against.resolve().name, "digest": digest(args.against)}}
        sources["before"] = partial(whole_model, args.against.resolve())
    if adapters.installed("vllm"):
        sources["vllm"] = vllm_engine
        if adapters.installed("fp8moe_vllm"):
            sources["vllm_fp8moe"] = partial(vllm_engine, "--quantization", "fp8moe")

    def asked(name: str) -> bool:
        if args.only:
            return re.search(args.only, name) is not None
        rows = [file.rows.get(case.name, {}) for case in WHOLE_MODEL]
        return name == "before" or not all(name in row.get("ms", {}) for row in rows)

    measure_whole_models(file, {name: source for name, source in sources.items() if asked(name)})


if __name__ == "__main__":
    main()
