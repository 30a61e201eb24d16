"""Lower bounds of times, from memory bandwidth and tensor cores; predicted times on more GPUs, from times on two."""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from benchmarks.report import select
from benchmarks.shapes import Model
from fp8moe.quant.formats import BLOCK, ceil_div

TFLOPS = 1490.0  # what cuBLAS reaches on FP8 tensor cores in a GEMM with m = n = k = 8192
SUSTAINED_TFLOPS = 1450.0  # what FP8 tensor cores sustain in the products of a training step
COPY_TBPS = 4.21  # bandwidth of a copy on an H200, bytes read plus written
COPY_BYTES, COPIES = 512 << 20, 10
NODE = 8  # GPUs of a node, connected by NVLink
# Assumed between nodes: the bandwidth of a 400 Gb/s adapter for each GPU, used at 90%, and the extra time of a
# collective.
NETWORK_GBPS = 45.0
NETWORK_US = 20.0
RANKS = (8, 64)
FEW, MANY = 1, 4096  # tokens on each rank; the predictions use the times measured with these two numbers of tokens
# Maps methods of `benchmarks.distributed` to the number of collectives that each uses.
COLLECTIVES = {"gather": 2, "gather, NCCL": 2, "all_to_all, eager": 3, "all_to_all, exact, eager": 3}
METHODS = ("gather", "all_to_all, eager", "all_to_all, exact, eager")


@functools.cache
def copy_tbps() -> float:
    """Return the bandwidth of the fastest of COPIES large copies on this GPU, in TB/s of bytes read plus written.

    Without a GPU, return COPY_TBPS.
    """
    if not torch.cuda.is_available():
        return COPY_TBPS
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


def sparse_least_ms(tokens: int) -> tuple[float, float, float]:
    """Return lower bounds in ms for the scores, the choice and the attention of a prompt in a layer of DeepSeek-V3.2.

    64 heads of 128 values in FP8 score each key, scores and the 2048 choices take 4 bytes each, and 128 heads attend to
    latents of 576 values, 512 of them the value, in bfloat16, at half of the operations a second.
    """
    pairs, seen = tokens * (tokens + 1) / 2, sum(min(token, 2048) for token in range(1, tokens + 1))
    choice = 4 * (pairs + 2048 * tokens) / COPY_TBPS
    return 2 * 64 * 128 * pairs / TFLOPS / 1e9, choice / 1e9, 2 * 128 * (576 + 512) * seen / (TFLOPS / 2) / 1e9


def dense_least_ms(tokens: int) -> float:
    """Return a lower bound in ms for causal attention of 128 heads with keys of 192 values and values of 128."""
    return 2 * 128 * (192 + 128) * tokens * (tokens + 1) / 2 / (TFLOPS / 2) / 1e9


FP8_BYTES, MXFP4_BYTES = 1 + 4 / 128**2, 0.5 + 1 / 32  # of a weight, with its share of a scale


def least_us(model: Model, tokens: int, active: float, tbps: float, weight_bytes: float = FP8_BYTES) -> list[float]:
    """Return lower bounds in microseconds for the times of permute, GEMM 1, GEMM 2 and combine.

    Each bound is the larger of bytes over `tbps` (TB/s) and operations over TFLOPS. active: the number of experts in
    use. weight_bytes: bytes of a weight.
    """
    hidden, intermediate, _, top_k = model
    rows, fp8 = tokens * top_k, 1 + 4 / 128  # fp8: bytes of an E4M3 value with its share of a 1x128 scale
    weight = hidden * intermediate * active * weight_bytes
    moved = (
        2 * tokens * hidden + fp8 * rows * hidden,
        2 * weight + fp8 * rows * (hidden + intermediate),
        weight + rows * (fp8 * intermediate + 2 * hidden),
        2 * (rows + tokens) * hidden,
    )
    flops = (0, 4 * rows * hidden * intermediate, 2 * rows * hidden * intermediate, 0)
    pairs = zip(moved, flops, strict=True)
    return [max(size / tbps, work / TFLOPS) / 1e6 for size, work in pairs]


class KernelWork(NamedTuple):
    """The least work of one kernel: bytes read and written, each once, and operations of tensor cores."""

    kernel: str
    of: str
    bytes: float
    flops: float = 0

    @property
    def floor_us(self) -> float:
        """Return a lower bound in microseconds: bytes at the rate of a copy, operations at SUSTAINED_TFLOPS."""
        return max(self.bytes / copy_tbps(), self.flops / SUSTAINED_TFLOPS) / 1e6


