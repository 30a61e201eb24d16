"""fp8moe beside other libraries for the same work: `python -m benchmarks.peers [--only PATTERN] [--out FILE]`.

One process runs each case with every installed library, on the same operands and in turn: each repeat runs ours, then
each of the others, each after a fill that empties the L2 cache. Times are medians in microseconds of the kernels of a
call. `layer` instead times replays of CUDA graphs, from before a replay to after it; `host` is CPU time of an eager
call.

- `deep_gemm`: DeepGEMM. Outside the timed call, contiguous groups are padded to 128 rows, and the metadata of paged
  scores is computed.
- `cublas_block`: torch.nn.functional.scaled_mm with scales of 1x128 and 128x128. `cublas_one_scale`: cuBLAS with one
  scale per operand, an upper bound that block scales cannot reach; for groups, one matrix with as many rows.
- `vllm`: vLLM's Triton experts. `transformers_bf16`: transformers' experts in bfloat16 with "grouped_mm".
- `layer` also has kernel times: `gemms_in_layer`, from the start of our GEMM 1 in the layer to the end of GEMM 2;
  `fp8moe_two_gemms` and `deep_gemm_two_gemms`, grouped GEMMs of the same sizes alone; `kernels`, start and end of each
  kernel of our layer.

Results are compared with ours: `difference`. A call whose result is off counts as failed, as does a call that raises.

With `--whole-model` instead: decode steps and a prefill of a model of Qwen3-30B-A3B's sizes with random weights, in
milliseconds: this checkout (`fp8moe`), another revision (`--against DIRECTORY`: `before`), and, if installed, vLLM's
engine (`vllm`) and vLLM's engine with integrations/vllm (`vllm_fp8moe`). They run one after another, in separate
processes.

The file also has the digest of what the GPU runs, the card, clocks and versions. A later run with the same digest, card
and versions keeps the file's rows, except those that --only selects, so a run can be made in pieces.
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

from benchmarks import adapters, calls, operands, report, roofline, shapes, timing
from benchmarks.adapters import Call
from benchmarks.calls import ceil_div, group_sizes
from benchmarks.report import ROOT, digest, format_value, versions, write_json
from benchmarks.shapes import MODELS, Model
from fp8moe import FP8Tensor, GroupedExperts, grouped_gemm

FILE = ROOT / "validation" / "peers.json"
REPEATS, REST_S = 12, 0.2
HOST_BATCHES = 10
PROCESSES = {"gemm": 5, "contiguous": 3, "masked": 3}  # that compile in parallel ahead of the run; 1 for other kinds
SAMPLED_ROWS = 1024  # rows of a layer's GEMMs that are compared
MAX_DIFFERENCE = 1e-2  # relative Frobenius norm
MAX_LAYER_DIFFERENCE = 0.1  # others round activations between the GEMMs to FP8 differently, or not at all
TOKENS = (1, 8, 64, 512, 2048, 8192)
GROUPED = ((4096, 7168), (7168, 2048))  # (n, k) of grouped GEMMs: few, because DeepGEMM compiles for seconds for each
SKEW, SKEWED = 0.6, ("dsv3_ep8", 2048)  # share of assignments on one expert; the model and tokens this is measured with
STEPS = ((1, 512), (8, 512), (64, 512))  # (sequences, tokens of each prompt)
PREFILL = (4, 4096)

Makers = dict[str, Callable[[], Call]]
"""Functions that prepare the calls to be timed, by implementation; "fp8moe" comes first."""


class Case(NamedTuple):
    """A measurement: a key of `MAKE`, and its sizes."""

    what: str
    sizes: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.what, *(f"{name}={value}" for name, value in self.sizes.items())])

    @property
    def row(self) -> dict:
        """Return the columns that identify the measurement in its row."""
        return {"case": self.name, "what": self.what, **self.sizes}


def same(out: Tensor) -> Tensor:
    return out


def case_of(op: str, device: str, **sizes: Any) -> partial:
    """Make our call of a case of `benchmarks.calls`; the other libraries use its operands too."""
    return calls.build(calls.Case(op, sizes), calls.Operands(device))


def make_gemm(m: int, n: int, k: int, *, device: str = "cuda") -> Makers:
    """Make dense GEMMs: ours, DeepGEMM's and cuBLAS's."""
    ours = case_of("gemm", device, m=m, n=n, k=k)
    a, b = ours.args
    return {
        "fp8moe": lambda: Call(ours, same),
        "deep_gemm": lambda: adapters.deep_gemm(a, b),
        "cublas_block": lambda: adapters.cublas_block(a, b),
        "cublas_one_scale": lambda: adapters.cublas_one_scale(a.data, b.data),
    }


def make_contiguous(groups: int, mean_rows: int, n: int, k: int, *, device: str = "cuda") -> Makers:
    """Make contiguous grouped GEMMs; cuBLAS multiplies one matrix with as many rows."""
    a, b, _ = case_of("grouped_gemm", device, groups=groups, mean_rows=mean_rows, n=n, k=k).args
    sizes = group_sizes(groups, mean_rows)
    return {
        "fp8moe": lambda: plain_groups(a, b, sizes),
        "deep_gemm": lambda: adapters.deep_gemm_contiguous(a, b, sizes),
        "cublas_one_scale": lambda: adapters.cublas_one_scale(a.data, b.data[0]),
    }


def plain_groups(a: FP8Tensor, b: FP8Tensor, sizes: Sequence[int]) -> Call:
    """Make `grouped_gemm` of rows (R, K) in groups of the given sizes."""
    offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=a.data.device)
    out = a.data.new_empty(len(a.data), b.data.shape[1], dtype=torch.bfloat16)
    return Call(partial(grouped_gemm, a, b, offsets, out=out), same)


def make_masked(
    groups: int, mean_rows: int, n: int, k: int, expected_m: int, *, max_m: int = 0, device: str = "cuda"
) -> Makers:
    """Make masked grouped GEMMs with space for max_m rows per group; 0: as `shapes.room` says."""
    sizes = {"groups": groups, "mean_rows": mean_rows, "max_m": max_m or shapes.room(mean_rows), "n": n, "k": k}
    ours = case_of("grouped_gemm_masked", device, **sizes, expected_m=expected_m)
    a, b, masked_m = ours.args
    rows = torch.cat([torch.arange(m) + sizes["max_m"] * group for group, m in enumerate(masked_m.tolist())]).to(device)
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.flatten(0, 1)[rows]),
        "deep_gemm": lambda: adapters.deep_gemm_masked(a, b, masked_m, expected_m, rows),
    }


def make_along_k(groups: int, m: int, n: int, total_k: int, *, device: str = "cuda") -> Makers:
    """Make weight gradients that are added to the result; "fp8moe_written" is ours without the addition."""
    ours = case_of("grouped_gemm_k", device, groups=groups, m=m, n=n, total_k=total_k, add=True)
    a, b, offsets = ours.args
    return {
        "fp8moe": lambda: Call(ours, same),
        "deep_gemm": lambda: adapters.deep_gemm_k(a, b, offsets.diff().tolist()),
        "fp8moe_written": lambda: Call(partial(ours, accumulate=False), same),
    }


def make_mqa(queries: int, tokens: int, fill: bool, *, device: str = "cuda") -> Makers:
    """Make causal index scores of the last `queries` tokens."""
    ours = case_of("mqa_logits", device, queries=queries, tokens=tokens, fill_masked=fill)
    seen = torch.arange(tokens, device=device) < ours.args[-1][:, None]
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.masked_fill(~seen, 0)),
        "deep_gemm": lambda: adapters.deep_gemm_mqa(*ours.args, fill, seen),
    }


def make_paged(batch: int, context: int, next_n: int, *, device: str = "cuda") -> Makers:
    """Make index scores over a paged cache; operands include the number of keys that each query sees."""
    made = case_of("paged_mqa_logits", device, batch=batch, context=context, next_n=next_n, fill_masked=False)
    q, cache, weights, _, table = made.args
    visible = torch.arange(context - next_n + 1, context + 1, dtype=torch.int32, device=device).repeat(batch, 1)
    seen = torch.arange(context, device=device) < visible.view(-1, 1)
    ours = partial(made.func, q, cache, weights, visible, table, **made.keywords)
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.masked_fill(~seen, 0)),
        "deep_gemm": lambda: adapters.deep_gemm_paged(q, cache, weights, visible, table, context, seen),
    }


def peers_there(makers: Makers) -> Makers:
    """Keep the implementations whose library is installed."""
    needs = {"deep_gemm": adapters.deep_gemms, "vllm": lambda: adapters.installed("vllm")}
    needs["transformers_bf16"] = lambda: adapters.installed("transformers")
    return {
        name: make
        for name, make in makers.items()
        if all(there() for peer, there in needs.items() if name.startswith(peer))
    }


def empty_row() -> dict:
    """Return a row without any times."""
    return {"us": {}, "difference": {}, "failed": {}}


def sentence(error: Exception) -> str:
    """Return the first 100 characters of an exception's type and text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:100]


