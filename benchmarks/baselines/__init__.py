"""What fp8moe is compared with, stored with the method that measured it.

- `same_run.json`: fp8moe at revision c94a80b, DeepGEMM and cuBLAS on the same operands, called in turn in one run on
  one GPU; medians. Every table, picture and threshold that compares kernels or the experts layer with DeepGEMM or
  cuBLAS takes its times from here.
- `h200_means.json`: what that run lacks: the experts of transformers in bfloat16, DeepGEMM's CPU time, the bandwidth of
  a copy, the time of reading a weight. These are means of another run. Its short kernels came out 1 to 1.5 us too
  long and are left out, but for the last, with which means are compared.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

SAME_RUN, MEANS = (Path(__file__).with_name(name) for name in ("same_run.json", "h200_means.json"))

# (n, k) of the linears of DeepSeek-V3.
DENSE_SHAPES = (
    (2112, 7168),
    (576, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
)
DENSE_M = (1, 16, 64, 128, 512, 4096)
# What names a case of each op. `experts` is the experts layer of one of MODELS.
SIZES = {
    "gemm": ("m", "n", "k"),
    "grouped_gemm": ("groups", "mean_rows", "n", "k"),
    "grouped_gemm_masked": ("groups", "mean_rows", "n", "k"),
    "grouped_gemm_k": ("groups", "m", "n", "total_k"),
    "mqa_logits": ("s", "t"),
    "paged_mqa_logits": ("batch", "context", "next_n"),
    "experts": ("model", "tokens"),
}


class Model(NamedTuple):
    """The experts of one layer of a model."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


MODELS = {
    "dsv3_ep8": Model(7168, 2048, 32, 8),
    "qwen3_30b": Model(2048, 768, 128, 8),
    "qwen3_235b": Model(4096, 1536, 128, 8),
    "dsv3": Model(7168, 2048, 256, 8),
}


@dataclass(frozen=True)
class Case:
    """One case of the run: what was called, and the median microseconds of each implementation, such as "deep_gemm"."""

    op: str
    device: str
    sizes: Mapping[str, int | str]
    medians: Mapping[str, float]
    expected_m: int | None = None  # of grouped_gemm_masked

    @property
    def has_yardstick(self) -> bool:
        return "cublas_per_tensor" in self.medians

    def us(self, name: str) -> float:
        """Median of one implementation; LookupError that names the case if it has none."""
        if name not in self.medians:
            known = ", ".join(self.medians)
            raise LookupError(f"{_describe(self.op, self.device, *self.sizes.values())} has no {name}, only {known}")
        return self.medians[name]

    def ratio(self, name: str = "deep_gemm", ours: str = "fp8moe") -> float:
        """Its time over ours, both of this run: above 1 we are faster."""
        return self.us(name) / self.us(ours)

    def over(self, us: float, name: str = "deep_gemm", yardstick_us: float | None = None) -> float:
        """Its time over `us`, which was measured elsewhere.

        yardstick_us: time of `operands.yardstick` beside `us`. It stands for the stored time of the same, and so for
        what differs between the GPUs and between the rows that groups were given.
        """
        scale = 1.0 if yardstick_us is None else yardstick_us / self.us("cublas_per_tensor")
        return scale * self.us(name) / us


def device(gpu: str) -> str:
    """What the run calls a GPU of this name: "H100" or "H200". LookupError for one that it was not made on."""
    for known in ("H100", "H200"):
        if known in gpu:
            return known
    raise LookupError(f"{SAME_RUN.name} has nothing of {gpu}, only of H100 and H200")


def cases(op: str, device: str = "H200") -> list[Case]:
    """All cases of an op, in the order of the file; LookupError if there are none."""
    found = [case for (key_op, key_device, *_), case in _same_run().items() if (key_op, key_device) == (op, device)]
    if not found:
        raise LookupError(f"{SAME_RUN.name} has no {op!r} on {device!r}")
    return found


