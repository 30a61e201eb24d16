"""fp8moe beside other libraries for the same work: `python -m benchmarks.peers [--only PATTERN] [--out FILE]`.

One process runs each case with every installed library, on the same operands and in turn: each repeat runs fp8moe, then
each other library, and before each call a fill empties the L2 cache. Times are medians in microseconds of the kernels
of a call. Exceptions: for `layer`, times are of replays of CUDA graphs, from before a replay to after it; for `host`,
CPU times of eager calls.

- `deep_gemm`: DeepGEMM. Before timing, contiguous groups are padded to 128 rows, and the metadata of paged indexer
  logits is computed.
- `cublas_block`: torch.nn.functional.scaled_mm with scales of 1x128 and 128x128. `cublas_one_scale`: cuBLAS with one
  scale per operand, an upper bound of speed that GEMMs with block scales cannot reach. For grouped GEMMs, cuBLAS
  multiplies one matrix with the rows of all groups.
- `vllm`: vLLM's Triton experts. `transformers_bf16`: transformers' experts in bfloat16 with "grouped_mm".
- `layer` also has kernel times. `gemms_in_layer`: time from the start of GEMM 1 in our layer to the end of GEMM 2.
  `fp8moe_two_gemms` and `deep_gemm_two_gemms`: grouped GEMMs of the same sizes alone. `kernels`: start and end of each
  kernel of our layer.

`difference`: relative difference of each library's result from ours. A call counts as failed if it raises or if its
result differs too much.

- `four_bits` compares CUDA graphs of a layer in FP8, with random weights of its own, and in four bits: ours in MXFP4
  and NVFP4 (`mxfp4`, `nvfp4`), and Humming's GEMMs in MXFP4 with FP8 activations (`humming`), without sorting and
  weighted sum. `gemms_in_mxfp4` is as `gemms_in_layer`.

- `training` compares forward and backward of experts with all gradients, as CUDA graphs: ours in FP8 with bfloat16
  masters, quantized in the pass, and SonicMoE's in bfloat16 (`sonic`), behind its router. `fp8moe_shared` is a pass of
  ours less three quarters of the time of the quantization alone, which four micro-batches share. Names with `_forward`
  are forwards alone. `kept_bytes` and `peak_bytes` are those of `benchmarks.training`; `error` is the largest relative
  error of output and gradients, against float32. SonicMoE's kernels take minutes to compile and tune in a first pass.

With `--whole-model` instead: decode steps and a prefill of models with random weights, in milliseconds. They run one
after another, in separate processes, which --only selects by model and name, such as "gpt-oss-20b vllm":

- Qwen3-30B-A3B's sizes: this checkout with experts in FP8 (`fp8moe`) and in MXFP4 (`mxfp4`), another revision in FP8
  (`--against DIRECTORY`: `before`), and, if installed, vLLM's engine in FP8 (`vllm`), also with integrations/vllm
  (`vllm_fp8moe`).
- GPT-OSS-20b's sizes, experts in MXFP4: this checkout (`mxfp4`) and vLLM's engine (`vllm`).

The file also has the digest of what the GPU runs, the card, clocks and versions. A later run with the same digest, card
and versions keeps the file's rows, except those that --only selects, so a run can be made in pieces. A row has the
times of one run: a run that measures a whole model drops the times that other runs have put into the model's rows.
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

from benchmarks import adapters, calls, operands, report, roofline, shapes, timing, training
from benchmarks.adapters import Call
from benchmarks.calls import ceil_div, group_sizes
from benchmarks.report import ROOT, digest, format_value, versions, write_json
from benchmarks.shapes import FOUR_BITS, MODELS, QWEN, Model
from benchmarks.training import Pass
from fp8moe import FP8Tensor, GroupedExperts, PackedTensor, grouped_gemm, quantize_128x128, quantize_mxfp4
from fp8moe.quant.packed import quantize_nvfp4

FILE = ROOT / "validation" / "peers.json"
REPEATS, REST_S = 12, 0.2
HOST_BATCHES = 10
# Kind of case -> processes that compile its kernels in parallel before the run; 1 for other kinds
PROCESSES = {"gemm": 5, "contiguous": 3, "masked": 3}
SAMPLED_ROWS = 1024  # rows that are compared in the result of each of a layer's GEMMs
MAX_DIFFERENCE = 1e-2  # limit of the relative Frobenius norm of the difference from our result
# The same limit for layers. It is larger, because other libraries round the activations between the two GEMMs
# differently or do not round them.
MAX_LAYER_DIFFERENCE = 0.1
TOKENS = (1, 8, 64, 512, 2048, 8192)
GROUPED = ((4096, 7168), (7168, 2048))  # (n, k) of grouped GEMMs; few, because DeepGEMM takes seconds to compile each
# SKEW: the share of assignments to one expert in skewed routing. SKEWED: (model, tokens) of the case with this routing
SKEW, SKEWED = 0.6, ("dsv3_ep8", 2048)
FORMATS = {QWEN: {"fp8moe": "fp8", "mxfp4": "mxfp4"}, "gpt-oss-20b": {"mxfp4": "mxfp4"}}
"""Maps whole models to what this checkout measures: names in rows, and formats of experts."""
STEPS = ((1, 512), (8, 512), (64, 512))  # decode steps: (sequences, prompt tokens of each)
PREFILL = (4, 4096)

Makers = dict[str, Callable[[], Call]]
"""Maps the name of each implementation to a function that prepares its call; "fp8moe" comes first."""


class Case(NamedTuple):
    """A measurement: its kind, which is a key of `MAKE`, and its sizes."""

    what: str
    sizes: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.what, *(f"{name}={value}" for name, value in self.sizes.items())])

    @property
    def row(self) -> dict:
        """Return the columns that identify the measurement in a row of results."""
        return {"case": self.name, "what": self.what, **self.sizes}


def same(out: Tensor) -> Tensor:
    return out


def case_of(op: str, device: str, **sizes: Any) -> partial:
    """Build fp8moe's call of a case of `benchmarks.calls`; the other libraries use the call's operands too."""
    return calls.build(calls.Case(op, sizes), calls.Operands(device))


def make_gemm(m: int, n: int, k: int, *, device: str = "cuda") -> Makers:
    """Make the dense GEMMs of fp8moe, DeepGEMM and cuBLAS."""
    ours = case_of("gemm", device, m=m, n=n, k=k)
    a, b = ours.args
    return {
        "fp8moe": lambda: Call(ours, same),
        "deep_gemm": lambda: adapters.deep_gemm(a, b),
        "cublas_block": lambda: adapters.cublas_block(a, b),
        "cublas_one_scale": lambda: adapters.cublas_one_scale(a.data, b.data),
    }


def make_contiguous(groups: int, mean_rows: int, n: int, k: int, *, device: str = "cuda") -> Makers:
    """Make contiguous grouped GEMMs; cuBLAS instead multiplies one matrix with the rows of all groups."""
    a, b, _ = case_of("grouped_gemm", device, groups=groups, mean_rows=mean_rows, n=n, k=k).args
    sizes = group_sizes(groups, mean_rows)
    return {
        "fp8moe": lambda: plain_groups(a, b, sizes),
        "deep_gemm": lambda: adapters.deep_gemm_contiguous(a, b, sizes),
        "cublas_one_scale": lambda: adapters.cublas_one_scale(a.data, b.data[0]),
    }


def plain_groups(a: FP8Tensor, b: FP8Tensor, sizes: Sequence[int]) -> Call:
    """Make a call of `grouped_gemm` on rows (R, K) in groups of the given sizes."""
    offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=a.data.device)
    out = a.data.new_empty(len(a.data), b.data.shape[1], dtype=torch.bfloat16)
    return Call(partial(grouped_gemm, a, b, offsets, out=out), same)


def make_masked(
    groups: int, mean_rows: int, n: int, k: int, expected_m: int, *, max_m: int = 0, device: str = "cuda"
) -> Makers:
    """Make masked grouped GEMMs. max_m: rows of space in each group; 0: as `shapes.room` says."""
    sizes = {"groups": groups, "mean_rows": mean_rows, "max_m": max_m or shapes.room(mean_rows), "n": n, "k": k}
    ours = case_of("grouped_gemm_masked", device, **sizes, expected_m=expected_m)
    a, b, masked_m = ours.args
    rows = torch.cat([torch.arange(m) + sizes["max_m"] * group for group, m in enumerate(masked_m.tolist())]).to(device)
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.flatten(0, 1)[rows]),
        "deep_gemm": lambda: adapters.deep_gemm_masked(a, b, masked_m, expected_m, rows),
    }


def make_along_k(groups: int, m: int, n: int, total_k: int, *, device: str = "cuda") -> Makers:
    """Make GEMMs with groups along K, which compute weight gradients of experts and add them to the result.

    "fp8moe_written" is our GEMM without the addition.
    """
    ours = case_of("grouped_gemm_k", device, groups=groups, m=m, n=n, total_k=total_k, add=True)
    a, b, offsets = ours.args
    return {
        "fp8moe": lambda: Call(ours, same),
        "deep_gemm": lambda: adapters.deep_gemm_k(a, b, offsets.diff().tolist()),
        "fp8moe_written": lambda: Call(partial(ours, accumulate=False), same),
    }


def make_mqa(queries: int, tokens: int, fill: bool, *, device: str = "cuda") -> Makers:
    """Make indexer logits of the last `queries` tokens with a causal mask."""
    ours = case_of("mqa_logits", device, queries=queries, tokens=tokens, fill_masked=fill)
    seen = torch.arange(tokens, device=device) < ours.args[-1][:, None]
    return {
        "fp8moe": lambda: Call(ours, lambda out: out.masked_fill(~seen, 0)),
        "deep_gemm": lambda: adapters.deep_gemm_mqa(*ours.args, fill, seen),
    }


def make_paged(batch: int, context: int, next_n: int, *, device: str = "cuda") -> Makers:
    """Make indexer logits over a paged cache; an operand holds the number of keys that each query sees."""
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
    """Return the implementations whose library is installed."""
    needs = {"deep_gemm": adapters.deep_gemms, "vllm": lambda: adapters.installed("vllm")}
    needs["transformers_bf16"] = lambda: adapters.installed("transformers")
    needs |= {"humming": lambda: adapters.installed("humming"), "sonic": lambda: adapters.installed("sonicmoe")}
    return {
        name: make
        for name, make in makers.items()
        if all(there() for peer, there in needs.items() if name.startswith(peer))
    }


def empty_row() -> dict:
    """Return the result columns of a row, still empty."""
    return {"us": {}, "difference": {}, "failed": {}}


def sentence(error: Exception) -> str:
    """Return the first 100 characters of an exception's type and text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:100]