def compared(makers: Makers, largest: float, row: dict, then: Callable[[Callable], Callable] | None = None) -> dict:
    """Return the calls whose results agree with ours, by name. Writes errors and differences to `row`.

    then: returns what is timed instead of the call, such as its CUDA graph. It gets the call after a first run.
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
    """Time the kernels of each call."""
    row = empty_row()
    calls = compared(makers, largest, row)
    timed = timing.measure_in_turn(list(calls.values()), repeats=REPEATS, rest=REST_S)
    row["us"] = {name: one.median_us for name, one in zip(calls, timed, strict=True)}
    return row


def measure_host(m: int, n: int, k: int, *, device: str = "cuda") -> dict:
    """Time the CPU in eager calls that write to preallocated memory."""
    row = empty_row()
    makers = make_gemm(m, n, k, device=device)
    calls = compared({name: makers[name] for name in ("fp8moe", "deep_gemm")}, MAX_DIFFERENCE, row)
    row["us"] = {name: statistics.median(timing.host_times(call, HOST_BATCHES)) for name, call in calls.items()}
    return row


@functools.lru_cache(maxsize=1)
def layer_of(model: Model, device: str) -> GroupedExperts:
    return calls.experts_layer(calls.Operands(device), model)


@functools.lru_cache(maxsize=1)
def bfloat16_of(model: Model, device: str) -> torch.nn.Module:
    """Make transformers' experts with the weights of `layer_of`, dequantized."""
    return adapters.dequantized_experts(layer_of(model, device), model)