def find(op: str, *sizes: int | str, device: str = "H200") -> Case:
    """The case with these SIZES; LookupError that names it if it was not measured."""
    if (case := get(op, *sizes, device=device)) is None:
        raise LookupError(f"{SAME_RUN.name} has no {_describe(op, device, *sizes)}")
    return case


def get(op: str, *sizes: int | str, device: str | None = None) -> Case | None:
    """The case with these SIZES on the GPU that is here, or on `device`; None if it was not measured there."""
    return _same_run().get((op, device or here(), *sizes))


def here() -> str:
    """The GPU whose baselines hold here: the one that is here, or an H200 on a machine without one."""
    return device(torch.cuda.get_device_name()) if torch.cuda.is_available() else "H200"


def active_experts(model: str, tokens: int) -> int | None:
    """How many experts were in use in the stored case of `experts`, or else in that of `bf16_experts_us`; or None."""
    if case := get("experts", model, tokens, device="H200"):
        one_token = find("experts", model, 1).us("weight_read_floor")  # of top_k experts
        return round(MODELS[model].top_k * case.us("weight_read_floor") / one_token)
    row = _bf16_experts().get((model, tokens))
    return row and row["active_experts"]


def bf16_experts(model: str) -> dict[int, float]:
    """Microseconds of a CUDA graph of transformers' experts in bfloat16 on "grouped_mm" by tokens, means."""
    return {tokens: row["graph_us"] for (name, tokens), row in _bf16_experts().items() if name == model}


def bf16_experts_us(model: str, tokens: int, active_experts: int) -> float | None:
    """One of these; None if it was not measured on the GPU that is here, or with other than `active_experts` in use.

    Few tokens take as long as reading the weights of their experts.
    """
    row = _bf16_experts().get((model, tokens)) if here() == "H200" else None
    return row["graph_us"] if row and row["active_experts"] == active_experts else None


def deep_gemm_host_us(n: int, k: int) -> float:
    """Mean CPU microseconds of one eager GEMM of DeepGEMM on one row; LookupError if it was not measured."""
    for row in _means()["rows"]:
        if row["op"] == "gemm, host time of deep_gemm" and (row["n"], row["k"]) == (n, k):
            return row["host_us"]
    raise LookupError(f"{MEANS.name} has no host time of deep_gemm with n={n}, k={k}")


def reading_us(n: int, k: int) -> float | None:
    """Mean microseconds of a kernel that does nothing but read an (n, k) FP8 weight; or None.

    1 to 1.5 us too long, as means of short kernels are: to be compared with means.
    """
    for row in _means()["rows"]:
        if row["op"] == "reading the weight" and (row["n"], row["k"]) == (n, k):
            return row["us"]
    return None


COPY_BYTES, COPIES = 512 << 20, 10


@functools.cache
def copy_tbps() -> float:
    """Bandwidth of a large copy on the GPU that is here in TB/s, bytes read plus bytes written, the best of COPIES.

    Without a GPU that of the H200, as it was measured once.
    """
    if not torch.cuda.is_available():
        return _means()["meta"]["copy_TBps"]
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * COPY_BYTES / min(times) / 1e9


@functools.cache
def _same_run() -> dict[tuple, Case]:
    found = {}
    for row in json.loads(SAME_RUN.read_text())["rows"]:
        sizes = {name: row[name] for name in SIZES[row["op"]]}
        medians = {name.removesuffix("_us"): us for name, us in row.items() if name.endswith("_us")}
        case = Case(row["op"], row["device"], sizes, medians, row.get("expected_m"))
        found[case.op, case.device, *sizes.values()] = case
    return found


@functools.cache
def _means() -> dict:
    return json.loads(MEANS.read_text())


@functools.cache
def _bf16_experts() -> dict[tuple[str, int], dict]:
    rows = (row for row in _means()["rows"] if row["op"] == "experts, transformers bf16 grouped_mm")
    return {(row["model"], row["tokens"]): row for row in rows}


def _describe(op: str, device: str, *sizes: int | str) -> str:
    return ", ".join([op, *(f"{name}={size}" for name, size in zip(SIZES[op], sizes, strict=True))]) + f" on {device}"
