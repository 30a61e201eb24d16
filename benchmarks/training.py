"""Training against bfloat16 and the baselines: `python -m benchmarks.training [--only PART ...] [--out DIR]`.

- `grouped_gemm_k`: weight gradients of experts, kernel time. Groups are drawn as for `benchmarks.grouped_gemm`, in
  multiples of 128 and with the baselines' sum. `accumulate_us` is the time when it adds to `out` instead of writing it,
  which is what DeepGEMM does: `vs_deep_gemm` is its time over `accumulate_us`. A sample of every group is checked
  against float64 over the quantized operands.
- `experts` and `linear`: forward and backward, all gradients, of GroupedExperts and FP8Linear, and in bfloat16 of
  transformers' experts on its "grouped_mm" and of nn.Linear, run here with the same weights, inputs and routing; the
  routing weights are float32, as DeepSeek-V3's router gives them. The thresholds take our rows with bfloat16 master
  weights, the dtype of the other; those with float32 ones show what these cost. As in `benchmarks.experts` times are of
  the replay of a CUDA graph, by CUDA events and with a cold L2: `us`, and `forward_us` of the forward alone. Every pass
  quantizes the weights anew, as the first after an optimizer step. Bfloat16's over ours is `speedup`; more is better.

  `kept_bytes` is what autograd holds between forward and backward: the activation memory of the layer. `peak_bytes` is
  the largest amount during both, gradients included. Both are beside weights, their FP8 copies (`copy_bytes`), inputs,
  and output. `kept_ratio` and `peak_ratio` are ours over bfloat16's; less is better. `difference` is the largest
  relative Frobenius difference of output and gradients from bfloat16's: what FP8 costs, and a check of the pass.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import baselines, command, experts, operands, timing
from benchmarks.baselines import MODELS, Model
from benchmarks.gemm import MAX_ERROR
from benchmarks.report import Threshold, format_kinds, geomean, select
from fp8moe import FP8Linear, FP8Tensor, GroupedExperts, grouped_gemm_k

MODEL, TOKENS = "dsv3_ep8", 8192
LINEAR = (8192, 4096, 7168)  # rows, out_features, in_features
SAMPLED = 128  # rows and columns of each group's product that are checked
MAX_DIFFERENCE = 0.15  # of FP8 from bfloat16: rounding to E4M3 costs 2.6e-2 for each of the tensors on the way
MASTERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = {
    "grouped_gemm_k": ("groups", "m", "n", "total_k", "us", "accumulate_us", "tflops", "vs_deep_gemm", "error"),
    "experts": ("impl", "master", "forward_us", "us", "speedup", "kept_ratio", "peak_ratio", "difference"),
}
COLUMNS["linear"] = COLUMNS["experts"]


class Case(NamedTuple):
    """Weight gradients (groups, m, n), of groups with total_k rows in all."""

    groups: int
    m: int
    n: int
    total_k: int


class Memory(NamedTuple):
    """Of a forward and backward pass, in bytes; see the module's text."""

    kept: int
    peak: int
    copies: int


class Pass(NamedTuple):
    """A layer, its inputs, and the gradient of its output. Those of the inputs that want a gradient get one."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    gradient: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [value for value in (*self.inputs, *self.layer.parameters()) if value.requires_grad]

    def forward(self) -> Tensor:
        return self.layer(*self.inputs)

    def renewed_forward(self) -> Tensor:
        """A forward with weights that count as changed since the last one."""
        for parameter in self.layer.parameters():
            torch.autograd.graph.increment_version(parameter)
        return self.forward()

    def step(self) -> tuple[Tensor, ...]:
        """A forward and backward with changed weights: the output, and the gradients of `leaves`."""
        out = self.renewed_forward()
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.gradient)


class Measurement(NamedTuple):
    """One pass of one implementation: times in microseconds; `difference` is None for the one compared with."""

    forward_us: float
    us: float
    memory: Memory
    difference: float | None


def stored_cases() -> list[Case]:
    """The baselines' cases of grouped_gemm_k."""
    return [Case(**case.sizes) for case in baselines.cases("grouped_gemm_k")]


def group_offsets(case: Case) -> list[int]:
    """Where each group begins, and the end: multiples of 128, with groups of about 0.7 to 1.3 times the mean."""
    generator = random.Random(0)
    shares = list(accumulate(generator.uniform(0.7, 1.3) for _ in range(case.groups)))
    return [0, *(128 * round(case.total_k / 128 * share / shares[-1]) for share in shares)]


