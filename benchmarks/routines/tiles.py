"""How well tiles are chosen for GEMM shapes that the cost model was not fitted to: `python -m benchmarks choice`.

The problems are always the same 30 dense and 30 grouped GEMMs. For each problem, the benchmark times the candidates:
tiles with an expected time of at most 1.5 times the least expected time. The minimum of many times is low by chance. So
the chosen tile and the fastest other candidates are timed again, several times in turn. `regret` uses only these second
times: how much slower the chosen tile is than the fastest. Groups have very different sizes, as with skewed routing;
some are empty.

`--fit` and `--models` time other problems instead. The problems of `--fit` are drawn like those above, with nine other
seeds; the problems of `--models` have the weight shapes of well-known models, and fewer candidates each. The candidates
of these problems are timed only once. Their `times` are input for `tools.fit_cost`, which must not see the problems
above. Results from an H200 are in benchmarks/fit.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import calls, timing
from benchmarks.report import Bar, Benchmark, Option
from fp8moe import FP8Tensor
from fp8moe.kernels.gemm.cost import SKEWED, dense_time, grouped_time
from fp8moe.kernels.gemm.epilogue import PlainStore
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.sm90 import TileConfig
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import (
    GroupedProblem,
    Grouping,
    choose_dense,
    choose_grouped,
    dense_candidates,
    grouped_candidates,
)
from fp8moe.runtime.jit import load_all
from fp8moe.runtime.launch import num_sms

EACH = 30  # number of dense problems, and number of grouped problems
LIKELY, MOST = 1.5, 16  # candidates: tiles with at most LIKELY times the least expected time, and at most MOST tiles
OTHERS, ROUNDS = 3, 5  # number of tiles that are timed again besides the chosen tile; rounds of this second timing
MOST_ROWS, MOST_BYTES = 20000, 4 << 30
LONG_US = 100  # the GPU rests before kernels that take longer than this: when busy for long, it lowers its clocks
SEED, FITTED_SEEDS = 60, range(61, 70)
SMS = 132  # streaming multiprocessors of an H100 or H200
# LINEAR, EXPERTS: (n, k) of linear layers and of experts in DeepSeek-V3, Kimi-K2, Qwen3 and Mixtral.
LINEAR = (
    *((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    *((5120, 2048), (6144, 4096)),
)
TOKENS = (1, 4, 8, 16, 24, 32, 40, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
EXPERTS = ((4096, 7168), (7168, 2048), (6144, 7168), (7168, 3072), (1536, 2048))
# (number of groups, mean rows of a group) of grouped GEMMs.
GROUPS = (
    *((4, 8192), (8, 4096), (6, 1024), (8, 256), (16, 512), (32, 32), (32, 192), (32, 256), (32, 768), (128, 64)),
    *((8, 1), (6, 20), (32, 1), (32, 4), (32, 20), (128, 1), (128, 4), (128, 16), (128, 512), (256, 2), (256, 16)),
    (256, 64),
)
# Qwen3's expert GEMMs: their (n, k) shapes, and the number of groups
MORE_EXPERTS, THEIR_GROUPS = ((2048, 768), (4096, 1536)), 128
LIKELY_OF_MODELS, MOST_OF_MODELS = 1.25, 12  # LIKELY and MOST for problems with the shapes of models


class Problem(NamedTuple):
    """A GEMM to choose a tile for. groups: 0 if dense. m: rows of all groups. skewed: sizes of groups vary widely."""

    groups: int
    m: int
    n: int
    k: int
    skewed: bool = True


def fitted() -> list[Problem]:
    """Return the random problems that the cost model is fitted to, dense ones first."""
    return sorted((one for seed in FITTED_SEEDS for one in drawn(seed)), key=lambda problem: problem.groups > 0)


def problems() -> list[Problem]:
    """Return the problems by which the choice of tiles is judged, dense ones first."""
    return drawn(SEED)


def drawn(seed: int) -> list[Problem]:
    """Draw EACH dense problems and EACH grouped problems, with random shapes."""
    draw = random.Random(seed)

    def size(least: int, most: int, multiple: int) -> int:
        """Draw a multiple of `multiple` between `least` and `most`, uniform in its logarithm."""
        return max(least, round(least * (most / least) ** draw.random() / multiple) * multiple)

    found = [Problem(0, size(1, MOST_ROWS, 1), size(256, 20000, 8), size(256, 16384, 16)) for _ in range(EACH)]
    while len(found) < 2 * EACH:
        problem = Problem(size(2, 512, 1), size(8, MOST_ROWS, 1), size(256, 8192, 16), size(256, 8192, 16))
        if problem.groups * problem.n * problem.k <= MOST_BYTES:
            found.append(problem)
    return found


def of_models() -> list[Problem]:
    """Return problems with the weight shapes of models, for the fit, dense ones first."""
    dense = [Problem(0, m, n, k) for n, k in LINEAR for m in TOKENS]
    theirs = [pair for pair in GROUPS if pair[0] == THEIR_GROUPS]
    weights = [*((one, GROUPS) for one in EXPERTS), *((one, theirs) for one in MORE_EXPERTS)]
    return [*dense, *(problem for one, pairs in weights for problem in with_groups(*one, pairs))]


def with_groups(n: int, k: int, pairs: Iterable[tuple[int, int]]) -> list[Problem]:
    """Return an even and a skewed problem for each (groups, mean rows) whose weights fit in memory."""
    pairs = [(groups, mean) for groups, mean in pairs if groups * n * k <= MOST_BYTES]
    return [Problem(groups, groups * mean, n, k, skewed) for groups, mean in pairs for skewed in (False, True)]


def group_offsets(problem: Problem) -> Tensor:
    """Draw group offsets (groups + 1,) int32. Group sizes vary by about a third, or as much as with skewed routing."""
    generator = torch.Generator().manual_seed(problem.m)
    share = torch.empty(problem.groups)
    if problem.skewed:
        share = share.exponential_(generator=generator) ** 2
    else:
        share.uniform_(0.68, 1.32, generator=generator)
    owner = torch.multinomial(share, problem.m, replacement=True, generator=generator)
    sizes = torch.bincount(owner, minlength=problem.groups)
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()


def expected_us(problem: Problem, config: TileConfig, sms: int = SMS, skewed: float = SKEWED) -> float:
    """Return the microseconds that the cost model expects.

    skewed: the probability that the groups are skewed. The choice of tiles assumes the default, since it does not know
    the sizes of the groups.
    """
    groups, m, n, k, _ = problem
    return grouped_time(config, groups, m / groups, n, k, sms, skewed) if groups else dense_time(config, m, n, k, sms)


def every_candidate(problem: Problem, sms: int = SMS) -> list[TileConfig]:
    """Return all tiles that may be chosen for a problem."""
    groups, m, n, k, _ = problem
    if groups:
        return grouped_candidates(GroupedProblem(m, groups, m / groups, n, k, sms))
    return dense_candidates(m, n, k, sms)


def candidates(problem: Problem, sms: int, likely: float = LIKELY, most: int = MOST) -> list[TileConfig]:
    """Return the chosen tile, then other tiles that the cost model expects to be nearly as fast."""
    groups, m, n, k, _ = problem
    times = {config: expected_us(problem, config, sms) for config in every_candidate(problem, sms)}
    chosen = choose_grouped(GroupedProblem(m, groups, m / groups, n, k, sms)) if groups else choose_dense(m, n, k, sms)
    limit = likely * min(times.values())
    others = sorted((config for config in times if config != chosen and times[config] <= limit), key=times.__getitem__)
    return [chosen, *others[: most - 1]]


def call_of(problem: Problem) -> Callable[[TileConfig], object]:
    """Return a function that runs the problem with a given tile, on random operands."""
    groups, m, n, k, _ = problem
    make = calls.Operands()
    a, out = make.rows(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    if groups:
        return partial(multiply, a, make.weights(groups, n, k), out, group_offsets(problem).cuda())
    return partial(multiply, a, make.weights(n, k), out, None)


def multiply(a: FP8Tensor, b: FP8Tensor, out: Tensor, offsets: Tensor | None, config: TileConfig) -> Tensor:
    """Run a GEMM with the given tile: grouped if there are offsets, else dense."""
    multiply_with(config, GemmOperands(*a, *b, groups=offsets), out, None if offsets is None else Grouping())
    return out


def finalists(times: dict[TileConfig, float]) -> list[TileConfig]:
    """Return the chosen tile, which comes first in `times`, and the OTHERS fastest other tiles."""
    chosen, *others = times
    return [chosen, *sorted(others, key=times.__getitem__)[:OTHERS]]


def make_row(problem: Problem, times: dict[TileConfig, float], again: dict[TileConfig, float] | None = None) -> dict:
    """Make a problem's row from the microseconds of its candidates, with the chosen tile first.

    again: times of a second measurement, from which `regret` is computed; None: `regret` is computed from `times`.
    """
    judged = times if again is None else again
    (chosen, us), *_ = judged.items()
    best = min(judged, key=judged.__getitem__)
    names = {"candidates": len(times), "chosen": chosen.name, "us": us, "best": best.name, "best_us": judged[best]}
    every = {config.name: time for config, time in times.items()}
    return problem._asdict() | names | {"regret": us / judged[best] - 1, "times": every}


def time_in_turn(problem: Problem, configs: Sequence[TileConfig], sms: int, rounds: int = 1) -> dict[TileConfig, float]:
    """Return the median microseconds of each tile; with several rounds, the median of each round's median."""
    call = call_of(problem)
    every = [partial(call, config) for config in configs]
    rests = [timing.SHORT_REST_S if expected_us(problem, config, sms) > LONG_US else 0.0 for config in configs]
    found = [one.median_us for one in timing.measure(every * rounds, rests=rests * rounds)]
    return {config: statistics.median(found[i :: len(configs)]) for i, config in enumerate(configs)}