def training_work(model: Model, tokens: int) -> tuple[list[KernelWork], list[KernelWork]]:
    """Return the work of fp8moe's kernels in forward and backward of an experts layer, each in the order of launches.

    The layer trains bfloat16 masters, which the forward quantizes; all inputs get gradients. Every expert is in use.
    Padding of groups is left out.
    """
    hidden, size, experts, top_k = model
    rows = tokens * top_k
    fp8, block = 1 + 4 / BLOCK, 1 + 4 / BLOCK**2  # bytes of a value with its share of a scale of 1x128, of 128x128
    down, up = experts * hidden * size, 2 * experts * hidden * size  # values of the weights
    x, wide, narrow, mid = tokens * hidden, rows * hidden, rows * size, 2 * rows * size
    forward = [
        KernelWork("quantize_128x128", "gate_up_proj, both ways", (2 + 2 * block) * up),
        KernelWork("quantize_128x128", "down_proj, both ways", (2 + 2 * block) * down),
        KernelWork("sort_by_expert", "routing", 12 * rows),
        KernelWork("permute_quantize", "tokens", 2 * x + fp8 * wide),
        KernelWork(
            "gemm", "gate_up_proj, activation", block * up + fp8 * (wide + narrow) + 2 * mid, 2 * wide * 2 * size
        ),
        KernelWork("gemm", "down_proj", block * down + fp8 * narrow + 2 * wide, 2 * wide * size),
        KernelWork("combine", "result", 2 * wide + 2 * x),
    ]
    backward = [
        KernelWork("assigned_rows", "routing", 16 * rows),
        KernelWork("quantize_transpose", "gradient, both ways", 2 * x + 2 * fp8 * wide),
        KernelWork("gemm", "gradient of the activation", block * down + fp8 * wide + 2 * narrow, 2 * wide * size),
        KernelWork(
            *("swiglu_backward_quantize", "activation, gradient both ways"),
            2 * (mid + narrow) + 2 * fp8 * mid + block * narrow + 8 * rows,
        ),
        KernelWork("gemm_k", "gradient of down_proj", fp8 * wide + block * narrow + 2 * down, 2 * wide * size),
        KernelWork("gemm", "gradient of rows", block * up + fp8 * mid + 2 * wide, 2 * wide * 2 * size),
        KernelWork("combine", "gradient of tokens", 2 * wide + 2 * x),
        KernelWork("quantize_transpose", "tokens, by columns", 2 * x + block * wide),
        KernelWork("gemm_k", "gradient of gate_up_proj", fp8 * mid + block * wide + 2 * up, 2 * wide * 2 * size),
    ]
    return forward, backward


def sent_bytes(model: Model, method: str, ranks: int) -> float:
    """Return the mean bytes that a rank sends to each other rank per token, with even routing.

    method: a method of `benchmarks.distributed`. A quantized token is sent with its scales and routing. Each rank that
    got the token returns one float32 row; with exact=True, it instead returns a bfloat16 row for each of the
    token's experts on this rank. Tokens go only to ranks that have one of their experts, with two exceptions: gather
    over NCCL sends tokens to all ranks, and gather within a node sends the routing to all ranks.
    """
    token, routing = model.hidden + 4 * ceil_div(model.hidden, BLOCK), 8 * model.top_k
    if method == "gather, NCCL":
        return token + routing + 4 * model.hidden
    share = model.experts // ranks
    needed = 1 - math.comb(model.experts - share, model.top_k) / math.comb(model.experts, model.top_k)
    back = 2 * model.hidden * model.top_k / ranks if "exact" in method else 4 * model.hidden * needed
    return needed * token + routing * (1 if method == "gather" else needed) + back


def predicted(rows: Iterable[dict], model: Model) -> list[dict]:
    """Predict rows of `benchmarks.distributed` for each number of ranks in RANKS, from its rows for two ranks.

    Returns no rows if the times with FEW or MANY tokens are missing.

    The predicted time of a call is the sum of three times:

    - Experts: the time of `local` on two ranks, scaled by the ratio of the bounds that `least_us` gives. With
      more ranks, a rank computes as many rows as with two, but has fewer experts.
    - Bytes: the larger of two times that overlap: sending to ranks of the same node at the bandwidth that gather
      reaches between FEW and MANY tokens, and sending to all other ranks at NETWORK_GBPS.
    - Fixed: the time measured on two ranks, minus the times for experts and bytes on two ranks. It is measured with FEW
      tokens for gather, with MANY tokens for all_to_all. With FEW tokens all_to_all waits for the host, so its
      predicted time is at least the time measured with FEW tokens. Each collective between nodes adds NETWORK_US.
    """
    us = {(row["method"], row["tokens"]): row["us"] for row in select(rows, "layer")}
    if not {(name, tokens) for name in ("local", *COLLECTIVES) for tokens in (FEW, MANY)} <= us.keys():
        return []
    beyond = {(name, tokens): value - us["local", tokens] for (name, tokens), value in us.items()}
    found = []
    for ranks in RANKS:
        near = min(ranks, NODE) - 1
        far = ranks - 1 - near
        for tokens in sorted({tokens for _, tokens in us}):
            local = us["local", tokens] * _least_of_rank(model, tokens, ranks) / _least_of_rank(model, tokens, 2)
            found.append(_row(ranks, tokens, "local", local, local))
            for method in METHODS:
                way = "gather" if method == "gather" and not far else "gather, NCCL"
                a_byte = (beyond[way, MANY] - beyond[way, FEW]) / ((MANY - FEW) * sent_bytes(model, way, 2))
                known, count, least = (way, FEW, 0) if method == "gather" else (method, MANY, us[method, FEW])
                fixed = beyond[known, count] - count * sent_bytes(model, known, 2) * a_byte
                fixed += NETWORK_US * COLLECTIVES[method] if far else 0
                sent = tokens * sent_bytes(model, known, ranks)
                total = local + fixed + max(near * sent * a_byte, far * sent / (1e3 * NETWORK_GBPS))
                found.append(_row(ranks, tokens, method, max(total, least), local))
    return found


def _least_of_rank(model: Model, tokens: int, ranks: int) -> float:
    """Return a lower bound for the time of one rank's experts, in microseconds, with even routing."""
    in_use = model.experts / ranks * (1 - (1 - model.top_k / model.experts) ** (ranks * tokens))
    return sum(least_us(model, tokens, in_use, copy_tbps()))


def _row(ranks: int, tokens: int, method: str, us: float, local: float) -> dict:
    return {"what": "predicted", "ranks": ranks, "tokens": tokens, "method": method, "us": us, "over_local": us / local}