def make_gemm_row(case: Case, us: float, mean_us: float, accumulate_us: float, error: float) -> dict:
    baseline = baselines.get("grouped_gemm_k", *case)
    return {
        "what": "grouped_gemm_k",
        **case._asdict(),
        "us": us,
        "mean_us": mean_us,
        "accumulate_us": accumulate_us,
        "tflops": 2 * case.m * case.n * case.total_k / us / 1e6,
        "vs_deep_gemm": baseline and baseline.over(accumulate_us),
        "error": error,
    }


def make_pass_rows(what: str, size: Mapping[str, object], measured: Mapping[str, Measurement]) -> list[dict]:
    """A row for each implementation: "bf16", and the masters' names for ours."""
    bf16 = measured["bf16"]
    return [
        {
            "what": what,
            **size,
            "impl": "bf16" if name == "bf16" else "fp8",
            "master": None if name == "bf16" else name,
            "forward_us": found.forward_us,
            "us": found.us,
            "speedup": bf16.us / found.us,
            "kept_bytes": found.memory.kept,
            "peak_bytes": found.memory.peak,
            "copy_bytes": found.memory.copies,
            "kept_ratio": found.memory.kept / bf16.memory.kept if bf16.memory.kept else None,
            "peak_ratio": found.memory.peak / bf16.memory.peak,
            "difference": found.difference,
        }
        for name, found in measured.items()
    ]


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """The thresholds whose cases are all among the rows, and the threshold on the error of those there are."""
    found = []
    products = {Case(*(row[field] for field in Case._fields)): row for row in select(rows, "grouped_gemm_k")}
    if products.keys() >= set(stored_cases()):
        values = [products[case]["vs_deep_gemm"] for case in stored_cases()]
        name = "grouped_gemm_k, accumulating, geomean of DeepGEMM / ours"
        if None not in values:
            found.append(Threshold(name, geomean(values), 1.04, 1.1, at_least=True))
    if products:
        worst = max(row["error"] for row in products.values())
        found.append(Threshold("grouped_gemm_k, largest relative error", worst, MAX_ERROR))
    ours = [row for row in rows if row.get("master") == "bfloat16"]  # like the other's
    for row in select(ours, "experts"):
        if (row["model"], row["tokens"]) == (MODEL, TOKENS):
            name = f"experts, {MODEL}, {TOKENS} tokens, forward and backward, transformers' bfloat16 / ours"
            found.append(Threshold(name, row["speedup"], 2.4, 2.7, at_least=True))
            name = f"experts, {MODEL}, {TOKENS} tokens, activation memory over that of bfloat16"
            found.append(Threshold(name, row["kept_ratio"], 0.6, 0.5))
    for row in select(ours, "linear"):
        if (row["rows"], row["out_features"], row["in_features"]) == LINEAR:
            name = "FP8Linear ({0}, {2}) x ({1}, {2}), forward and backward, bfloat16 / ours".format(*LINEAR)
            found.append(Threshold(name, row["speedup"], 1.35, 1.5, at_least=True))
    return found