def measure(fit: bool = False, models: bool = False) -> Iterator[dict]:
    """Time the candidates of each problem. Without `fit` and `models`, time the fastest candidates again."""
    sms, likely, most = num_sms(torch.cuda.current_device()), LIKELY, MOST
    timed = fitted() if fit else problems()
    if models:
        timed, likely, most = of_models(), LIKELY_OF_MODELS, MOST_OF_MODELS
    found = {problem: candidates(problem, sms, likely, most) for problem in timed}
    epilogue = PlainStore(torch.bfloat16)
    load_all({kernel_spec(config, p.n, p.k, epilogue) for p, configs in found.items() for config in configs})
    for problem, configs in found.items():
        times = time_in_turn(problem, configs, sms)
        again = None if fit or models else time_in_turn(problem, finalists(times), sms, ROUNDS)
        yield make_row(problem, times, again)


CHOICE = Benchmark(
    "choice",
    measure,
    ("groups", "m", "n", "k", "candidates", "chosen", "us", "best", "best_us", "regret"),
    [
        Bar("choice of tiles, {count} shapes, mean regret", "regret", 0.02, 0.01, over=statistics.fmean),
        Bar("choice of tiles, {count} shapes, largest regret", "regret", 0.1, 0.05, over=max),
    ],
    {"fit": Option(False), "models": Option(False)},
)
