"""Time of a refit: loading new bfloat16 weights on the GPU into an FP8 model of Qwen3-30B-A3B's sizes."""

import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from benchmarks.report import Bar, Benchmark
from benchmarks.roofline import copy_tbps
from fp8moe import FP8Linear, GroupedExperts, refit

HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY = 2048, 768, 128, 151936
ATTENTION = {"q_proj": (4096, HIDDEN), "k_proj": (512, HIDDEN), "v_proj": (512, HIDDEN), "o_proj": (HIDDEN, 4096)}
LAYERS, REPEATS = 48, 5


def fp8_model(device: str) -> nn.Module:
    """Make an FP8 model of Qwen3-30B-A3B's sizes, which is never run."""
    plain = {"bias": False, "device": device, "dtype": torch.bfloat16}

    def layer() -> nn.Module:
        linears = {name: FP8Linear(k, n, bias=False, device=device) for name, (n, k) in ATTENTION.items()}
        sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
        norm = nn.RMSNorm(HIDDEN, device=device, dtype=torch.bfloat16)
        gate = nn.Linear(HIDDEN, EXPERTS, **plain)
        return nn.ModuleDict(linears | {"gate": gate, "norm": norm, "experts": GroupedExperts(**sizes, device=device)})

    embedding = nn.Embedding(VOCABULARY, HIDDEN, device=device, dtype=torch.bfloat16)
    layers = nn.ModuleList(layer() for _ in range(LAYERS))
    return nn.ModuleDict({"embed": embedding, "layers": layers, "lm_head": nn.Linear(HIDDEN, VOCABULARY, **plain)})


def bfloat16_tensors(device: str) -> dict[str, list[tuple[str, Tensor]]]:
    """Make the named tensors of two checkpoints: with fused experts, and with separate experts.

    All layers share tensors, to fit in 80 GB.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    rest = {f"{name}.weight": drawn(*shape) for name, shape in ATTENTION.items()}
    rest |= {"gate.weight": drawn(EXPERTS, HIDDEN), "norm.weight": drawn(HIDDEN)}
    ends = {"embed.weight": drawn(VOCABULARY, HIDDEN), "lm_head.weight": drawn(VOCABULARY, HIDDEN)}
    gate_up, down = drawn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), drawn(EXPERTS, HIDDEN, INTERMEDIATE)
    kinds: dict[str, Mapping[str, Tensor]] = {
        "fused": {"experts.gate_up_proj": gate_up, "experts.down_proj": down},
        "by expert": {
            f"experts.{expert}.{name}_proj.weight": value
            for expert in range(EXPERTS)
            for name, value in zip(("gate", "up", "down"), (*gate_up[expert].chunk(2), down[expert]), strict=True)
        },
    }
    every = {
        kind: [(f"layers.{i}.{name}", value) for i in range(LAYERS) for name, value in (rest | experts).items()]
        for kind, experts in kinds.items()
    }
    return {kind: [*tensors, *ends.items()] for kind, tensors in every.items()}


def measure() -> Iterator[dict]:
    """Measure a refit in milliseconds, and its ratio to the time of a copy of as many bytes.

    first_ms: time of the first refit, which also resolves where tensors go. scratch_mb: memory that a refit takes in
    addition to the model and the new tensors.
    """
    model = fp8_model("cuda")
    for names, tensors in bfloat16_tensors("cuda").items():
        times, scratch = [], 0
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, begin = torch.cuda.memory_allocated(), time.perf_counter()
            refit(model, iter(tensors))
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
            scratch = torch.cuda.max_memory_allocated() - before
        moved = sum(value.nbytes for _, value in tensors) + sum(value.nbytes for value in model.parameters())
        first, *others = times
        ms, copy_ms = sorted(others)[len(others) // 2], moved / copy_tbps() / 1e9
        sizes = {"scratch_mb": scratch / 1e6, "largest_mb": max(value.nbytes for _, value in tensors) / 1e6}
        found = {"first_ms": first, "ms": ms, "copy_ms": copy_ms, "of_copy": ms / copy_ms}
        yield {"names": names, "tensors": len(tensors), **found, **sizes}


REFIT = Benchmark(
    "refit",
    measure,
    ("names", "tensors", "first_ms", "ms", "copy_ms", "of_copy", "scratch_mb", "largest_mb"),
    [
        Bar("refit of fused names, over copying the bytes", "of_copy", 1.3, where={"names": "fused"}),
        Bar("refit expert by expert", "ms", 500, where={"names": "by expert"}, unit="ms"),
        Bar("{names}: memory over the largest tensor", lambda row: row["scratch_mb"] / row["largest_mb"], 1),
    ],
)