def route(model: Model, tokens: int, routing: str) -> Tensor:
    """Choose experts (tokens, top_k): "random", or "skewed" with SKEW of all assignments on the first expert."""
    if routing == "random":
        return calls.route(model, tokens)
    rows = tokens * model.top_k
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    others = 1 + order % (model.experts - 1)
    return torch.where(order < round(SKEW * rows), 0, others).view(tokens, model.top_k)


def both(first: Call, second: Call) -> Call:
    """Make one call of the two GEMMs of a layer; each has its own operands."""

    def results(outs: tuple[Any, Any]) -> Tensor:
        parts = [call.result(out) for call, out in zip((first, second), outs, strict=True)]
        some = [part[:: ceil_div(len(part), SAMPLED_ROWS)].double() for part in parts]
        return torch.cat([(part / part.norm()).flatten() for part in some])

    return Call(lambda: (first.run(), second.run()), results)


def make_layer(model: str, tokens: int, routing: str = "random", *, device: str = "cuda") -> Makers:
    """Make the calls of a whole layer, and of only its two grouped GEMMs ("_two_gemms")."""
    shape = MODELS[model]
    layer = layer_of(shape, device)
    x, index, weights = calls.layer_inputs(shape, route(shape, tokens, routing), device)
    sizes = torch.bincount(index.flatten().cpu(), minlength=shape.experts).tolist()
    up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    make = calls.Operands(device, seed=2)
    pairs = [
        (make.rows(sum(sizes), weight.data.shape[-1]), weight)
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
    """Time a whole layer as a CUDA graph, the kernels of our layer, and its two GEMMs alone."""
    row = empty_row()
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
    """Return the time from the start of GEMM 1 to the end of GEMM 2. RuntimeError unless there are exactly two."""
    found = [(start, end) for name, start, end in kernels if re.match(r"gemm\b", name)]
    if len(found) != 2:
        raise RuntimeError(f"expected two GEMMs in the layer, recorded {', '.join(name for name, *_ in kernels)}")
    return found[1][1] - found[0][0]


def _masked(sizes: Mapping[str, int]) -> Sequence[tuple[int, int]]:
    """Return the (n, k) to measure for masked groups of these sizes."""
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
"""Functions that measure a kind of case; all other kinds use `measure_kernels`."""
WHOLE_MODEL = [
    Case(what, {"batch": batch, "prompt": prompt})
    for what, sizes in {"decode": STEPS, "prefill": (PREFILL,)}.items()
    for batch, prompt in sizes
]


def whole_model(tree: Path) -> list[dict]:
    """Run `benchmarks.decode` of a checkout in another process; return its rows."""
    with tempfile.TemporaryDirectory() as out:
        batches = map(str, (batch for batch, _ in STEPS))
        _run_in(tree, "benchmarks.decode", "--batch", *batches, "--prompt", str(STEPS[0][1]), "--out", out)
        return json.loads((Path(out) / "decode.json").read_text())["rows"]


def vllm_engine(*options: str) -> list[dict]:
    """Run `benchmarks.vllm_engine` in another process; return its rows, which are like those of `whole_model`."""
    with tempfile.TemporaryDirectory() as out:
        file = Path(out) / "rows.json"
        _run_in(ROOT, "benchmarks.vllm_engine", str(file), *options)
        return json.loads(file.read_text())


def _run_in(tree: Path, module: str, *arguments: str) -> None:
    """Run a module of a checkout. On failure, print the end of its output and raise RuntimeError."""
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
    """The stored rows of a run; the file is rewritten after each row."""

    def __init__(self, path: Path, head: Mapping[str, Any]):
        """Keep the stored rows if digest, card and versions are the same; fp8moe's version may differ."""
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
    """Return a row as text: times, then failures."""
    unit = "us" if "us" in row else "ms"
    times = [f"{name} {format_value(value)}" for name, value in row[unit].items()]
    failed = [f"{name} failed: {why}" for name, why in row["failed"].items()]
    return f"{row['case']}: {', '.join(times)} {unit}" + "".join(f"\n    {one}" for one in failed)


@torch.no_grad()
def run_once(chosen: Sequence[Case]) -> None:
    """Run cases once so that their kernels are in the disk cache; errors are ignored, as they recur when measured."""
    for case in chosen:
        for name, make in peers_there(MAKE[case.what](**case.sizes)).items():
            if name != "transformers_bf16":  # it compiles nothing, and needs too much memory
                with suppress(Exception):
                    make().run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def compile_ahead(chosen: Sequence[Case]) -> None:
    """Call `run_once` in parallel processes, since it is mostly compilation; a model's layers share one process."""
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
    """Measure cases. If one raises, its error is stored and the others still run."""
    for case in chosen:
        begin = time.perf_counter()
        try:
            if case.what in MEASURE:
                row = MEASURE[case.what](**case.sizes)
            else:
                row = measure_kernels(MAKE[case.what](**case.sizes), MAX_DIFFERENCE)
        except Exception as error:
            row = empty_row() | {"failed": {"case": sentence(error)}}
        file.put(case.row | row)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # also the memory pools of graphs
        if (spent := time.perf_counter() - begin) > 5:
            print(f"    {spent:.0f} s", flush=True)


def measure_whole_models(file: File, sources: Mapping[str, Callable[[], list[dict]]]) -> None:
    """Run each source and put what it measured into the rows of WHOLE_MODEL."""
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
    """Return the GPU's clocks, power limit and temperature, as nvidia-smi prints them."""
    fields = ("clocks.max.sm", "clocks.max.memory", "clocks.sm", "power.limit", "temperature.gpu")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return dict(zip(fields, map(str.strip, done.stdout.split(",")), strict=True))


def wanted(names: Sequence[str], pattern: str | None, there: Mapping[str, dict]) -> Iterator[str]:
    """Yield names that match the pattern; without a pattern, names that the file lacks or that failed."""
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
    report.start()
    if args.once:
        run_once([case for case in CASES if re.search(args.only or "", case.name)])
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    head = {
        "digest": digest(ROOT),
        "date": now,
        "versions": versions() | adapters.versions(),
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
