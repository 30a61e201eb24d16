"""The experts layer against the baselines: `python -m benchmarks.experts [--models M ...] [--tokens T ...]`.

- `graph_us`: the replay of a CUDA graph of one call, from before it to after it, with a cold L2. This is compared:
  `vs_two_gemms` is DeepGEMM's two GEMMs alone over our whole layer, `vs_deep_gemm` and `vs_bf16` are transformers'
  layer with DeepGEMM and with PyTorch's grouped matrix product in bfloat16 over ours. More is better. Bfloat16's times
  are means, at some numbers of tokens that the other baselines lack, and the other way round.
- `sort_us`... `combine_us`: where that time goes. The kernels overlap, so each counts from the end of the one before.
- `host_us`: CPU time of an eager call, for few tokens.
- `extra_bytes`: memory of an eager call beside its result; `documented_bytes` is what GroupedExperts promises.

Each token goes to `top_k` different experts, drawn uniformly, again and again until as many experts are in use as were
in the baselines: with few tokens the time is that of reading their weights. Two more cases for the balance between SMs
have the same number of rows for every expert, and 60% of all rows for one.

Two tokens of every case are checked against float64 over the quantized operands before it is timed.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import baselines, command, host, operands, timing
from benchmarks.baselines import MODELS, Model
from benchmarks.report import Threshold, format_table, geomean, summarize
from fp8moe import FP8Tensor, GroupedExperts, quantize_1x128
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu

STAGES = ("sort", "permute", "gemm1", "gemm2", "combine")
KERNELS = ("sort_by_expert", "permute_quantize", "gemm", "gemm", "combine")
BASELINES = {"vs_two_gemms": "deep_gemm_two_gemms", "vs_deep_gemm": "transformers_deep_gemm_graph"}
RATIOS = (*BASELINES, "vs_bf16")
ALL_TOKENS = (1, 8, 32, 64, 128, 512, 2048, 8192)
HOST_TOKENS = 128  # CPU time matters up to so many
HOST_CALLS, HOST_BATCHES = 40, 5
BALANCE = ("dsv3_ep8", 2048)  # model and tokens of the even and the skewed routing
SKEW = 0.6  # of the rows
ONE_TOKEN = ("dsv3", 1)
MANY_TOKENS = 8192  # what the allocator rounds up does not show there
MAX_ERROR = 1e-2  # of the layer against float64
ERROR_CASE = Model(hidden=1024, intermediate=512, experts=16, top_k=4)  # small enough for the reference
ERROR_TOKENS = 64
DRAWS = 10_000
TIMES = ("graph_us", *(f"{stage}_us" for stage in STAGES), "host_us")
COLUMNS = ("model", "tokens", "routing", *TIMES, *RATIOS, "error")


class Measurement(NamedTuple):
    """One case: times in microseconds, memory in bytes. host_us is None where it was not measured."""

    graph_us: float
    stages_us: Sequence[float]
    host_us: float | None
    extra_bytes: int
    active_experts: int
    error: float


def documented_bytes(model: Model, tokens: int) -> int:
    """Memory of a call on bfloat16 beside its result, at most, as GroupedExperts documents it."""
    hidden, intermediate, experts, top_k = model
    rows = tokens * top_k
    blocks = -(-hidden // 128) + -(-intermediate // 128)
    return rows * (3 * hidden + intermediate) + 4 * rows * blocks + 8 * (rows + experts)


def make_row(name: str, model: Model, tokens: int, routing: str, measured: Measurement) -> dict:
    """One measurement with its ratios to the baselines, None where there is none or the routing is another."""
    us, active = measured.graph_us, measured.active_experts
    baseline = baselines.get("experts", name, tokens) if routing == "random" else None
    bf16_us = baselines.bf16_experts_us(name, tokens, active) if routing == "random" else None
    return {
        "model": name,
        **model._asdict(),
        "tokens": tokens,
        "routing": routing,
        "active_experts": active,
        "graph_us": us,
        **{f"{stage}_us": step for stage, step in zip(STAGES, measured.stages_us, strict=True)},
        "host_us": measured.host_us,
        "tflops": 6 * tokens * model.top_k * model.hidden * model.intermediate / us / 1e6,
        **{ratio: baseline and baseline.over(us, impl) for ratio, impl in BASELINES.items()},
        "vs_bf16": bf16_us and bf16_us / us,
        "extra_bytes": measured.extra_bytes,
        "documented_bytes": documented_bytes(model, tokens),
        "error": measured.error,
    }


def thresholds(rows: Sequence[dict], errors: Mapping[str, float]) -> list[Threshold]:
    """The thresholds whose cases are all among the rows, and those on errors, `layer_errors`."""
    measured = {(row["model"], row["tokens"]): row for row in rows if row["routing"] == "random"}
    balance = {row["routing"]: row["graph_us"] for row in rows if (row["model"], row["tokens"]) == BALANCE}
    found = []
    if measured.keys() >= {tuple(case.sizes.values()) for case in baselines.cases("experts")}:
        for ratio, sizes, what, limit, aim in (
            ("vs_two_gemms", ALL_TOKENS, "DeepGEMM's two GEMMs alone / our whole layer", 1.0, 1.2),
            ("vs_two_gemms", (MANY_TOKENS,), f"the same, {MANY_TOKENS} tokens", 0.95, 1.02),
            ("vs_deep_gemm", ALL_TOKENS, "transformers + DeepGEMM layer / ours", 2.6, 3.2),
        ):
            values = [row[ratio] for (_, tokens), row in measured.items() if tokens in sizes and row[ratio] is not None]
            if values:
                found.append(
                    Threshold(f"experts, CUDA graph, geomean of {what}", geomean(values), limit, aim, at_least=True)
                )
    if host_times := [row["host_us"] for row in rows if row["host_us"] is not None]:
        name = f"experts, CPU time of an eager call, 1 to {HOST_TOKENS} tokens, slowest"
        found.append(Threshold(name, max(host_times), 180, 120, unit="us"))
    if ONE_TOKEN in measured:
        us = measured[ONE_TOKEN]["graph_us"]
        found.append(Threshold("experts, dsv3, 1 token, CUDA graph", us, 118, 104, unit="us"))
    if {"even", "skewed"} <= balance.keys():
        name = "experts, dsv3_ep8, 2048 tokens, 60% of the rows to one expert / even routing"
        found.append(Threshold(name, balance["skewed"] / balance["even"], 1.15, 1.05))
    if large := [row["extra_bytes"] / row["documented_bytes"] for row in rows if row["tokens"] == MANY_TOKENS]:
        found.append(Threshold(f"experts, {MANY_TOKENS} tokens, memory of a call / documented", max(large), 1.01))
    found.append(Threshold("experts, layer error against float64", errors["cuda"], MAX_ERROR))
    ratio = errors["cuda, own activations"] / errors["reference, own activations"]
    found.append(
        Threshold("experts, layer error over its own quantized activations / the reference backend's", ratio, 1.05)
    )
    return found


def make_layer(model: Model, *, device: str = "cuda") -> GroupedExperts:
    """A layer with normal weights, scaled to keep the variance."""
    hidden, intermediate, experts, _ = model
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate}
    layer = GroupedExperts(**sizes, device="meta")
    up = operands.random_experts(experts, 2 * intermediate, hidden, std=hidden**-0.5, device=device)
    down = operands.random_experts(experts, hidden, intermediate, std=intermediate**-0.5, device=device)
    state = dict(zip(layer.weight_names, (*up, *down), strict=True))
    layer.load_state_dict(state, assign=True)
    return layer


def route(model: Model, tokens: int, active_experts: int | None = None) -> torch.Tensor:
    """top_k different experts for each token, always the same. RuntimeError if no draw has `active_experts` in use."""
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        index = torch.rand(tokens, model.experts, generator=generator).topk(model.top_k).indices
        if active_experts is None or len(index.unique()) == active_experts:
            return index
    raise RuntimeError(f"no routing of {tokens} tokens in {DRAWS} has {active_experts} experts in use")


def route_even(model: Model, tokens: int) -> torch.Tensor:
    """As many rows for each expert, of tokens in any order; a token may have an expert twice."""
    rows = tokens * model.top_k
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return (order % model.experts).view(tokens, model.top_k)


def route_skewed(model: Model, tokens: int) -> torch.Tensor:
    """SKEW of the rows for the first expert, the others dealt out to the rest."""
    rows = tokens * model.top_k
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    first = round(SKEW * rows)
    return torch.where(order < first, 0, 1 + order % (model.experts - 1)).view(tokens, model.top_k)


def routings(name: str, model: Model, tokens: int) -> dict[str, torch.Tensor]:
    """Indices (tokens, top_k) of the cases to measure, by kind."""
    found = {"random": route(model, tokens, baselines.active_experts(name, tokens))}
    if (name, tokens) == BALANCE:
        found |= {"even": route_even(model, tokens), "skewed": route_skewed(model, tokens)}
    return found


def quantized_intermediate(layer: GroupedExperts, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """What GEMM 1 hands to GEMM 2 on the tensors' backend, in float64: (T, K, I) for x (T, H) and index (T, K)."""
    up, up_scale, down, _ = (getattr(layer, name) for name in layer.weight_names)
    groups, rows = sort_by_expert(index, layer.num_experts)
    a = permute_quantize(x, rows, index.numel())
    h = grouped_gemm_swiglu(a, FP8Tensor(up, up_scale), groups, activation=layer.activation)
    return operands.exact(h)[rows.long()]


