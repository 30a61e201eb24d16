"""Adapters on frozen FP8 experts: `python -m benchmarks.lora [--only MODEL ...] [--out DIR]`.

Forward and backward of GroupedExperts, "frozen", whose gradients are those of its inputs, and of our LoRA layer around
it, "lora", rank 16 in bfloat16, with the gradients of all adapters beside them: the same FP8 weights, inputs and
routing. As in `benchmarks.training` times are of the replay of a CUDA graph, by CUDA events and with a cold L2:
`us`, and `forward_us` of the forward alone, for the tokens of a decode step and of training. `ratio` is "lora" over
"frozen", `forward_ratio` of the forward; less is better.

`step_bytes` is the largest amount of memory during training steps, AdamW's included, beside the FP8 weights, adapters,
inputs and output. `allowed_bytes` is what it may be: gradients and both moments of the adapters, what the frozen pass
takes, and the activations of the adapters. `difference` is the largest relative Frobenius difference of output and
input gradients from those of frozen experts into which the adapters were merged: what rounding that sum costs, and a
check of the pass.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import command, operands, timing
from benchmarks.report import Threshold, format_kinds, select
from benchmarks.shapes import MODELS, Model
from benchmarks.timing import capture
from benchmarks.training import MAX_DIFFERENCE, Pass, largest_difference
from fp8moe import GroupedExperts

CASES = ("dsv3_ep8", "qwen3_30b")
DECODED, TOKENS, RANK = 64, 8192, 16
STEPS = 3
_TIMES = ("forward_us", "forward_ratio", "us", "ratio")
COLUMNS = {"experts": ("model", "tokens", "impl", *_TIMES, "step_bytes", "allowed_bytes", "difference")}


class Measurement(NamedTuple):
    """One pass: times in microseconds, memory in bytes. Where there are no adapters, the last two are None."""

    forward_us: float
    us: float
    step_bytes: int
    allowed_bytes: int | None = None
    difference: float | None = None


def adapt(layer: GroupedExperts, rank: int) -> nn.Module:
    """peft's LoRA layer around it, with values in all factors."""
    from peft import LoraConfig, get_peft_model

    from fp8moe.peft import register

    model = nn.ModuleDict({"experts": layer})
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=rank, lora_alpha=rank, target_parameters=targets, init_lora_weights=False)
    adapted = get_peft_model(model, register(config, model), autocast_adapter_dtype=False)
    return adapted.get_submodule("base_model.model.experts")


def passes(model: Model, tokens: int, rank: int, *, device: str = "cuda") -> dict[str, Pass]:
    """Of frozen experts, of the same with adapters, and of others into which these were merged."""
    frozen = operands.experts_layer(model, device=device)
    adapted = adapt(frozen, rank)
    merged = copy.deepcopy(adapted).unload_and_optionally_merge_module(True, False, None)
    x, index, weights = operands.experts_inputs(model, operands.route(model, tokens), device=device)
    inputs = (x.requires_grad_(), index, weights.requires_grad_())
    gradient = torch.randn_like(x)
    layers = {"frozen": frozen, "lora": adapted, "merged": merged}
    return {name: Pass(layer, inputs, gradient) for name, layer in layers.items()}


def adapter_bytes(model: Model, rank: int) -> int:
    """Of all factors, in bfloat16."""
    return 2 * rank * model.experts * (2 * model.hidden + 3 * model.intermediate)


def activation_bytes(model: Model, tokens: int, rank: int) -> int:
    """What adapters take beside themselves in a step: scaled copies of the factors and their transposes, and the ranks
    of rows, kept and for a time."""
    return 3 * adapter_bytes(model, rank) + 16 * tokens * model.top_k * rank


def measure_step(of: Pass) -> int:
    """The largest amount of memory in a training step beside what there is before the first, and its output."""
    parameters = [value for value in of.layer.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True) if parameters else None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        out = of.forward()
        out.backward(of.gradient, inputs=list(of.leaves))
        if optimizer is not None:
            optimizer.step()
        for leaf in of.leaves:
            leaf.grad = None
    return torch.cuda.max_memory_allocated() - before - out.nbytes


def check(passes: Mapping[str, Pass]) -> float:
    """The difference of "lora" from "merged". RuntimeError if it is too large."""

    def results(of: Pass) -> tuple[Tensor, ...]:
        out = of.forward()
        return out.detach(), *torch.autograd.grad(out, of.inputs[::2], of.gradient)

    difference = largest_difference(results(passes["lora"]), results(passes["merged"]))
    if not difference <= MAX_DIFFERENCE:
        raise RuntimeError(f"adapters: {difference:.2e} from merged weights, must be <= {MAX_DIFFERENCE}")
    return difference


def step(of: Pass) -> tuple[Tensor, ...]:
    """A forward and a backward, with all gradients."""
    return torch.autograd.grad(of.forward(), of.leaves, of.gradient)


def measure(name: str, *, tokens: int = TOKENS, rank: int = RANK) -> dict[str, Measurement]:
    model = MODELS[name]
    found = passes(model, tokens, rank)
    difference = check(found)
    del found["merged"]
    memory = {impl: measure_step(of) for impl, of in found.items()}
    allowed = 3 * adapter_bytes(model, rank) + memory["frozen"] + activation_bytes(model, tokens, rank)
    calls = [capture(call) for of in found.values() for call in (of.forward, lambda of=of: step(of))]
    times = iter(timing.elapsed(calls))
    measured = {impl: Measurement(next(times), next(times), memory[impl]) for impl in found}
    return measured | {"lora": measured["lora"]._replace(allowed_bytes=allowed, difference=difference)}


def make_rows(name: str, measured: Mapping[str, Measurement], *, tokens: int = TOKENS, rank: int = RANK) -> list[dict]:
    """A row for each implementation."""
    frozen = measured["frozen"]
    size = {"what": "experts", "model": name, **MODELS[name]._asdict(), "tokens": tokens, "rank": rank}
    return [
        size
        | {"impl": impl, "ratio": found.us / frozen.us, "forward_ratio": found.forward_us / frozen.forward_us}
        | found._asdict()
        for impl, found in measured.items()
    ]


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    found = []
    for row in select(rows, "experts"):
        if row["impl"] != "lora" or row["tokens"] != TOKENS:
            continue
        what = f"LoRA on the experts, {row['model']}, {row['tokens']} tokens, rank {row['rank']}"
        found.append(Threshold(f"{what}, forward and backward / those of frozen experts", row["ratio"], 1.35))
        memory = row["step_bytes"] / row["allowed_bytes"]
        found.append(Threshold(f"{what}, memory / adapters, optimizer and activations", memory, 1.0))
    return found


def run(models: Sequence[str] = CASES) -> dict:
    """Checks and times adapters on the experts of models; {"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    cases = [(name, tokens) for name in models for tokens in (DECODED, TOKENS)]
    rows = [row for name, tokens in cases for row in make_rows(name, measure(name, tokens=tokens), tokens=tokens)]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("lora", "adapters on frozen experts")
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), metavar="MODEL")
    args = parser.parse_args(argv)
    result = run(args.only)
    command.finish(args.out / "lora.json", result, *format_kinds(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
