"""Training in FP8 compared with bfloat16: `python -m benchmarks training [--only PART ...] [--out DIR]`.

Measures forward and backward with all gradients: GroupedExperts and FP8Linear against transformers' experts with
"grouped_mm" and nn.Linear in bfloat16. All use the same weights, inputs and routing; routing weights are float32, as in
DeepSeek-V3's router. The bars apply to bfloat16 master weights, the dtype of the bfloat16 layers; rows with float32
master weights show the cost of these. Times are of replays of CUDA graphs, by CUDA events, with a cold L2: `us`, and
`forward_us` for the forward alone. Every pass quantizes the weights again, like the first pass after an optimizer step.
`speedup`: ratio of bfloat16's time to ours.

`kept_bytes` is what autograd keeps between forward and backward. `peak_bytes` is the peak during both, including
gradients. Neither includes weights, their FP8 copies (`copy_bytes`), inputs and output. `kept_ratio` and `peak_ratio`
are the ratios of our bytes to bfloat16's. `difference` is the largest relative Frobenius difference of our output
and gradients from bfloat16's. It is the error of FP8, and a check of our pass.

With `--profile` instead: the kernels of one forward and backward of our experts layer with bfloat16 masters, for each
of PROFILED, in the order of launches. `us` is the time of a kernel, the mean of PROFILES passes one after another;
`floor_us` the lower bound by `roofline.training_work`, `x_floor` their ratio. Kernels of PyTorch have no bound.
"""

import copy
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import calls, operands, roofline, timing
from benchmarks.adapters import transformers_experts
from benchmarks.report import Bar, Benchmark, Option
from benchmarks.shapes import MODELS, Model
from fp8moe import FP8Linear, GroupedExperts

MODEL, TOKENS = "dsv3_ep8", 8192
LINEAR = (8192, 4096, 7168)  # sizes of the linear layer: rows, out_features, in_features
# Largest relative difference between FP8 and bfloat16: rounding to E4M3 costs 2.6e-2 for each tensor involved
MAX_DIFFERENCE = 0.15
PROFILED = {
    "qwen3_30b": (MODELS["qwen3_30b"], (8192, 32768)),
    "olmoe": (Model(2048, 1024, 64, 8), (16384,)),
    "dsv3_ep8": (MODELS["dsv3_ep8"], (8192,)),
}
"""Maps names of the layers that `--profile` measures to their sizes and numbers of tokens."""

PROFILES = 3
MASTERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Memory(NamedTuple):
    """Memory of a forward and backward pass in bytes; the fields are explained in the module's docstring."""

    kept: int
    peak: int
    copies: int


