"""Times of other libraries on an H200, stored in `h200.json` with the method that measured them."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("h200.json")

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
EXPERTS_TOKENS = (1, 8, 32, 128, 512, 2048, 8192)


class Grouped(NamedTuple):
    """A grouped GEMM of DeepGEMM: microseconds, and 1e12 operations/s over the rows that are in a group."""

    us: float
    tflops: float


class Model(NamedTuple):
    """The experts of one layer of a model."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


@functools.cache
def load() -> dict:
    """The stored file: `meta` (machine, versions, method, ceilings) and `rows`, one measurement each."""
    return json.loads(PATH.read_text())


def copy_tbps() -> float:
    """Bandwidth of a large device copy in TB/s, bytes read plus bytes written."""
    return load()["meta"]["copy_TBps"]


def dense(impl: str, field: str = "us") -> dict[tuple[int, int, int], float]:
    """`field` (microseconds by default) of one library's dense GEMM by (m, n, k), where it was measured.

    `impl` is "deep_gemm" or "cublas_block" (one scale per 128x128 or 1x128 block); `field` may also be "host_us", the
    CPU time of one call.
    """
    rows = (row for row in load()["rows"] if row["op"] == "dense" and row["impl"] == impl)
    return {(row["m"], row["n"], row["k"]): row[field] for row in rows if field in row}


def stream_floor() -> dict[tuple[int, int], float]:
    """The least time in microseconds in which a kernel can read an (n, k) FP8 weight, by (n, k)."""
    return {(row["n"], row["k"]): row["us"] for row in load()["rows"] if row["op"] == "stream_floor"}


def grouped(op: str) -> dict[tuple[int, int, int, int], Grouped]:
    """DeepGEMM's "grouped_contiguous" or "grouped_masked" by (groups, mean rows of a group, n, k).

    It pads each group of the former to a multiple of 128 rows, which take time but do not count as operations here.
    """
    return {
        (row["groups"], row["mean_m"], row["n"], row["k"]): Grouped(
            row["us"], row["tflops_valid_rows"] if op == "grouped_contiguous" else row["tflops"]
        )
        for row in load()["rows"]
        if row["op"] == op
    }


def grouped_k() -> dict[tuple[int, int, int, int], Grouped]:
    """DeepGEMM's GEMM along the rows of each group by (groups, m, n, sum of the rows of all groups)."""
    return {
        (row["groups"], row["m"], row["n"], row["total_k"]): Grouped(row["us"], row["tflops"])
        for row in load()["rows"]
        if row["op"] == "grouped_k"
    }


def mqa() -> dict[tuple[int, int, int, int], float]:
    """Microseconds of DeepGEMM's index scores of a causal prefill by (q_tokens, kv_tokens, heads, head_dim)."""
    return _mqa("mqa_logits", "q_tokens", "kv_tokens", "heads", "head_dim")


def paged_mqa() -> dict[tuple[int, int, int, int, int], float]:
    """The same over a paged cache with blocks of 64 tokens by (batch, context, next_n, heads, head_dim)."""
    return _mqa("paged_mqa_logits", "batch", "context", "next_n", "heads", "head_dim")


def _mqa(op: str, *fields: str) -> dict[tuple[int, ...], float]:
    rows = (row for row in load()["rows"] if row["op"] == op)
    return {tuple(row[field] for field in fields): row["us"] for row in rows}


def models() -> dict[str, Model]:
    """The models whose experts were measured, by name."""
    rows = (row for row in load()["rows"] if row["op"] == "experts_layer")
    return {row["model"]: Model(*(row[field] for field in Model._fields)) for row in rows}


def experts(impl: str) -> dict[tuple[str, int], dict]:
    """The rows of one implementation of an experts layer by (model, tokens).

    `impl` is "transformers+deepgemm" or "transformers bf16 grouped_mm". In microseconds: `kernels_us`, the sum of the
    kernels; `graph_us`, the replay of a CUDA graph; `eager_us`; and of the first `two_gemms_us`, its two GEMMs alone,
    with `active_experts` of the experts in use.
    """
    rows = (row for row in load()["rows"] if row["op"] == "experts_layer" and row["impl"] == impl)
    return {(row["model"], row["tokens"]): row for row in rows}