def exact(
    layer: GroupedExperts,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    intermediate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer in float64 over the quantized weights and activations. x (T, H), index and weights (T, K).

    intermediate: (T, K, I) activations of GEMM 2 to take, as `quantized_intermediate` gives them, instead of quantizing
    exact ones. Those that the layer computes lie in part on the other side of a rounding edge.
    """
    up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    rows = operands.exact(quantize_1x128(x))
    out = torch.zeros_like(rows)
    for expert in index[(index >= 0) & (index < layer.num_experts)].unique().tolist():
        tokens, k = torch.where(index == expert)
        if intermediate is None:
            gate_up = rows[tokens] @ operands.exact(FP8Tensor(up[expert], up_scale[expert])).T
            h = operands.exact(quantize_1x128(layer.activation(gate_up).float()))
        else:
            h = intermediate[tokens, k]
        y = h @ operands.exact(FP8Tensor(down[expert], down_scale[expert])).T
        out.index_add_(0, tokens, y * weights[tokens, k, None].double())
    return out


def random_inputs(model: Model, index: torch.Tensor, *, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """Hidden states, `index` and normalised weights on the device."""
    x = torch.randn(len(index), model.hidden, dtype=torch.bfloat16, device=device)
    weights = torch.rand(index.shape, device=device) + 0.1
    return x, index.to(device), weights / weights.sum(-1, keepdim=True)


def layer_errors(*, device: str = "cuda") -> dict[str, float]:
    """Errors of a small layer against float64: of the whole layer ("cuda"), and over the quantized activations that
    each backend itself hands to GEMM 2 ("cuda, own activations", "reference, own activations").
    """
    layer = make_layer(ERROR_CASE, device=device)
    inputs = random_inputs(ERROR_CASE, route(ERROR_CASE, ERROR_TOKENS), device=device)
    errors = {"cuda": operands.relative_error(layer(*inputs), exact(layer, *inputs))}
    on_cpu = copy.deepcopy(layer).cpu(), tuple(value.cpu() for value in inputs)
    for backend, (module, values) in {"cuda": (layer, inputs), "reference": on_cpu}.items():
        expected = exact(module, *values, quantized_intermediate(module, *values[:2]))
        errors[f"{backend}, own activations"] = operands.relative_error(module(*values), expected)
    return errors


def check(layer: GroupedExperts, inputs: Sequence[torch.Tensor]) -> float:
    """Error of the first and the last token against float64. RuntimeError if it is too large."""
    chosen = [0, len(inputs[0]) - 1]
    error = operands.relative_error(layer(*inputs)[chosen], exact(layer, *(value[chosen] for value in inputs)))
    if not error <= MAX_ERROR:
        raise RuntimeError(f"{layer} on {len(inputs[0])} tokens: relative error {error:.2e}, must be <= {MAX_ERROR}")
    return error


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph of the call, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def stages_us(timed: timing.Timing) -> tuple[float, ...]:
    """Times of STAGES. RuntimeError if the layer's kernels are not KERNELS."""
    names = timed.kernels
    if len(names) != len(KERNELS) or not all(map(str.__contains__, names, KERNELS)):
        raise RuntimeError(f"expected the kernels {', '.join(KERNELS)}, recorded {', '.join(names)}")
    return timed.steps_us


def run_model(name: str, model: Model, tokens: Sequence[int], *, device: str = "cuda") -> list[dict]:
    """Rows of one model. RuntimeError if a result is wrong."""
    layer = make_layer(model, device=device)
    cases, calls, checked = [], [], []
    for count in tokens:
        for routing, index in routings(name, model, count).items():
            inputs = random_inputs(model, index, device=device)
            calls.append(partial(layer, *inputs))
            cases.append((count, routing, len(index.unique())))
            checked.append((check(layer, inputs), host.memory(calls[-1])["extra_bytes"]))
    replays = [capture(call) for call in calls]
    rests = [timing.SHORT_REST_S if count <= HOST_TOKENS else timing.REST_S for count, _, _ in cases]
    profiled = timing.measure(replays, rests=rests)
    elapsed = timing.elapsed(replays, rests=rests)
    rows = []
    for i, (count, routing, active) in enumerate(cases):
        few = count <= HOST_TOKENS
        host_us = host.host_us(calls[i], calls=HOST_CALLS, batches=HOST_BATCHES) if few else None
        error, extra_bytes = checked[i]
        measured = Measurement(elapsed[i], stages_us(profiled[i]), host_us, extra_bytes, active, error)
        rows.append(make_row(name, model, count, routing, measured))
    return rows


@torch.no_grad()
def run(models: Mapping[str, Model] = MODELS, tokens: Sequence[int] = ALL_TOKENS, *, device: str = "cuda") -> dict:
    """Checks and times every model with every number of tokens.

    Returns {"gpu", "rows", "errors", "thresholds"}. Only the weights of one model are in memory at a time.
    """
    gpu = command.start()
    errors = layer_errors(device=device)
    rows = [row for name, model in models.items() for row in run_model(name, model, tokens, device=device)]
    return command.result(gpu, rows, thresholds(rows, errors), errors=errors)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("experts", "the experts layer against the baselines")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=ALL_TOKENS)
    args = parser.parse_args(argv)
    result = run({name: MODELS[name] for name in args.models}, args.tokens)
    by_model = format_table(summarize(result["rows"], ("model",), RATIOS), ("model", *RATIOS))
    command.finish(args.out / "experts.json", result, format_table(result["rows"], COLUMNS), by_model)


if __name__ == "__main__":
    main()
