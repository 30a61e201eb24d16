"""Index scores beside `benchmarks.peers`: `python -m benchmarks.mqa [--only PART ...] [--out DIR]`.

- `paged_mqa_logits`: decoding over a paged cache with shuffled blocks, a long context among short ones, and as many
  tokens in equal contexts. `gbps` counts keys with their scales, logits and queries.
- `uneven`: for the former the time over that of its bytes at the bandwidth of EVEN (`over_bytes`), and over the time of
  the equal contexts, which move the same bytes (`over_even`).
- `append_kv`: quantizing keys into the cache, against the bandwidth of a copy.
- `topk`: torch.topk of such logits, with sorted values and without.
- `overlap`: share of the top-k keys by float32 scores of unquantized queries and keys that FP8 picks too: normal data.

`floor_us` is the larger of bytes at the bandwidth of a copy and operations at TFLOPS. Everything is checked before it
is timed: all entries for being finite or -inf where they must be, a sample of rows against float64 over the quantized
operands, appended keys against quantize_1x128.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import command, timing
from benchmarks.mqa_cases import (
    MAX_ERROR,
    Batch,
    blocks_of,
    filled_cache,
    paged_work,
    prepare_append,
    prepare_paged,
    quantized_keys,
    scores,
)
from benchmarks.report import Threshold, format_kinds, select
from benchmarks.roofline import TFLOPS, copy_tbps
from fp8moe import mqa_logits, quantize_1x128
from fp8moe.kernels.indexer.mqa_cache import BLOCK_TOKENS

MIN_OVERLAP = 0.93
APPENDS = {1: 1, 128: 1, 8192: BLOCK_TOKENS, 65536: BLOCK_TOKENS}  # tokens, and how many of them come to one block
TOPK = ((128, 65536, 2048), (2048, 16384, 2048))  # rows, columns, k
OVERLAP = {"tokens": 16384, "queries": 64, "heads": 64, "head_dim": 128, "top_k": 2048}
COLUMNS = {
    "paged_mqa_logits": (
        *("batch", "context", "tokens", "next_n", "fill_masked"),
        *("us", "gbps", "floor_us", "error"),
    ),
    "uneven": ("batch", "context", "fill_masked", "us", "bytes_us", "over_bytes", "even_us", "over_even"),
    "append_kv": ("tokens", "head_dim", "us", "gbps", "of_copy"),
    "topk": ("rows", "columns", "k", "sorted", "us", "gbps", "of_copy"),
    "overlap": ("tokens", "queries", "top_k", "overlap", "least"),
}

# The batch of one length whose bandwidth the uneven batches are held to.
EVEN = Batch((8192,) * 64, next_n=1, heads=64, head_dim=128, max_context_len=8192)
# The same number of tokens, (131072 + 63 * 512) / 64 = 2552 for each context of the second.
UNEVEN = tuple(
    EVEN._replace(contexts=contexts, max_context_len=131072) for contexts in ((131072, *[512] * 63), (2552,) * 64)
)


def uneven_batches() -> list[Batch]:
    """The uneven and the even batch of as many tokens, with -inf filled in and without."""
    return [batch._replace(fill_masked=fill_masked) for batch in UNEVEN for fill_masked in (True, False)]


def rates(flops: int, moved: int, us: float) -> dict:
    """Operations and bytes over time, and the least time for both in microseconds."""
    floor = max(flops / TFLOPS, moved / copy_tbps()) / 1e6
    return {"tflops": flops / us / 1e6, "gbps": moved / us / 1e3, "floor_us": floor}


def make_paged_row(batch: Batch, timed: timing.Timing, error: float) -> dict:
    us = timed.median_us
    return {
        "what": "paged_mqa_logits",
        "batch": len(batch.contexts),
        "context": max(batch.contexts),
        "tokens": sum(batch.contexts),
        **{name: getattr(batch, name) for name in Batch._fields[1:]},
        "us": us,
        **rates(*paged_work(batch), us),
        "error": error,
        "kernels": len(timed.kernels),
    }


def make_uneven_rows(us: Mapping[Batch, float]) -> list[dict]:
    """Times of the uneven batch, filled or not, beside those of even ones, from the times of all three."""
    even_tbps = paged_work(EVEN)[1] / us[EVEN] / 1e6
    found = []
    for fill_masked in (True, False):
        uneven, even = (batch._replace(fill_masked=fill_masked) for batch in UNEVEN)
        bytes_us = paged_work(uneven)[1] / even_tbps / 1e6
        found.append(
            {
                **{"what": "uneven", "batch": len(uneven.contexts), "context": uneven.max_context_len},
                **{"fill_masked": fill_masked, "us": us[uneven], "bytes_us": bytes_us, "even_us": us[even]},
                **{"over_bytes": us[uneven] / bytes_us, "over_even": us[uneven] / us[even]},
            }
        )
    return found


def make_copy_row(what: str, sizes: Mapping[str, object], moved: int, timed: timing.Timing) -> dict:
    """One measurement of something that moves bytes, with its bandwidth over that of a copy."""
    gbps = moved / timed.median_us / 1e3
    times = {"us": timed.median_us, "gbps": gbps}
    return {"what": what, **sizes, **times, "of_copy": gbps / 1e3 / copy_tbps()}


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """The thresholds whose cases are all among the rows, and those on the errors and the overlap of what there is."""
    found = []
    for row in select(rows, "uneven"):
        logits = "-inf filled in" if row["fill_masked"] else "no -inf"
        name = f"paged_mqa_logits, one long context among short ones, {logits}, time over that of its bytes"
        found.append(Threshold(name, row["over_bytes"], 1.3, 1.1))
    if errors := [row["error"] for row in rows if "error" in row]:
        found.append(Threshold("mqa, largest relative error on finite entries", max(errors), MAX_ERROR))
    for row in select(rows, "overlap"):
        name = f"mqa, overlap of the top {row['top_k']} of {row['tokens']} tokens with float32 scores"
        found.append(Threshold(name, row["overlap"], MIN_OVERLAP, at_least=True))
    return found


def run_paged(batches: Sequence[Batch], *, device: str = "cuda") -> list[dict]:
    """Rows of the batches, and those that compare uneven with even ones if all of these are there."""
    blocks = max(sum(map(blocks_of, batch.contexts)) for batch in batches)
    caches = {head_dim: filled_cache(blocks, head_dim, device=device) for head_dim in {b.head_dim for b in batches}}
    prepared = [prepare_paged(batch, caches[batch.head_dim]) for batch in batches]
    timings = timing.measure([one.call for one in prepared], rests=[timing.SHORT_REST_S] * len(prepared))
    us = {batch: timed.median_us for batch, timed in zip(batches, timings, strict=True)}
    rows = [
        make_paged_row(batch, timed, one.error) for batch, timed, one in zip(batches, timings, prepared, strict=True)
    ]
    return rows + (make_uneven_rows(us) if us.keys() >= {EVEN, *uneven_batches()} else [])


def run_append(appends: Mapping[int, int], head_dim: int, *, device: str = "cuda") -> list[dict]:
    calls = [prepare_append(*append, head_dim, device=device) for append in appends.items()]
    timings = timing.measure(calls, rests=[timing.SHORT_REST_S] * len(calls))
    moved = 2 * head_dim + head_dim + 4 + 4  # of a token: bfloat16, e4m3, its scale and its slot
    return [
        make_copy_row("append_kv", {"tokens": tokens, "head_dim": head_dim}, tokens * moved, timed)
        for tokens, timed in zip(appends, timings, strict=True)
    ]


def run_topk(cases: Sequence[tuple[int, int, int]], *, device: str = "cuda") -> list[dict]:
    logits = {case: torch.randn(case[:2], device=device) for case in cases}
    keys = [(case, ordered) for case in cases for ordered in (True, False)]
    calls = [partial(torch.topk, logits[case], case[2], sorted=ordered) for case, ordered in keys]
    timings = timing.measure(calls, rests=[timing.SHORT_REST_S] * len(calls))
    return [
        make_copy_row(
            "topk",
            {"rows": rows, "columns": columns, "k": k, "sorted": ordered},
            rows * (4 * columns + 12 * k),  # float32 read; float32 values and int64 indices written
            timed,
        )
        for ((rows, columns, k), ordered), timed in zip(keys, timings, strict=True)
    ]


def overlap(actual: Tensor, expected: Tensor, k: int) -> Tensor:
    """Share of each row's k largest values of `expected` that are among those of `actual`; both (rows, columns)."""
    chosen = [
        torch.zeros_like(values, dtype=torch.bool).scatter_(-1, values.topk(k).indices, True)
        for values in (actual, expected)
    ]
    return (chosen[0] & chosen[1]).sum(-1) / k