def compared(makers: Makers, largest: float, row: dict, then: Callable[[Callable], Callable] | None = None) -> dict:
    """Run each call once; return the calls whose results agree with fp8moe's, by name.

    Errors and differences are written to `row`. largest: limit of the relative difference. then: a function that takes
    a call, after the call's first run, and returns what to time instead, such as the call's CUDA graph.
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
    """Return a row with the kernel times of each implementation's call."""
    row = empty_row()
    calls = compared(makers, largest, row)
    timed = timing.measure_in_turn(list(calls.values()), repeats=REPEATS, rest=REST_S)
    row["us"] = {name: one.median_us for name, one in zip(calls, timed, strict=True)}
    return row


def measure_host(m: int, n: int, k: int, *, device: str = "cuda") -> dict:
    """Return a row with the CPU times of eager GEMM calls that write to preallocated memory."""
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
    """Build transformers' experts in bfloat16, with the dequantized weights of `layer_of`."""
    return adapters.dequantized_experts(layer_of(model, device), model)


def route(model: Model, tokens: int, routing: str) -> Tensor:
    """Choose experts (tokens, top_k): "random", or "skewed": a share SKEW of assignments goes to the first expert."""
    if routing == "random":
        return calls.route(model, tokens)
    rows = tokens * model.top_k
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    others = 1 + order % (model.experts - 1)
    return torch.where(order < round(SKEW * rows), 0, others).view(tokens, model.top_k)