class Pass(NamedTuple):
    """A layer, its inputs, and the gradient of its output. Inputs with requires_grad get gradients."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    gradient: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [value for value in (*self.inputs, *self.layer.parameters()) if value.requires_grad]

    def forward(self) -> Tensor:
        return self.layer(*self.inputs)

    def renewed_forward(self) -> Tensor:
        """Run a forward as if the weights had changed since the last forward, so that they are quantized again."""
        for parameter in self.layer.parameters():
            torch.autograd.graph.increment_version(parameter)
        return self.forward()

    def step(self) -> tuple[Tensor, ...]:
        """Run forward and backward as if the weights had changed; return the output and the gradients of `leaves`."""
        out = self.renewed_forward()
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.gradient)


class Measurement(NamedTuple):
    """Times of a pass in microseconds, its memory, and its difference from the bfloat16 pass.

    difference: None for the bfloat16 pass.
    """

    forward_us: float
    us: float
    memory: Memory
    difference: float | None


def make_pass_rows(what: str, size: Mapping[str, object], measured: Mapping[str, Measurement]) -> list[dict]:
    """Make a row for each implementation: "bf16", and FP8 named by the dtype of its master weights."""
    bf16, rows = measured["bf16"], []
    for name, (forward_us, us, memory, difference) in measured.items():
        ours = name != "bf16"
        kept, peak, copies = memory
        times = {"forward_us": forward_us, "us": us, "speedup": bf16.us / us}
        sizes = {"kept_bytes": kept, "peak_bytes": peak, "copy_bytes": copies}
        sizes["kept_ratio"] = kept / bf16.memory.kept if bf16.memory.kept else None
        about = {"what": what, **size, "impl": "fp8" if ours else "bf16", "master": name if ours else None}
        rows.append({**about, **times, **sizes, "peak_ratio": peak / bf16.memory.peak, "difference": difference})
    return rows


def expert_passes(model: Model, tokens: int, *, device: str = "cuda") -> dict[str, Pass]:
    """Make passes of transformers' experts ("bf16") and of GroupedExperts (named by the dtype of master weights)."""
    module = transformers_experts(model, device=device)
    x, index, weights = calls.layer_inputs(model, calls.route(model, tokens), device)
    inputs = (x.requires_grad_(), index, weights.requires_grad_())
    gradient = torch.randn_like(x)
    layers = {name: GroupedExperts.from_experts(module, master_dtype=dtype) for name, dtype in MASTERS.items()}
    return {name: Pass(layer, inputs, gradient) for name, layer in ({"bf16": module} | layers).items()}


def linear_passes(rows: int, out_features: int, in_features: int, *, device: str = "cuda") -> dict[str, Pass]:
    """Make passes of nn.Linear ("bf16") and of FP8Linear (named by the dtype of the master weight)."""
    linear = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, out_features, device=device, dtype=torch.bfloat16)
    layers = {name: FP8Linear.from_linear(linear, master_dtype=dtype) for name, dtype in MASTERS.items()}
    return {name: Pass(layer, (x,), gradient) for name, layer in ({"bf16": linear} | layers).items()}


