"""The expected times of the GEMMs where weights were measured: the cost model's, corrected by measured ones.

`measured_h200.json` has times of the tiles that are likely for weights (n, k) of well-known models. Each of its rows
says how much longer a tile took than the cost model expects, relative to the row's other tiles; what rows of the same
weights say is interpolated between them, and fades where nothing near was measured. A tile that a row does not have
takes what is expected. Of other numbers of SMs, and of tiles for SwiGLU, nothing was measured.

`python -m benchmarks.choice --models` measures.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from math import exp, log
from pathlib import Path

from fp8moe.kernels.gemm import cost
from fp8moe.kernels.gemm.config import GemmConfig, with_stages

FILE = Path(__file__).with_name("measured_h200.json")
_SMS = 132
# Beyond the fewest or most tokens that were measured, so many times as many are taken to be alike; then it fades.
_ALIKE, _FADED = 1.5, 3.0
# Logarithmic distances at which a row tells nothing of other numbers of groups, or of rows in each. Chosen by leaving
# rows out (docs/kernel-notes.md, Cost model).
_GROUPS_APART, _ROWS_APART = 3.0, 1.0
_NEAREST = 0.03  # as a part of these: nearer ones weigh no more


class Row:
    """A measured problem; groups 0: a dense GEMM. times: microseconds of tiles by name."""

    def __init__(self, groups: int, m: int, n: int, k: int, skewed: bool, times: dict[str, float]):
        self.groups, self.m, self.n, self.k, self.skewed, self.times = groups, m, n, k, skewed, times

    def _expected_us(self, tile: str) -> float:
        config = named(tile, self.k, self.groups)
        if not self.groups:
            return cost.dense_time(config, self.m, self.n, self.k, _SMS)
        return cost.grouped_time(config, self.groups, self.m / self.groups, self.n, self.k, _SMS, float(self.skewed))

    @cached_property
    def excess(self) -> dict[str, float]:
        """Logarithm of each tile's time over the expected one, less the mean of all tiles."""
        found = {tile: log(us / self._expected_us(tile)) for tile, us in self.times.items()}
        mean = sum(found.values()) / len(found)
        return {tile: value - mean for tile, value in found.items()}


@lru_cache(maxsize=1 << 14)
def named(name: str, k: int, groups: int) -> GemmConfig:
    """The candidate, not of SwiGLU and without parts of K, that has this `GemmConfig.name`."""
    m, n, staged, halves, split, blocks = re.fullmatch(r"(\d+)x(\d+)(s?)(h?)(?:/(\d))?\*(\d)", name).groups()
    block_m, block_n = int(m), int(n)
    swap = block_m <= 32
    shape = GemmConfig(
        block_m,
        block_n,
        swap=swap,
        warpgroups=1 if block_m == 64 or swap and block_n == 64 else 3 if block_m == 192 else 2,
        split_k=int(split or 1),
        blocks_per_sm=int(blocks),
        staged=bool(staged),
        groups=groups,
        halves=bool(halves),
    )
    return with_stages(shape, k)


@lru_cache(maxsize=1)
def _rows() -> dict[tuple[int, int, bool, bool], list[Row]]:
    """Those of each (n, k), grouped or not, skewed or not; dense ones by their tokens."""
    found = defaultdict(list)
    for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"]:
        found[row["n"], row["k"], row["groups"] > 0, row["groups"] > 0 and row["skewed"]].append(Row(**row))
    for rows in found.values():
        rows.sort(key=lambda row: row.m)
    return dict(found)


def _factors(weighted: Iterable[tuple[Row, float]]) -> dict[str, float]:
    """How much longer tiles take than expected, by name; those that are not in it take what is expected."""
    found: dict[str, float] = defaultdict(float)
    for row, weight in weighted:
        for tile, excess in row.excess.items():
            found[tile] += weight * excess
    return {tile: exp(excess) for tile, excess in found.items()}


# ---- one matrix ----


def dense_weights(rows: Sequence[Row], m: int) -> list[tuple[Row, float]]:
    """What rows of the same weights, by their tokens, count for m tokens: linear in log m between two of them."""
    if not rows:
        return []
    for low, high in pairwise(rows):
        if low.m <= m <= high.m:
            share = log(m / low.m) / log(high.m / low.m)
            return [(low, 1 - share), (high, share)]
    end = rows[0] if m < rows[0].m else rows[-1]
    return [(end, min(1.0, max(0.0, log(_FADED / max(m / end.m, end.m / m)) / log(_FADED / _ALIKE))))]


@lru_cache(maxsize=4096)
def _dense_factors(m: int, n: int, k: int) -> dict[str, float]:
    return _factors(dense_weights(_rows().get((n, k, False, False), []), m))


def dense_ends(n: int, k: int) -> list[int]:
    """The last numbers of tokens of intervals in each of which corrections change steadily."""
    tokens = [row.m for row in _rows().get((n, k, False, False), [])]
    return [*tokens, *(int(tokens[-1] * beyond) for beyond in (_ALIKE, _FADED))] if tokens else []


def dense_time(config: GemmConfig, m: int, n: int, k: int, num_sms: int, parts: int | None = None) -> float:
    """`cost.dense_time`, corrected. parts: of K that are summed one by one, of which nothing was measured."""
    expected = cost.dense_time(config, m, n, k, num_sms)
    measured = num_sms == _SMS and parts is None
    return expected * _dense_factors(m, n, k).get(config.name, 1) if measured else expected


# ---- one matrix for each group ----


def grouped_weights(rows: Sequence[Row], groups: int, expected_m: float) -> list[tuple[Row, float]]:
    """What rows of the same weights and routing count for groups of about ``expected_m`` rows: less with the distance
    in the logarithms of both, and less than all if none of them is near."""
    near = []
    for row in rows:
        apart = log(row.groups / groups) / _GROUPS_APART, log(row.m / row.groups / expected_m) / _ROWS_APART
        squared = apart[0] ** 2 + apart[1] ** 2
        if squared < 1:
            near.append((row, 1 / max(squared, _NEAREST**2) - 1))
    total = 1 + sum(weight for _, weight in near)
    return [(row, weight / total) for row, weight in near]


@lru_cache(maxsize=4096)
def _grouped_factors(groups: int, expected_m: float, n: int, k: int, skewed: bool) -> dict[str, float]:
    return _factors(grouped_weights(_rows().get((n, k, True, skewed), []), groups, expected_m))


def grouped_time(
    config: GemmConfig, groups: int, expected_m: float, n: int, k: int, num_sms: int, *, swiglu: bool
) -> float:
    """`cost.grouped_time`, corrected for even and for skewed routing."""
    if num_sms != _SMS or swiglu:
        return cost.grouped_time(config, groups, expected_m, n, k, num_sms)
    name, rows = config.name, max(expected_m, 1 / groups)
    return sum(
        share
        * cost.grouped_time(config, groups, rows, n, k, num_sms, float(skewed))
        * _grouped_factors(groups, rows, n, k, skewed).get(name, 1)
        for share, skewed in ((1 - cost.SKEWED, False), (cost.SKEWED, True))
    )