def run_overlap(
    tokens: int, queries: int, heads: int, head_dim: int, top_k: int, *, device: str = "cuda"
) -> list[dict]:
    q, keys = torch.randn(queries, heads, head_dim, device=device), torch.randn(tokens, head_dim, device=device)
    weights = torch.randn(queries, heads, device=device)
    expected = torch.stack([scores(one, keys, weight) for one, weight in zip(q, weights, strict=True)])
    fp8 = quantize_1x128(q)
    starts = torch.zeros(queries, dtype=torch.int32, device=device)
    ends = torch.full_like(starts, tokens)
    actual = mqa_logits(fp8.data, quantized_keys(keys), weights * fp8.scale[..., 0], starts, ends)
    shares = overlap(actual, expected, top_k)
    sizes = {"tokens": tokens, "queries": queries, "heads": heads, "head_dim": head_dim, "top_k": top_k}
    return [{"what": "overlap", **sizes, "overlap": shares.mean().item(), "least": shares.min().item()}]


PARTS = {
    "paged_mqa_logits": lambda: run_paged([EVEN, *uneven_batches()]),
    "append_kv": lambda: run_append(APPENDS, 128),
    "topk": lambda: run_topk(TOPK),
    "overlap": lambda: run_overlap(**OVERLAP),
}


def run(parts: Sequence[str] = tuple(PARTS)) -> dict:
    """Checks and times the parts, by default all; {"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    rows = [row for part in parts for row in PARTS[part]()]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("mqa", "index scores, their cache and top-k")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="PART")
    args = parser.parse_args(argv)
    result = run(args.only)
    command.finish(args.out / "mqa.json", result, *format_kinds(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