def both(first: Call, second: Call) -> Call:
    """Combine the two GEMMs of a layer into one call; each GEMM keeps its own operands."""

    def results(outs: tuple[Any, Any]) -> Tensor:
        parts = [call.result(out) for call, out in zip((first, second), outs, strict=True)]
        some = [part[:: ceil_div(len(part), SAMPLED_ROWS)].double() for part in parts]
        return torch.cat([(part / part.norm()).flatten() for part in some])

    return Call(lambda: (first.run(), second.run()), results)


def make_layer(model: str, tokens: int, routing: str = "random", *, device: str = "cuda") -> Makers:
    """Make the calls of a whole layer, and of its two grouped GEMMs alone (names that end in "_two_gemms")."""
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
    """Time a whole layer as a CUDA graph, the kernels of our layer, and the layer's two GEMMs alone."""
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


@functools.lru_cache(maxsize=2)
def four_bits_of(model: Model, form: str, device: str) -> tuple[PackedTensor, PackedTensor, GroupedExperts]:
    """Return both weights of experts in "mxfp4" or "nvfp4", of which every eighth has the same values, and their layer.

    Gate and up have one tensor scale for both.
    """
    make, (hidden, size, count, _) = calls.Operands(device), model
    quantize = {"mxfp4": quantize_mxfp4, "nvfp4": quantize_nvfp4}[form]
    drawn = make.normal(8, 2 * size, hidden, std=hidden**-0.5), make.normal(8, hidden, size, std=size**-0.5)
    up, down = (
        made._replace(**{name: part.repeat(count // 8, *[1] * (part.dim() - 1)) for name, part in tensors.items()})
        for made in map(quantize, drawn)
        if (tensors := {name: part for name, part in made._asdict().items() if isinstance(part, Tensor)})
    )
    sizes = {"num_experts": count, "hidden_size": hidden, "intermediate_size": size}
    layer = GroupedExperts(**sizes, weight_format=form, device=device).eval()
    state = dict(zip(layer.weight_names, (up.data, up.scale, down.data, down.scale), strict=True))
    if form == "nvfp4":
        state["gate_up_proj_tensor_scale"] = up.tensor_scale[:, None].repeat(1, 2)
        state["down_proj_tensor_scale"] = down.tensor_scale
    layer.load_state_dict(state)
    return up, down, layer


def make_four_bits(model: str, tokens: int, *, device: str = "cuda") -> Makers:
    """Make the calls of a layer in FP8, MXFP4 and NVFP4; the weights in FP8 are others."""
    shape = FOUR_BITS[model]
    inputs = calls.layer_inputs(shape, route(shape, tokens, "random"), device)
    up, down, layer = four_bits_of(shape, "mxfp4", device)
    return {
        "fp8moe": lambda: Call(partial(layer_of(shape, device), *inputs), same),
        "mxfp4": lambda: Call(partial(layer, *inputs), None),
        "nvfp4": lambda: Call(partial(four_bits_of(shape, "nvfp4", device)[-1], *inputs), None),
        "humming": lambda: adapters.humming_experts(up, down, *inputs[:2]),
    }


@torch.no_grad()
def measure_four_bits(model: str, tokens: int, *, device: str = "cuda") -> dict:
    """Time CUDA graphs of a layer in FP8, MXFP4 and NVFP4."""
    row = empty_row()
    graphs = compared(make_four_bits(model, tokens, device=device), MAX_LAYER_DIFFERENCE, row, timing.capture)
    elapsed = timing.elapsed_in_turn(list(graphs.values()), repeats=REPEATS, rest=REST_S)
    row["us"] |= dict(zip(graphs, elapsed, strict=True))
    row["experts_in_use"] = len(route(FOUR_BITS[model], tokens, "random").unique())
    if "mxfp4" in graphs:
        (ours,) = timing.measure_in_turn([graphs["mxfp4"]], repeats=REPEATS, rest=REST_S)
        row["kernels"] = [[name, *place] for name, place in zip(ours.kernels, ours.places_us, strict=True)]
        row["us"]["gemms_in_mxfp4"] = gemms_in_layer(row["kernels"])
    return row


def measure_training(model: str, tokens: int, *, device: str = "cuda") -> dict:
    """Measure forward and backward of a layer, ours and SonicMoE's: times of CUDA graphs, memory, errors."""
    row = empty_row() | {"kept_bytes": {}, "peak_bytes": {}, "error": {}}
    shape, _ = training.PROFILED[model]
    module = adapters.transformers_experts(shape, device=device)
    x, index, weights = calls.layer_inputs(shape, calls.route(shape, tokens), device)
    of = Pass(module, (x.requires_grad_(), index, weights.requires_grad_()), torch.randn_like(x))
    exact = training.float32_step(of)
    layers: dict[str, Callable[[], torch.nn.Module]] = {
        "fp8moe": lambda: GroupedExperts.from_experts(module, master_dtype=torch.bfloat16).train(),
        "sonic": lambda: adapters.SonicExperts(module),
    }
    graphs: dict[str, Callable] = {}
    for name, layer in peers_there(layers).items():
        try:
            one = of._replace(layer=layer())
            found = one.step()
            row["error"][name] = training.largest_difference(adapters.in_plain_order(name, found), exact)
            if not row["error"][name] <= training.MAX_DIFFERENCE:
                raise ValueError(f"{row['error'][name]:.2g} from float32, must be <= {training.MAX_DIFFERENCE}")
            del found
            memory = training.measure_memory(one)
            row["kept_bytes"][name], row["peak_bytes"][name] = memory.kept, memory.peak
            graphs |= {f"{name}_forward": timing.capture(one.renewed_forward), name: timing.capture(one.step)}
        except Exception as error:
            row["failed"][name] = sentence(error)
    del exact
    masters = [parameter.detach() for parameter in module.parameters()]
    graphs["quantizing"] = timing.capture(lambda: [quantize_128x128(master) for master in masters])
    us = dict(zip(graphs, timing.elapsed_in_turn(list(graphs.values()), repeats=REPEATS, rest=REST_S), strict=True))
    saved = 0.75 * us.pop("quantizing")
    us |= {f"fp8moe_shared{part}": us[f"fp8moe{part}"] - saved for part in ("", "_forward") if f"fp8moe{part}" in us}
    row["us"] = us
    return row


def gemms_in_layer(kernels: Sequence[tuple[str, float, float]]) -> float:
    """Return microseconds from the start of GEMM 1 to the end of GEMM 2. RuntimeError unless there are two GEMMs."""
    found = [(start, end) for name, start, end in kernels if re.match(r"gemm\b", name)]
    if len(found) != 2:
        raise RuntimeError(f"expected two GEMMs in the layer, recorded {', '.join(name for name, *_ in kernels)}")
    return found[1][1] - found[0][0]


def _masked(sizes: Mapping[str, int]) -> Sequence[tuple[int, int]]:
    """Return the (n, k) to measure for a masked case with these sizes."""
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
            "four_bits": [{"model": model, "tokens": tokens} for model in FOUR_BITS for tokens in TOKENS],
            "training": [
                {"model": model, "tokens": tokens}
                for model, (_, counts) in training.PROFILED.items()
                for tokens in counts
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
    "four_bits": make_four_bits,
    "host": make_gemm,
}
MEASURE: dict[str, Callable[..., dict]] = {
    "layer": measure_layer,
    "four_bits": measure_four_bits,
    "training": measure_training,
    "host": measure_host,
}
"""Maps a kind of case to the function that measures it; all other kinds use `measure_kernels`."""
WHOLE_MODEL = [
    Case(what, {"model": model, "batch": batch, "prompt": prompt})
    for model in FORMATS
    for what, sizes in {"decode": STEPS, "prefill": (PREFILL,)}.items()
    for batch, prompt in sizes
]


def whole_model(tree: Path, *options: str) -> list[dict]:
    """Run `benchmarks.decode` from the checkout `tree` in another process; return its rows."""
    with tempfile.TemporaryDirectory() as out:
        batches = map(str, (batch for batch, _ in STEPS))
        how = ("--batch", *batches, "--prompt", str(STEPS[0][1]), "--out", out, *options)
        _run_in(tree, "benchmarks.decode", *how)
        return json.loads((Path(out) / "decode.json").read_text())["rows"]


def vllm_engine(*options: str) -> list[dict]:
    """Run `benchmarks.vllm_engine` in another process; return its rows, in the format of `whole_model`."""
    with tempfile.TemporaryDirectory() as out:
        file = Path(out) / "rows.json"
        _run_in(ROOT, "benchmarks.vllm_engine", str(file), *options)
        return json.loads(file.read_text())


def sources(against: Path | None) -> dict[tuple[str, str], Callable[[], list[dict]]]:
    """Map (model, name) to what measures the model's rows. against: the checkout of another revision, if any."""
    found: dict[tuple[str, str], Callable[[], list[dict]]] = {}
    for model, formats in FORMATS.items():
        for name, experts in formats.items():
            found[model, name] = partial(whole_model, ROOT, "--model", model, "--experts", experts)
        if adapters.installed("vllm"):
            found[model, "vllm"] = partial(vllm_engine, "--model", model)
    if adapters.installed("vllm"):
        found[QWEN, "vllm_fp8moe"] = partial(vllm_engine, "--quantization", "fp8moe")
    if against:
        found[QWEN, "before"] = partial(whole_model, against)
    return found


def _run_in(tree: Path, module: str, *arguments: str) -> None:
    """Run a module of a checkout. If the module fails, print the end of its output and raise RuntimeError."""
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
    """The rows of a run and the file that stores them; the file is rewritten after each row."""

    def __init__(self, path: Path, head: Mapping[str, Any]):
        """Read the stored rows; drop them if digest, card or versions differ, except for fp8moe's own version."""
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
    """Return a row of results as text: times, then failures."""
    unit = "us" if "us" in row else "ms"
    times = [f"{name} {format_value(value)}" for name, value in row[unit].items()]
    failed = [f"{name} failed: {why}" for name, why in row["failed"].items()]
    return f"{row['case']}: {', '.join(times)} {unit}" + "".join(f"\n    {one}" for one in failed)


@torch.no_grad()
def run_once(chosen: Sequence[Case]) -> None:
    """Run cases once to put their kernels into the disk cache. Ignore errors: the measurement will raise them again."""
    for case in chosen:
        for name, make in peers_there(MAKE[case.what](**case.sizes)).items():
            # Transformers compiles nothing, and its bfloat16 weights take too much memory
            if name != "transformers_bf16":
                with suppress(Exception):
                    make().run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def compile_ahead(chosen: Sequence[Case]) -> None:
    """Call `run_once` in parallel processes to compile kernels; all layers of a model share one process."""
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
    """Measure cases and store their rows. If a case raises, its error is stored and the others still run."""
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
            torch.cuda.empty_cache()  # also frees the memory pools of CUDA graphs
        if (spent := time.perf_counter() - begin) > 5:
            print(f"    {spent:.0f} s", flush=True)


def measure_whole_models(file: File, sources: Mapping[tuple[str, str], Callable[[], list[dict]]]) -> None:
    """Call each source, which measures a model, and put its times under its name into the model's rows.

    Rows that are there before are replaced, so that no row has times of two runs.
    """
    models = {model for model, _ in sources}
    chosen = [case for case in WHOLE_MODEL if case.sizes["model"] in models]
    columns = ("ms", "tokens_s", "kernels_a_step", "failed")
    rows = {case.name: case.row | {column: {} for column in columns} for case in chosen}
    before = (file.rows[name] for name in rows if name in file.rows)
    dropped = {f"{row['model']} {name}" for row in before for name in row["ms"]} - {" ".join(of) for of in sources}
    if dropped:
        print(f"{file.path}: times of another run are dropped: {', '.join(sorted(dropped))}", flush=True)
    for (model, name), source in sources.items():
        begin = time.perf_counter()
        found, why = [], "it did not measure this"
        try:
            found = source()
        except Exception as error:
            why = sentence(error)
        measured = {tuple(row.get(key) for key in ("what", "batch", "prompt")): row for row in found}
        for case in (case for case in chosen if case.sizes["model"] == model):
            row = rows[case.name]
            if one := measured.get((case.what, case.sizes["batch"], case.sizes["prompt"])):
                row["ms"][name], row["tokens_s"][name] = one["ms"], one["tokens_s"]
                if "kernels" in one:
                    row["kernels_a_step"][name] = one["kernels"]
                if one.get("compiled"):
                    row["failed"][name] = f"{one['compiled']} kernels were compiled while it was measured"
            else:
                row["failed"][name] = why
            file.put(row)
        print(f"    {model} {name}: {time.perf_counter() - begin:.0f} s", flush=True)


def clocks() -> dict[str, str]:
    """Return the GPU's clocks, power limit and temperature, as nvidia-smi prints them."""
    fields = ("clocks.max.sm", "clocks.max.memory", "clocks.sm", "power.limit", "temperature.gpu")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return dict(zip(fields, map(str.strip, done.stdout.split(",")), strict=True))


def wanted(names: Sequence[str], pattern: str | None, there: Mapping[str, dict]) -> Iterator[str]:
    """Yield the names that match the pattern; without a pattern, the names of cases missing or failed in `there`."""
    for name in names:
        if (
            re.search(pattern, name)
            if pattern
            else name not in there or {"case", "gemms"} & there[name]["failed"].keys()
        ):
            yield name


def wanted_sources(
    every: Sequence[tuple[str, str]], pattern: str | None, there: Mapping[str, dict]
) -> Iterator[tuple[str, str]]:
    """Yield what measures a whole model, (model, name): what matches the pattern as "model name".

    Without a pattern: all of each model that lacks a time in `there`, or is compared with another revision.
    """
    incomplete = {
        model
        for model, name in every
        for case in WHOLE_MODEL
        if case.sizes["model"] == model and (name == "before" or name not in there.get(case.name, {}).get("ms", {}))
    }
    for of in every:
        if re.search(pattern, " ".join(of)) if pattern else of[0] in incomplete:
            yield of


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
        run_once([case for case in CASES if case.what in MAKE and re.search(args.only or "", case.name)])
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
        compile_ahead([case for case in cases if case.what != "training"])
        measure(cases, file)
        return
    if args.against:
        file.head |= {"before": {"directory": args.against.resolve().name, "digest": digest(args.against)}}

    found = sources(args.against and args.against.resolve())
    measure_whole_models(file, {of: found[of] for of in wanted_sources([*found], args.only, file.rows)})


if __name__ == "__main__":
    main()
