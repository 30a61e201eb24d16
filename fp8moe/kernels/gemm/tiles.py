"""The choice of tiles: which variants are worth considering for a problem, and the one that is expected to be fastest.

``describe_dense`` and ``describe_grouped`` print the candidates on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import ceil

from fp8moe.kernels.gemm.config import GemmConfig, GroupedKConfig, fits, with_stages
from fp8moe.kernels.gemm.cost import dense_time, grouped_time, resident_clusters

_TOKENS_IN_L2 = 6.5e6  # bytes, an eighth of an H200's L2: so many tokens stay there while weights come and go


def raster_group(config: GemmConfig, m: int, k: int, concurrent: int) -> int:
    """Height, in tiles, of the groups that ``concurrent`` tiles walk column by column.

    If all tokens stay in L2, all rows: weights are read once. Otherwise the square-most footprint reads the least of
    both operands; the groups are then evened out over the rows.
    """
    rows = ceil(m / config.block_m)
    if m * k <= _TOKENS_IN_L2:
        return rows
    ideal = max(1, round((concurrent * config.block_n / config.block_m) ** 0.5))
    return ceil(rows / ceil(rows / ideal))


@lru_cache(maxsize=1 << 16)
def _fitting(tile: GemmConfig, split_k: int, blocks_per_sm: int, groups: int, parts: int, k: int) -> GemmConfig | None:
    """``tile`` with these attributes and as many stages as there is room for; None if it does not fit an SM."""
    shape = replace(tile, split_k=split_k, blocks_per_sm=blocks_per_sm, groups=groups, parts=parts)
    config = with_stages(shape, k)
    return config if fits(config, k) else None


# ---- one matrix ----


def dense_candidates(m: int, n: int, k: int, num_sms: int, parts: int | None = None) -> list[GemmConfig]:
    """The configurations worth considering for (m, n, k): what fits an SM, and splits that fit in one wave.

    parts: of K that are summed one by one: splits of so many blocks, and blocks that do it themselves, unless weights
    are the 64-row operand, whose splits then take any number of waves.

    Up to 32 tokens, weights are the 64-row operand; up to 64, one warpgroup takes all tokens, and up to 512 it may take
    some of them.
    """
    narrow = [GemmConfig(64, block_n, warpgroups=1) for block_n in (64, 96, 128)]
    if m <= 32:
        tokens = max(8, 1 << (m - 1).bit_length())
        tiles = [GemmConfig(tokens, 64, swap=True, warpgroups=1)]
    elif m <= 64:
        tiles = narrow
    else:
        tiles = [GemmConfig(128, block_n) for block_n in (64, 96, 112, 128, 160, 176, 192)]
    if m > 128:
        tiles += [GemmConfig(256, 128), GemmConfig(128, 256)]
        tiles += [GemmConfig(192, block_n, warpgroups=3) for block_n in (96, 128)]
        tiles += [replace(tile, staged=True) for tile in tiles if tile.block_n >= 128 and tile.block_n % 64 == 0]
        if parts and parts > 1:  # registers have room for their sums
            tiles += [GemmConfig(256, 64), GemmConfig(256, 80)]
    if 64 < m <= 512:
        tiles += [GemmConfig(64, 32, warpgroups=1), *narrow]

    found = []
    for tile in tiles:
        count = ceil(m / tile.block_m) * ceil(n / tile.block_n)
        most = 4 if m <= 64 else 2 if tile.block_m == 64 else 1  # blocks on an SM
        filled = 0.7 if tile.swap else 1  # of the SMs, before blocks share them: a few share one for no reason
        for split_k in _splits(tile, k, parts):
            for blocks_per_sm in range(1, most + 1):
                alone = parts if parts and split_k == 1 else 1
                halves = tile.block_n == 256 and alone == 1 and count > num_sms and 0 < count % num_sms <= num_sms / 2
                config = _fitting(replace(tile, halves=halves), split_k, blocks_per_sm, 0, alone, k)
                if config is None:
                    continue
                one_wave = count <= resident_clusters(config, num_sms)
                crowded = blocks_per_sm == 1 or count * split_k > filled * num_sms * (blocks_per_sm - 1)
                useful = not config.staged or not one_wave  # TMA writes a tile under the next one's products
                if (one_wave or split_k == 1 or tile.swap and split_k == parts) and crowded and useful:
                    found.append(config)
    return found


def _splits(tile: GemmConfig, k: int, parts: int | None) -> Iterable[int]:
    """Over how many blocks the K of a tile may be spread."""
    if parts is None:
        return range(1, 2 if tile.staged else min(8, ceil(k / 128)) + 1)
    if tile.swap or parts == 1:  # a block whose weights are the 64-row operand does not sum parts
        return (parts,)
    if tile.staged:  # no shared memory for a bfloat16 tile and for sums of parts
        return (1,) if replace(tile, parts=parts).keeps_parts else ()
    return (1, parts)


@lru_cache(maxsize=4096)
def choose_dense(m: int, n: int, k: int, num_sms: int, parts: int | None = None) -> GemmConfig:
    """The candidate that is expected to be fastest. parts: of K; None: as many as may be."""
    found = dense_candidates(m, n, k, num_sms, parts)
    return min(found, key=lambda config: dense_time(config, m, n, k, num_sms))


_DECODED = (1, 8, 16, 32, 64)  # tokens
_INVARIANT_COST = 1.19  # by the cost model, which expects up to 0.17 more of one part than is measured


@lru_cache(maxsize=4096)
def invariant_parts(n: int, k: int) -> int:
    """The parts of K that are summed one by one for any number of tokens, where results are to be batch invariant.

    Of the weights alone: the fewest with which few tokens take little longer than with the best split for each number,
    on the 132 SMs of an H100 or H200. Of those, equal ones of an even number of blocks, as products of small tiles
    alternate between two sets of registers; if there are none, equal ones; then any.
    """
    sms = 132

    def relative(parts: int) -> float:
        def time(m: int, parts: int | None) -> float:
            return min(dense_time(config, m, n, k, sms) for config in dense_candidates(m, n, k, sms, parts))

        return max(time(m, parts) / time(m, None) for m in _DECODED)

    blocks = ceil(k / 128)
    costs = {parts: relative(parts) for parts in range(1, min(8, blocks) + 1)}
    cheap = [parts for parts in costs if costs[parts] <= _INVARIANT_COST]
    equal = [parts for parts in cheap if blocks % parts == 0]
    even = [parts for parts in equal if parts == 1 or blocks // parts % 2 == 0]
    return next(iter(even or equal or cheap), min(costs, key=costs.__getitem__))


def describe_dense(m: int, n: int, k: int, num_sms: int = 132) -> str:
    """A table of the candidates for (m, n, k), the fastest expected first."""
    return _table((dense_time(c, m, n, k, num_sms), c) for c in dense_candidates(m, n, k, num_sms))


# ---- one matrix for each group ----

# Most expected rows of a group whose weights are the 64-row operand, and fewest of one whose tokens are.
_MOST_SWAPPED, _FEWEST_STRAIGHT = 24, 6


def row_tiles_bound(block_m: int, rows: int, groups: int, max_m: int | None) -> int:
    """The most tile rows that any sizes of the groups make: of ``rows`` rows, or with ``max_m`` of that many each."""
    if max_m is not None:
        return groups * ceil(max_m / block_m)
    return (rows + min(groups, rows) * (block_m - 1)) // block_m


def grouped_candidates(
    rows: int, groups: int, expected_m: float, n: int, k: int, num_sms: int, *, max_m: int | None, swiglu: bool
) -> list[GemmConfig]:
    """The configurations worth considering for groups of about ``expected_m`` rows and weights (n, k).

    swiglu: tiles are 128 columns of gate and the same of up, which become one quantization block.
    """
    tiles = []
    if expected_m <= _MOST_SWAPPED:
        shapes = [(8, 256, 2), (16, 256, 2), (32, 256, 2)]
        if not swiglu:
            shapes = [(8, 64, 1), (16, 64, 1), (16, 128, 2), (32, 64, 1)]
        tiles += [GemmConfig(m, n_, swap=True, warpgroups=w) for m, n_, w in shapes]
    if expected_m >= _FEWEST_STRAIGHT:
        straight = [GemmConfig(128, 256)]
        if not swiglu:
            # The first of equals is chosen: a high tile reads the weights of its group once.
            wide = GemmConfig(128, 256, halves=True)
            straight = [GemmConfig(256, 128), wide, GemmConfig(128, 192), GemmConfig(128, 128)]
            straight += [replace(tile, staged=True) for tile in straight]
            straight += [GemmConfig(128, block_n) for block_n in (96, 112)]
            straight += [GemmConfig(64, block_n, warpgroups=1) for block_n in (64, 96, 128)]
        tiles += straight

    found = []
    for tile in tiles:
        bound = row_tiles_bound(tile.block_m, rows, groups, max_m) * ceil(n / tile.block_n)
        for split_k in range(1, min(8, ceil(k / 128)) + 1 if tile.swap else 2):
            # Beyond it, too few registers.
            most = (3 if tile.block_n == 256 else 4) if tile.swap else 3 if tile.warpgroups == 1 else 1
            for blocks_per_sm in range(1, most + 1):
                config = _fitting(tile, split_k, blocks_per_sm, groups, 1, k)
                if config is None:
                    continue
                slots = resident_clusters(config, num_sms)
                # TMA writes a tile under the next one's products.
                useful = not config.staged or groups * ceil(expected_m / tile.block_m) * ceil(n / tile.block_n) > slots
                if (split_k == 1 or bound <= slots) and useful:
                    found.append(config)
    return found


@lru_cache(maxsize=4096)
def choose_grouped(
    rows: int,
    groups: int,
    expected_m: float,
    n: int,
    k: int,
    num_sms: int,
    *,
    max_m: int | None,
    swiglu: bool,
    whole: tuple[int, int] | None = None,
    unsplit: bool = False,
) -> GemmConfig:
    """The candidate that is expected to be fastest.

    whole: rows and groups of which these are a part: K is split as it would be for all of them, so that equal operands
    have equal results. unsplit: K is not split.
    """
    found = grouped_candidates(rows, groups, expected_m, n, k, num_sms, max_m=max_m, swiglu=swiglu)
    if unsplit:
        found = [config for config in found if config.split_k == 1]
    elif whole is not None:
        split_k = choose_grouped(*whole, expected_m, n, k, num_sms, max_m=max_m, swiglu=swiglu).split_k
        found = [config for config in found if config.split_k == split_k]
    return min(found, key=lambda config: grouped_time(config, groups, expected_m, n, k, num_sms))


def describe_grouped(
    rows: int, groups: int, expected_m: float, n: int, k: int, num_sms: int = 132, *, swiglu: bool = False
) -> str:
    """A table of the candidates for contiguous groups, the fastest expected first."""
    found = grouped_candidates(rows, groups, expected_m, n, k, num_sms, max_m=None, swiglu=swiglu)
    return _table((grouped_time(c, groups, expected_m, n, k, num_sms), c) for c in found)


def _table(costs: Iterable[tuple[float, GemmConfig]]) -> str:
    return "\n".join(f"{cost:9.1f} us  {config}" for cost, config in sorted(costs, key=lambda pair: pair[0]))


# ---- groups along K ----

GROUPED_K_CONFIGS = (GroupedKConfig(256, 96, 4), GroupedKConfig(256, 112, 4), GroupedKConfig(128, 96, 6))
_LOW_TILE = 1.2  # a row of a low tile takes longer: it shares its loads of b with fewer


def choose_grouped_k(groups: int, m: int, n: int, num_sms: int) -> GroupedKConfig:
    """The tile whose waves over the SMs cover the least area: low ones need more loads, but fill up the last wave."""

    def cost(tile: GroupedKConfig) -> float:
        waves = ceil(groups * ceil(m / tile.block_m) * ceil(n / tile.block_n) / num_sms)
        return waves * tile.block_m * tile.block_n * (_LOW_TILE if tile.block_m == 128 else 1)

    return min(GROUPED_K_CONFIGS, key=cost)