def check_product(a: FP8Tensor, b: FP8Tensor, offsets: Sequence[int], out: Tensor) -> float:
    """Error of sampled rows and columns of every group's product against float64.

    a (M, K), b (N, K); out (E, M, N); group e has the columns offsets[e] up to offsets[e + 1].
    RuntimeError if it is too large.
    """
    actual, expected = [], []
    rows, columns = (sample(len(operand.data), out.device) for operand in (a, b))
    for group, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        x, w = (
            operands.exact(FP8Tensor(data.view(torch.uint8)[chosen, start:end].view(data.dtype), blocks))
            for (data, scale), chosen in ((a, rows), (b, columns))
            for blocks in [scale[chosen, start // 128 : end // 128]]
        )
        actual.append(out[group][rows][:, columns])
        expected.append(x @ w.T)
    error = operands.relative_error(torch.stack(actual), torch.stack(expected))
    if not error <= MAX_ERROR:
        raise RuntimeError(f"grouped_gemm_k {tuple(out.shape)}: relative error {error:.2e}, must be <= {MAX_ERROR}")
    return error


def sample(count: int, device: torch.device) -> Tensor:
    """Up to SAMPLED indices, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, SAMPLED), device=device).round().long()


def run_products(cases: Sequence[Case], *, device: str = "cuda") -> list[dict]:
    """Rows of grouped_gemm_k. RuntimeError if a result is wrong. One case's operands are in memory at a time."""
    rows = []
    for case in cases:
        a, b = (operands.random_rows(size, case.total_k, device=device) for size in (case.m, case.n))
        offsets = group_offsets(case)
        groups = torch.tensor(offsets, dtype=torch.int32, device=device)
        out = torch.full((case.groups, case.m, case.n), float("nan"), device=device)
        write = partial(grouped_gemm_k, a, b, groups, out=out)
        write()
        error = check_product(a, b, offsets, out)
        written, added = timing.measure([write, partial(write, accumulate=True)])
        rows.append(make_gemm_row(case, written.median_us, written.mean_us, added.median_us, error))
    return rows


def transformers_experts(model: Model, *, device: str = "cuda") -> nn.Module:
    """transformers' experts in bfloat16 with normal weights that keep the variance, on "grouped_mm"."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": model.hidden, "moe_intermediate_size": model.intermediate, "num_experts": model.experts}
    config = Qwen3MoeConfig(**sizes, hidden_act="silu")
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.to(torch.bfloat16).to_empty(device=device)
    for weight in module.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return module


def expert_passes(model: Model, tokens: int, active: int | None, *, device: str = "cuda") -> dict[str, Pass]:
    """Passes of transformers' experts, "bf16", and of ours by the dtype of their master weights."""
    module = transformers_experts(model, device=device)
    x, index, weights = experts.random_inputs(model, experts.route(model, tokens, active), device=device)
    inputs = (x.requires_grad_(), index, weights.requires_grad_())
    gradient = torch.randn_like(x)
    layers = {name: GroupedExperts.from_experts(module, master_dtype=dtype) for name, dtype in MASTERS.items()}
    return {name: Pass(layer, inputs, gradient) for name, layer in ({"bf16": module} | layers).items()}


def linear_passes(rows: int, out_features: int, in_features: int, *, device: str = "cuda") -> dict[str, Pass]:
    """Passes of nn.Linear, "bf16", and of FP8Linear by the dtype of its master weight."""
    linear = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, out_features, device=device, dtype=torch.bfloat16)
    layers = {name: FP8Linear.from_linear(linear, master_dtype=dtype) for name, dtype in MASTERS.items()}
    return {name: Pass(layer, (x,), gradient) for name, layer in ({"bf16": linear} | layers).items()}


def largest_difference(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    return max(operands.relative_error(a, e.double()) for a, e in zip(actual, expected, strict=True))


def measure_memory(of: Pass) -> Memory:
    """What a pass takes beside weights, inputs and output, when FP8 copies of the weights are there already."""

    def allocated() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    without = allocated()
    out = of.renewed_forward()
    del out
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    out = of.forward()
    held = before + out.nbytes
    kept = allocated() - held
    gradients = torch.autograd.grad(out, of.leaves, of.gradient)
    peak = torch.cuda.max_memory_allocated() - held
    del gradients
    return Memory(kept, peak, before - without)


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph of a call that may run a backward, after runs on another stream, as it asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    return experts.capture(call)


def measure_passes(what: str, passes: Mapping[str, Pass]) -> dict[str, Measurement]:
    """Memory, difference and times of each. RuntimeError if one is too far from "bf16"."""
    memory = {name: measure_memory(of) for name, of in passes.items()}
    expected = passes["bf16"].step()
    differences = {}
    for name, of in passes.items():
        if name != "bf16":
            differences[name] = difference = largest_difference(of.step(), expected)
            if not difference <= MAX_DIFFERENCE:
                raise RuntimeError(
                    f"{what}, {name} master weights: {difference:.2e} from bfloat16, must be <= {MAX_DIFFERENCE}"
                )
    del expected
    replays = [capture(call) for of in passes.values() for call in (of.renewed_forward, of.step)]
    times = iter(timing.elapsed(replays))
    return {name: Measurement(next(times), next(times), memory[name], differences.get(name)) for name in passes}


def run_experts(name: str, model: Model, tokens: int, *, device: str = "cuda") -> list[dict]:
    passes = expert_passes(model, tokens, baselines.active_experts(name, tokens), device=device)
    size = {"model": name, **model._asdict(), "tokens": tokens}
    return make_pass_rows("experts", size, measure_passes("experts", passes))


def run_linear(rows: int, out_features: int, in_features: int, *, device: str = "cuda") -> list[dict]:
    size = {"rows": rows, "out_features": out_features, "in_features": in_features}
    passes = linear_passes(**size, device=device)
    return make_pass_rows("linear", size, measure_passes("linear", passes))


PARTS = {
    "grouped_gemm_k": lambda: run_products(stored_cases()),
    "experts": lambda: run_experts(MODEL, MODELS[MODEL], TOKENS),
    "linear": lambda: run_linear(*LINEAR),
}


def run(parts: Sequence[str] = tuple(PARTS)) -> dict:
    """Checks and times the parts, by default all; {"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    rows = [row for part in parts for row in PARTS[part]()]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("training", "training against bfloat16")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="PART")
    args = parser.parse_args(argv)
    result = run(args.only)
    command.finish(args.out / "training.json", result, *format_kinds(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
