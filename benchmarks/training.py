"""Training against bfloat16: `python -m benchmarks.training [--only PART ...] [--out DIR]`.

- `experts` and `linear`: forward and backward, all gradients, of GroupedExperts and FP8Linear, and in bfloat16 of
  transformers' experts on its "grouped_mm" and of nn.Linear, run here with the same weights, inputs and routing; the
  routing weights are float32, as DeepSeek-V3's router gives them. The thresholds take our rows with bfloat16 master
  weights, the dtype of the other; those with float32 ones show what these cost. Times are of the replay of a CUDA
  graph, by CUDA events and with a cold L2: `us`, and `forward_us` of the forward alone. Every pass
  quantizes the weights anew, as the first after an optimizer step. Bfloat16's over ours is `speedup`; more is better.

  `kept_bytes` is what autograd holds between forward and backward: the activation memory of the layer. `peak_bytes` is
  the largest amount during both, gradients included. Both are beside weights, their FP8 copies (`copy_bytes`), inputs,
  and output. `kept_ratio` and `peak_ratio` are ours over bfloat16's; less is better. `difference` is the largest
  relative Frobenius difference of output and gradients from bfloat16's: what FP8 costs, and a check of the pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import command, operands, timing
from benchmarks.adapters import transformers_experts
from benchmarks.report import Threshold, format_kinds, select
from benchmarks.shapes import MODELS, Model
from fp8moe import FP8Linear, GroupedExperts

MODEL, TOKENS = "dsv3_ep8", 8192
LINEAR = (8192, 4096, 7168)  # rows, out_features, in_features
MAX_DIFFERENCE = 0.15  # of FP8 from bfloat16: rounding to E4M3 costs 2.6e-2 for each of the tensors on the way
MASTERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = {
    "experts": ("impl", "master", "forward_us", "us", "speedup", "kept_ratio", "peak_ratio", "difference"),
}
COLUMNS["linear"] = COLUMNS["experts"]


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
    """The thresholds whose cases are among the rows."""
    found = []
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


def expert_passes(model: Model, tokens: int, *, device: str = "cuda") -> dict[str, Pass]:
    """Passes of transformers' experts, "bf16", and of ours by the dtype of their master weights."""
    module = transformers_experts(model, device=device)
    x, index, weights = operands.experts_inputs(model, operands.route(model, tokens), device=device)
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
    replays = [timing.capture(call) for of in passes.values() for call in (of.renewed_forward, of.step)]
    times = iter(timing.elapsed(replays))
    return {name: Measurement(next(times), next(times), memory[name], differences.get(name)) for name in passes}


def run_experts(name: str, model: Model, tokens: int, *, device: str = "cuda") -> list[dict]:
    passes = expert_passes(model, tokens, device=device)
    size = {"model": name, **model._asdict(), "tokens": tokens}
    return make_pass_rows("experts", size, measure_passes("experts", passes))


def run_linear(rows: int, out_features: int, in_features: int, *, device: str = "cuda") -> list[dict]:
    size = {"rows": rows, "out_features": out_features, "in_features": in_features}
    passes = linear_passes(**size, device=device)
    return make_pass_rows("linear", size, measure_passes("linear", passes))


PARTS = {
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
