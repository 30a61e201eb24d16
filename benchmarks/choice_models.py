"""Times of tiles for weights of models, which correct the package's choice: `python -m benchmarks.choice --models`.

Of each problem, few candidates are timed, once, by a process for each GPU. What is written is the next
`fp8moe/kernels/gemm/measured_h200.json`.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import choice, command
from benchmarks.choice import MOST_BYTES, Problem, every_candidate, expected_us
from benchmarks.report import format_table
from fp8moe.runtime.jit import cubin
from fp8moe.runtime.launch import num_sms

# Of models' linear layers and experts (DeepSeek-V3, Kimi-K2, Qwen3, Mixtral): (n, k).
LINEAR = (
    *((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    *((5120, 2048), (6144, 4096)),
)
TOKENS = (1, 4, 8, 16, 24, 32, 40, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
EXPERTS = ((4096, 7168), (7168, 2048), (6144, 7168), (7168, 3072), (1536, 2048))
GROUPS = (
    *((4, 8192), (8, 4096), (6, 1024), (8, 256), (16, 512), (32, 32), (32, 192), (32, 256), (32, 768), (128, 64)),
    *((8, 1), (6, 20), (32, 1), (32, 4), (32, 20), (128, 1), (128, 4), (128, 16), (128, 512), (256, 2), (256, 16)),
    (256, 64),
)
"""And their mean rows."""
MORE_EXPERTS, THEIR_GROUPS = ((2048, 768), (4096, 1536)), 128  # of Qwen3
LIMITS = {"likely": 1.25, "most": 12}  # candidates, as in benchmarks.choice
SLOWEST = 1.5  # over the time of the fastest: slower tiles do not go into the package
WHAT = (
    "median microseconds of candidates for weights of models, cold L2; groups 0: a dense GEMM, otherwise groups are "
    "even (0.68 to 1.32 of the mean) or skewed (the square of an exponential variate)"
)


def models() -> list[Problem]:
    """What is timed, the dense ones first."""
    dense = [Problem(0, m, n, k) for n, k in LINEAR for m in TOKENS]
    theirs = [pair for pair in GROUPS if pair[0] == THEIR_GROUPS]
    weights = [*((one, GROUPS) for one in EXPERTS), *((one, theirs) for one in MORE_EXPERTS)]
    return [*dense, *(problem for one, pairs in weights for problem in with_groups(*one, pairs))]


def with_groups(n: int, k: int, pairs: Iterable[tuple[int, int]]) -> list[Problem]:
    """Of groups and their mean rows, with even and with skewed sizes, those whose weights have room."""
    pairs = [(groups, mean) for groups, mean in pairs if groups * n * k <= MOST_BYTES]
    return [Problem(groups, groups * mean, n, k, skewed) for groups, mean in pairs for skewed in (False, True)]


def deal(problems: Iterable[Problem], hands: int) -> list[list[Problem]]:
    """Shares that take about as long: in turn, the longest first."""
    longest = sorted(problems, key=_fastest_us, reverse=True)
    return [longest[hand::hands] for hand in range(hands)]


def _fastest_us(problem: Problem) -> float:
    return min(expected_us(problem, config) for config in every_candidate(problem))


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES is to be for processes that have one of this process's GPUs each."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def _see_only(gpu: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def _time(share: Sequence[Problem]) -> list[dict]:
    return choice.run(share, twice=False, **LIMITS)["rows"]


def run() -> tuple[str, list[dict]]:
    """The GPUs' name, and the rows of all problems; kernels are compiled before, together."""
    gpu, timed, gpus = command.start(), models(), visible_gpus()
    sms = num_sms(torch.cuda.current_device())
    specs = choice.kernels({problem: choice.candidates(problem, sms, **LIMITS) for problem in timed})
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(cubin, specs))  # the processes find them in the disk cache
    process = partial(ProcessPoolExecutor, 1, mp_context=get_context("spawn"), initializer=_see_only)
    pools = [process(initargs=(one,)) for one in gpus]
    shares = [pool.submit(_time, share) for pool, share in zip(pools, deal(timed, len(gpus)), strict=True)]
    rows = [row for share in shares for row in share.result()]
    for pool in pools:
        pool.shutdown()
    return gpu, sorted(rows, key=lambda row: timed.index(Problem(*(row[field] for field in Problem._fields))))


def packaged(rows: Iterable[dict], meta: Mapping[str, str]) -> str:
    """The text of the package's file: a line for each problem, with its fast tiles."""
    lines = []
    for row in rows:
        slowest = SLOWEST * min(row["times"].values())
        times = {tile: float(f"{us:.4g}") for tile, us in row["times"].items() if us <= slowest}
        problem = {field: row[field] for field in Problem._fields} | {"skewed": row["groups"] > 0 and row["skewed"]}
        lines.append(json.dumps(problem | {"times": times}))
    return f'{{"meta": {json.dumps(meta)},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def write(path: Path) -> None:
    """Times all problems, and writes the file."""
    gpu, rows = run()
    meta = {"gpu": gpu, "what": WHAT, "how": f"python -m benchmarks.choice --models, {date.today()}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(packaged(rows, meta), encoding="utf-8")
    print(format_table(rows, choice.COLUMNS), f"wrote {path}", sep="\n\n")