def largest_difference(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    return max(operands.relative_error(a, e.double()) for a, e in zip(actual, expected, strict=True))


def float32_step(of: Pass) -> tuple[Tensor, ...]:
    """Return what `Pass.step` returns for transformers' experts, computed in float32, one expert after the other."""
    module = copy.deepcopy(of.layer).float()
    module.config._experts_implementation = "eager"
    x, index, weights = (value.detach() for value in of.inputs)
    inputs = x.float().requires_grad_(), index, weights.float().requires_grad_()
    return Pass(module, inputs, of.gradient.float()).step()


def measure_memory(of: Pass) -> Memory:
    """Measure the memory of a pass without weights, inputs and output, after the weights have been quantized."""

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
    """Measure memory, difference and times of each pass. RuntimeError if a pass differs too much from "bf16"."""
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


def profile_experts(name: str, model: Model, tokens: int, *, device: str = "cuda") -> Iterator[dict]:
    """Yield a row for the whole pass, then one for each of its kernels."""
    module = transformers_experts(model, device=device)
    layer = GroupedExperts.from_experts(module, master_dtype=torch.bfloat16).train()
    del module
    x, index, weights = calls.layer_inputs(model, calls.route(model, tokens), device)
    of = Pass(layer, (x.requires_grad_(), index, weights.requires_grad_()), torch.randn_like(x))
    of.step()
    kept, peak, copies = measure_memory(of)
    forward_us, us = timing.elapsed([timing.capture(call) for call in (of.renewed_forward, of.step)])
    sizes = {"model": name, "tokens": tokens}
    floors = [sum(work.floor_us for work in half) for half in roofline.training_work(model, tokens)]
    times = {"forward_us": forward_us, "us": us, "forward_floor_us": floors[0], "floor_us": sum(floors)}
    yield {"what": "profile", **sizes, **times, "kept_bytes": kept, "peak_bytes": peak, "copy_bytes": copies}
    of.step()
    events = timing.profile(lambda: [of.step() for _ in range(PROFILES)])
    for row in kernel_rows(events, sum(roofline.training_work(model, tokens), [])):
        yield {"what": "kernel", **sizes, **row}


def kernel_rows(events: Iterable[timing.KernelEvent], work: Sequence[roofline.KernelWork]) -> list[dict]:
    """Make a row for each kernel of a pass. events: of PROFILES passes. work: that of fp8moe's kernels, in order.

    Raises RuntimeError if the passes had different kernels, or if fp8moe's kernels are not those of `work`.
    """
    ordered = sorted(events, key=lambda event: event.start_ns)
    count = len(ordered) // PROFILES
    passes = [ordered[i * count : (i + 1) * count] for i in range(PROFILES)]
    names = [[re.split(r"[<(]", event.name, maxsplit=1)[0] for event in one] for one in passes]
    if len(ordered) % PROFILES or any(each != names[0] for each in names):
        raise RuntimeError(f"expected the same kernels in each of {PROFILES} passes, recorded {len(ordered)}")
    ours = {each.kernel for each in work}
    if [name for name in names[0] if name in ours] != (known := [each.kernel for each in work]):
        raise RuntimeError(f"expected the kernels {', '.join(known)}; recorded {', '.join(names[0])}")
    left, rows = iter(work), []
    for name, *same in zip(names[0], *passes, strict=True):
        us = sum(event.duration_ns for event in same) / (1000 * PROFILES)
        one = next(left) if name in ours else None
        floor = {"of": one.of, "floor_us": one.floor_us, "x_floor": us / one.floor_us} if one else {"of": None}
        rows.append({"kernel": name, "us": us, **floor})
    return rows


def measure(only: Sequence[str] = ("experts", "linear"), profile: bool = False) -> Iterator[dict]:
    """Yield the rows of the chosen parts or, with `profile`, of the kernels of PROFILED."""
    if not profile:
        for part in only:
            yield from PARTS[part]()
        return
    for name, (model, counts) in PROFILED.items():
        for tokens in counts:
            yield from profile_experts(name, model, tokens)
            torch.cuda.empty_cache()


PARTS = {"experts": lambda: run_experts(MODEL, MODELS[MODEL], TOKENS), "linear": lambda: run_linear(*LINEAR)}
COLUMNS = ("impl", "master", "forward_us", "us", "speedup", "kept_ratio", "peak_ratio", "difference")
PROFILE_COLUMNS = {
    "profile": ("model", "tokens", "forward_us", "forward_floor_us", "us", "floor_us", "kept_bytes", "peak_bytes"),
    "kernel": ("model", "tokens", "kernel", "of", "us", "floor_us", "x_floor"),
}
# Master weights have the dtype of the bfloat16 layers
OURS = {"what": "experts", "model": MODEL, "tokens": TOKENS, "master": "bfloat16"}
SIZES = dict(zip(("rows", "out_features", "in_features"), LINEAR, strict=True))
EXPERTS, PAIR = f"experts, {MODEL}, {TOKENS} tokens", "forward and backward"
TRAINING = Benchmark(
    "training",
    measure,
    {"experts": COLUMNS, "linear": COLUMNS, **PROFILE_COLUMNS},
    [
        Bar(f"{EXPERTS}, {PAIR}, transformers' bfloat16 / ours", "speedup", 2.4, 2.7, OURS, at_least=True),
        Bar(f"{EXPERTS}, activation memory over that of bfloat16", "kept_ratio", 0.6, 0.5, OURS),
        Bar(
            *("FP8Linear ({0}, {2}) x ({1}, {2}), {3}, bfloat16 / ours".format(*LINEAR, PAIR), "speedup", 1.35, 1.5),
            *({"what": "linear", "master": "bfloat16", **SIZES}, True),
        ),
    ],
    {"only": Option(tuple(PARTS), tuple(PARTS)), "profile": Option(False)},
)

if __name__ == "__main__":
    sys.exit(TRAINING.main())
