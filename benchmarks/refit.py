"""New weights of Qwen3-30B-A3B's sizes into an FP8 model, against copying the bytes: `python -m benchmarks.refit`.

bfloat16 tensors on the GPU, fused or expert by expert. Both models do not fit into 80 GB: those of one layer serve for
all. Times are of the host, from the call to a device that is done; the first, which finds where tensors go, is apart.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.report import Threshold, format_table
from benchmarks.roofline import copy_tbps
from fp8moe import FP8Linear, GroupedExperts, refit

HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY = 2048, 768, 128, 151936
ATTENTION = {"q_proj": (4096, HIDDEN), "k_proj": (512, HIDDEN), "v_proj": (512, HIDDEN), "o_proj": (HIDDEN, 4096)}
LAYERS, REPEATS = 48, 5
COLUMNS = ("names", "tensors", "first_ms", "ms", "copy_ms", "of_copy", "scratch_mb", "largest_mb")


def make_model(device: str) -> nn.Module:
    """An FP8 model of these sizes, never run."""
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


def make_tensors(device: str) -> dict[str, list[tuple[str, Tensor]]]:
    """The checkpoint by its names, fused or by expert."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    rest = {f"{name}.weight": random(*shape) for name, shape in ATTENTION.items()}
    rest |= {"gate.weight": random(EXPERTS, HIDDEN), "norm.weight": random(HIDDEN)}
    ends = {"embed.weight": random(VOCABULARY, HIDDEN), "lm_head.weight": random(VOCABULARY, HIDDEN)}
    gate_up, down = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN), random(EXPERTS, HIDDEN, INTERMEDIATE)
    fused = {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    single: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        gate, up = gate_up[expert].chunk(2)
        values = {"gate": gate, "up": up, "down": down[expert]}
        single |= {f"experts.{expert}.{name}_proj.weight": value for name, value in values.items()}

    def of_all_layers(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for layer in range(LAYERS):
            yield from ((f"layers.{layer}.{name}", value) for name, value in tensors.items())
        yield from ends.items()

    return {"fused": [*of_all_layers(rest | fused)], "by expert": [*of_all_layers(rest | single)]}


def measure(model: nn.Module, names: str, tensors: Sequence[tuple[str, Tensor]]) -> dict:
    """A row of COLUMNS; scratch_mb: the memory that a refit takes beside the model and the tensors."""
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
    times_of = {"first_ms": first, "ms": ms, "copy_ms": copy_ms, "of_copy": ms / copy_ms}
    return {"names": names, "tensors": len(tensors), **times_of, **sizes}


def thresholds(rows: Iterable[dict]) -> Iterator[Threshold]:
    for row in rows:
        if row["names"] == "fused":
            yield Threshold("refit of fused names, over copying the bytes", row["of_copy"], 1.3)
        else:
            yield Threshold("refit expert by expert", row["ms"], 500, unit="ms")
        yield Threshold(f"{row['names']}: memory over the largest tensor", row["scratch_mb"] / row["largest_mb"], 1)


def run() -> dict:
    gpu = command.start()
    model = make_model("cuda")
    rows = [measure(model, names, tensors) for names, tensors in make_tensors("cuda").items()]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    args = command.parser("refit", "new weights into an FP8 model").parse_args(argv)
    result = run()
    command.finish(args.out / "refit.json", result, format_table(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
