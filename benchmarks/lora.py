"""Adapters on frozen FP8 experts: `python -m benchmarks lora [--only MODEL ...] [--out DIR]`.

Compares forward and backward of two layers with the same FP8 weights, inputs and routing, for the number of tokens of a
decode step and of training. "frozen" is GroupedExperts, with gradients of its inputs only. "lora" is our LoRA layer
around it, rank 16 in bfloat16, with the gradients of all adapters too. "bf16" is peft's own on transformers' experts in
bfloat16 ("grouped_mm"). Times are measured as in `benchmarks.training`. `ratio`: the time of "lora" over the time of
"frozen"; `forward_ratio`: the same ratio for the forward alone; `speedup`: the time of "bf16" over that of the row.

`step_bytes` is peak memory during training steps, including AdamW, without FP8 weights, adapters, inputs and output.
`allowed_bytes`, the limit of `step_bytes`, is the sum of: gradients and both moments of the adapters, the memory of the
"frozen" pass, and the adapters' activations. `difference` is the largest relative Frobenius difference between output
and input gradients of "lora" and of frozen experts into which the adapters were merged. The difference is due to the
rounding of the merged weights; a large difference would show an error in the LoRA layer.
"""

import copy
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import calls, timing
from benchmarks.adapters import dequantized_experts
from benchmarks.report import Bar, Benchmark, Option
from benchmarks.shapes import MODELS, Model
from benchmarks.timing import capture
from benchmarks.training import MAX_DIFFERENCE, Pass, largest_difference
from fp8moe import GroupedExperts

CASES = ("dsv3_ep8", "qwen3_30b")
DECODED, TOKENS, RANK = 64, 8192, 16
STEPS = 3
TIMES = ("forward_us", "forward_ratio", "us", "ratio", "speedup")


class Measurement(NamedTuple):
    """Times of a pass in microseconds, and memory in bytes. allowed_bytes and difference: None without adapters."""

    forward_us: float
    us: float
    step_bytes: int
    allowed_bytes: int | None = None
    difference: float | None = None


def adapt(layer: nn.Module, rank: int) -> nn.Module:
    """Wrap experts in peft's LoRA layer, ours if they are in FP8, with nonzero values in all LoRA factors."""
    from peft import LoraConfig, get_peft_model

    from fp8moe.peft import register

    model = nn.ModuleDict({"experts": layer})
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=rank, lora_alpha=rank, target_parameters=targets, init_lora_weights=False)
    if isinstance(layer, GroupedExperts):
        config = register(config, model)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted.get_submodule("base_model.model.experts")


def passes(model: Model, tokens: int, rank: int, *, device: str = "cuda") -> dict[str, Pass]:
    """Make passes of frozen experts, of these with adapters or with merged ones, and of peft's adapters in bfloat16."""
    frozen = calls.experts_layer(calls.Operands(device), model)
    adapted = adapt(frozen, rank)
    merged = copy.deepcopy(adapted).unload_and_optionally_merge_module(True, False, None)
    x, index, weights = calls.layer_inputs(model, calls.route(model, tokens), device)
    inputs = (x.requires_grad_(), index, weights.requires_grad_())
    gradient = torch.randn_like(x)
    plain = adapt(dequantized_experts(frozen, model), rank)
    layers = {"frozen": frozen, "lora": adapted, "merged": merged, "bf16": plain}
    return {name: Pass(layer, inputs, gradient) for name, layer in layers.items()}


def adapter_bytes(model: Model, rank: int) -> int:
    """Return the bytes of all LoRA factors, in bfloat16."""
    return 2 * rank * model.experts * (2 * model.hidden + 3 * model.intermediate)


def activation_bytes(model: Model, tokens: int, rank: int) -> int:
    """Return the bytes of the adapters' temporaries in a step.

    These are scaled LoRA factors, their transposes, and low-rank activations of rows.
    """
    return 3 * adapter_bytes(model, rank) + 16 * tokens * model.top_k * rank


def measure_step(of: Pass) -> int:
    """Return the peak bytes that training steps allocate in addition to what was allocated before the first step.

    The bytes of the output do not count.
    """
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
    """Return the difference between the results of "lora" and "merged". RuntimeError if the difference is too large."""

    def results(of: Pass) -> tuple[Tensor, ...]:
        out = of.forward()
        return out.detach(), *torch.autograd.grad(out, of.inputs[::2], of.gradient)

    difference = largest_difference(results(passes["lora"]), results(passes["merged"]))
    if not difference <= MAX_DIFFERENCE:
        raise RuntimeError(f"adapters: {difference:.2e} from merged weights, must be <= {MAX_DIFFERENCE}")
    return difference


def step(of: Pass) -> tuple[Tensor, ...]:
    """Run forward and backward; return all gradients."""
    return torch.autograd.grad(of.forward(), of.leaves, of.gradient)


def measure(name: str, *, tokens: int = TOKENS, rank: int = RANK) -> dict[str, Measurement]:
    """Check adapters on a model's experts, then measure the experts with adapters and without."""
    model = MODELS[name]
    found = passes(model, tokens, rank)
    difference = check(found)
    del found["merged"]
    memory = {impl: measure_step(of) for impl, of in found.items()}
    allowed = 3 * adapter_bytes(model, rank) + memory["frozen"] + activation_bytes(model, tokens, rank)
    replays = [capture(call) for of in found.values() for call in (of.forward, lambda of=of: step(of))]
    times = iter(timing.elapsed(replays))
    measured = {impl: Measurement(next(times), next(times), memory[impl]) for impl in found}
    return measured | {"lora": measured["lora"]._replace(allowed_bytes=allowed, difference=difference)}


def make_rows(name: str, measured: Mapping[str, Measurement], *, tokens: int = TOKENS, rank: int = RANK) -> list[dict]:
    """Make a row for each implementation, with ratios to the times of "frozen"."""
    frozen, plain = measured["frozen"], measured["bf16"]
    size = {"what": "experts", "model": name, **MODELS[name]._asdict(), "tokens": tokens, "rank": rank}
    return [
        size
        | {"impl": impl, "ratio": found.us / frozen.us, "forward_ratio": found.forward_us / frozen.forward_us}
        | {"speedup": plain.us / found.us}
        | found._asdict()
        for impl, found in measured.items()
    ]


def memory_ratio(row: dict) -> float:
    """Return the ratio of `step_bytes` to `allowed_bytes`, its limit."""
    return row["step_bytes"] / row["allowed_bytes"]


WHAT = "LoRA on the experts, {model}, {tokens} tokens, rank {rank}"
OURS = {"impl": "lora", "tokens": TOKENS}
LORA = Benchmark(
    "lora",
    lambda only=CASES: [
        row
        for name in only
        for tokens in (DECODED, TOKENS)
        for row in make_rows(name, measure(name, tokens=tokens), tokens=tokens)
    ],
    {"experts": ("model", "tokens", "impl", *TIMES, "step_bytes", "allowed_bytes", "difference")},
    [
        Bar(f"{WHAT}, forward and backward / those of frozen experts", "ratio", 1.35, where=OURS),
        Bar(f"{WHAT}, time of peft's in bfloat16 / ours", "speedup", 1.6, where=OURS, at_least=True),
        Bar(f"{WHAT}, memory / adapters, optimizer and activations", memory_ratio, 1.0, where=OURS),
    ],
    {"only": Option(CASES, CASES)},
)

if __name__ == "__main__":
    sys.exit(LORA.main())
