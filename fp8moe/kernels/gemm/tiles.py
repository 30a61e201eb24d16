"""The choice of tiles: which variants are worth considering for a problem, and the one expected to be fastest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from fp8moe.kernels.gemm.cost import dense_time, grouped_time, resident_clusters
from fp8moe.kernels.gemm.epilogue import Epilogue, PeerStore
from fp8moe.kernels.gemm.sm90 import GroupedKTile, TileConfig, fits, with_stages, without_tma_store
from fp8moe.runtime import config

_TOKENS_IN_L2 = 6.5e6  # bytes, an eighth of an H200's L2: so many tokens stay there while weights come and go


def raster_group(tile: TileConfig, m: int, k: int, concurrent: int) -> int:
    """Height, in tiles, of the groups that ``concurrent`` tiles walk column by column.

    If all tokens stay in L2, all rows: weights are read once. Otherwise the square-most footprint reads the least of
    both operands; the groups are then evened out over the rows.
    """
    rows = ceil(m / tile.block_m)
    if m * k <= _TOKENS_IN_L2:
        return rows
    ideal = max(1, round((concurrent * tile.block_n / tile.block_m) ** 0.5))
    return ceil(rows / ceil(rows / ideal))


@lru_cache(maxsize=1 << 16)
def _fitting(shape: TileConfig, split_k: int, blocks_per_sm: int, groups: int, parts: int, k: int) -> TileConfig | None:
    """``shape`` with these attributes and as many stages as there is room for; None if it does not fit an SM."""
    shape = replace(shape, split_k=split_k, blocks_per_sm=blocks_per_sm, groups=groups, k_parts=parts)
    tile = with_stages(shape, k)
    return tile if fits(tile, k) else None


# ---- one matrix ----


class DenseProblem(NamedTuple):
    """A GEMM of m tokens and weights (n, k)."""

    m: int
    n: int
    k: int
    num_sms: int


def dense_candidates(m: int, n: int, k: int, num_sms: int, parts: int | None = None) -> list[TileConfig]:
    """The configurations worth considering for (m, n, k): what fits an SM, and splits that fit in one wave.

    parts: of K that are summed one by one: splits of so many blocks, and blocks that do it themselves, unless weights
    are the 64-row operand, whose splits then take any number of waves.
    """
    # Up to 64 tokens one warpgroup takes all of them, up to 512 it may take some.
    narrow = [TileConfig(64, block_n, warpgroups=1) for block_n in (64, 96, 128)]
    if m <= 32:
        tokens = max(8, 1 << (m - 1).bit_length())
        tiles = [TileConfig(tokens, 64, weights_as_rows=True, warpgroups=1)]
    elif m <= 64:
        tiles = narrow
    else:
        tiles = [TileConfig(128, block_n) for block_n in (64, 96, 112, 128, 160, 176, 192)]
    if m > 128:
        tiles += [TileConfig(256, 128), TileConfig(128, 256)]
        tiles += [TileConfig(192, block_n, warpgroups=3) for block_n in (96, 128)]
        tiles += [replace(shape, tma_store=True) for shape in tiles if shape.block_n >= 128 and shape.block_n % 64 == 0]
        if parts and parts > 1:  # registers have room for their sums
            tiles += [TileConfig(256, 64), TileConfig(256, 80)]
    if 64 < m <= 512:
        tiles += [TileConfig(64, 32, warpgroups=1), *narrow]

    found = []
    for shape in tiles:
        count = ceil(m / shape.block_m) * ceil(n / shape.block_n)
        most = 4 if m <= 64 else 2 if shape.block_m == 64 else 1  # blocks on an SM
        filled = 0.7 if shape.weights_as_rows else 1  # of the SMs, before blocks share them
        for split_k in _splits(shape, k, parts):
            for blocks_per_sm in range(1, most + 1):
                alone = parts if parts and split_k == 1 else 1
                halves = shape.block_n == 256 and alone == 1 and count > num_sms and 0 < count % num_sms <= num_sms / 2
                tile = _fitting(replace(shape, half_tiles=halves), split_k, blocks_per_sm, 0, alone, k)
                if tile is None:
                    continue
                one_wave = count <= resident_clusters(tile, num_sms)
                crowded = blocks_per_sm == 1 or count * split_k > filled * num_sms * (blocks_per_sm - 1)
                useful = not tile.tma_store or not one_wave  # TMA writes a tile under the next one's products
                if (one_wave or split_k == 1 or shape.weights_as_rows and split_k == parts) and crowded and useful:
                    found.append(tile)
    return found


def _splits(shape: TileConfig, k: int, parts: int | None) -> Iterable[int]:
    """Over how many blocks the K of a tile may be spread."""
    if parts is None:
        return range(1, 2 if shape.tma_store else min(8, ceil(k / 128)) + 1)
    if shape.weights_as_rows or parts == 1:  # a block whose weights are the 64-row operand does not sum parts
        return (parts,)
    if shape.tma_store:  # no shared memory for a bfloat16 tile and for sums of parts
        return (1,) if replace(shape, k_parts=parts).keeps_parts else ()
    return (1, parts)


@lru_cache(maxsize=4096)
def choose_dense(m: int, n: int, k: int, num_sms: int, parts: int | None = None) -> TileConfig:
    """The candidate that is expected to be fastest. parts: of K; None: as many as may be."""
    found = dense_candidates(m, n, k, num_sms, parts)
    return min(found, key=lambda tile: dense_time(tile, m, n, k, num_sms))


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
            return min(dense_time(tile, m, n, k, sms) for tile in dense_candidates(m, n, k, sms, parts))

        return max(time(m, parts) / time(m, None) for m in _DECODED)

    blocks = ceil(k / 128)
    costs = {parts: relative(parts) for parts in range(1, min(8, blocks) + 1)}
    cheap = [parts for parts in costs if costs[parts] <= _INVARIANT_COST]
    equal = [parts for parts in cheap if blocks % parts == 0]
    even = [parts for parts in equal if parts == 1 or blocks // parts % 2 == 0]
    return next(iter(even or equal or cheap), min(costs, key=costs.__getitem__))


def describe_dense(m: int, n: int, k: int, num_sms: int = 132) -> str:
    """A table of the candidates, the fastest expected first, on any machine."""
    return _table((dense_time(c, m, n, k, num_sms), c) for c in dense_candidates(m, n, k, num_sms))


# ---- one matrix for each group ----

# Most expected rows of a group whose weights are the 64-row operand, and fewest of one whose tokens are.
_MOST_AS_COLUMNS, _FEWEST_AS_ROWS = 24, 6


def row_tiles_bound(block_m: int, rows: int, groups: int, max_m: int | None) -> int:
    """The most tile rows that any sizes of the groups make: of ``rows`` rows, or with ``max_m`` of that many each."""
    if max_m is not None:
        return groups * ceil(max_m / block_m)
    return (rows + min(groups, rows) * (block_m - 1)) // block_m


class GroupedProblem(NamedTuple):
    """A grouped GEMM: rows of all groups, of which each has about `expected_m`, and weights (n, k) for each group.

    max_m: as in `Grouping`. swiglu: tiles have 128 columns of gate and of up, which become one quantization block.
    """

    rows: int
    groups: int
    expected_m: float
    n: int
    k: int
    num_sms: int
    max_m: int | None = None
    swiglu: bool = False


def grouped_candidates(problem: GroupedProblem) -> list[TileConfig]:
    """The configurations worth considering."""
    rows, groups, expected_m, n, k, num_sms, max_m, swiglu = problem
    tiles = []
    if expected_m <= _MOST_AS_COLUMNS:
        shapes = [(8, 256, 2), (16, 256, 2), (32, 256, 2)]
        if not swiglu:
            shapes = [(8, 64, 1), (16, 64, 1), (16, 128, 2), (32, 64, 1)]
        tiles += [TileConfig(m, n_, weights_as_rows=True, warpgroups=w) for m, n_, w in shapes]
    if expected_m >= _FEWEST_AS_ROWS:
        straight = [TileConfig(128, 256)]
        if not swiglu:
            # The first of equals is chosen: a high tile reads the weights of its group once.
            wide = TileConfig(128, 256, half_tiles=True)
            straight = [TileConfig(256, 128), wide, TileConfig(128, 192), TileConfig(128, 128)]
            straight += [replace(shape, tma_store=True) for shape in straight]
            straight += [TileConfig(128, block_n) for block_n in (96, 112)]
            straight += [TileConfig(64, block_n, warpgroups=1) for block_n in (64, 96, 128)]
        tiles += straight

    found = []
    for shape in tiles:
        bound = row_tiles_bound(shape.block_m, rows, groups, max_m) * ceil(n / shape.block_n)
        for split_k in range(1, min(8, ceil(k / 128)) + 1 if shape.weights_as_rows else 2):
            # Beyond it, too few registers.
            most = (3 if shape.block_n == 256 else 4) if shape.weights_as_rows else 3 if shape.warpgroups == 1 else 1
            for blocks_per_sm in range(1, most + 1):
                tile = _fitting(shape, split_k, blocks_per_sm, groups, 1, k)
                if tile is None:
                    continue
                slots = resident_clusters(tile, num_sms)
                # TMA writes a tile under the next one's products.
                tiles_expected = groups * ceil(expected_m / shape.block_m) * ceil(n / shape.block_n)
                useful = not tile.tma_store or tiles_expected > slots
                if (split_k == 1 or bound <= slots) and useful:
                    found.append(tile)
    return found


@lru_cache(maxsize=4096)
def choose_grouped(
    problem: GroupedProblem, *, whole: tuple[int, int] | None = None, unsplit: bool = False
) -> TileConfig:
    """The candidate that is expected to be fastest.

    whole: as in `Grouping`: K is split as for all of it, so that results are equal. unsplit: K is not split.
    """
    found = grouped_candidates(problem)
    if unsplit:
        found = [tile for tile in found if tile.split_k == 1]
    elif whole is not None:
        rows, groups = whole
        split_k = choose_grouped(problem._replace(rows=rows, groups=groups)).split_k
        found = [tile for tile in found if tile.split_k == split_k]
    return min(found, key=lambda tile: expected_us(problem, tile))


def expected_us(problem: GroupedProblem, tile: TileConfig) -> float:
    """Microseconds that a tile is expected to take."""
    return grouped_time(tile, problem.groups, problem.expected_m, problem.n, problem.k, problem.num_sms)


def describe_grouped(
    rows: int, groups: int, expected_m: float, n: int, k: int, num_sms: int = 132, *, swiglu: bool = False
) -> str:
    """A table of the candidates for contiguous groups, the fastest expected first."""
    problem = GroupedProblem(rows, groups, expected_m, n, k, num_sms, swiglu=swiglu)
    return _table((expected_us(problem, tile), tile) for tile in grouped_candidates(problem))


def _table(costs: Iterable[tuple[float, TileConfig]]) -> str:
    return "\n".join(f"{cost:9.1f} us  {tile}" for cost, tile in sorted(costs, key=lambda pair: pair[0]))


# ---- under the settings that hold ----


class Grouping(NamedTuple):
    """How the rows of a GEMM belong to groups, each with weights of its own.

    expected_m: rows that a group is expected to have; None: all have equally many.
    max_m: of the masked layout, rows that each group has room for.
    whole: of the contiguous layout, rows and groups of a GEMM of which this is a part: a group is expected to have as
        many rows as there, and K is summed in the same order.
    """

    expected_m: float | None = None
    max_m: int | None = None
    whole: tuple[int, int] | None = None

    def layouts(self) -> Grouping:
        """What launchers are kept by."""
        return self

    def problem(self, rows: int, groups: int, n: int, k: int, num_sms: int, *, swiglu: bool) -> GroupedProblem:
        """The problem for so many rows of so many groups."""
        expected_m = self.expected_m
        if expected_m is None:
            of_all, among = self.whole or (rows, groups)
            expected_m = of_all / among
        return GroupedProblem(rows, groups, expected_m, n, k, num_sms, self.max_m, swiglu)


def choose(
    problem: GroupedProblem | DenseProblem, epilogue: Epilogue, whole: tuple[int, int] | None = None
) -> TileConfig:
    """The tile for a problem; TMA does not write rows that go to peers."""
    if isinstance(problem, GroupedProblem):
        tile = choose_grouped(problem, whole=whole, unsplit=config.settings.batch_invariant)
    else:
        m, n, k, num_sms = problem
        tile = choose_dense(m, n, k, num_sms, invariant_parts(n, k) if config.settings.batch_invariant else None)
    return without_tma_store(tile, problem.k) if isinstance(epilogue, PeerStore) else tile


# ---- groups along K ----

GROUPED_K_TILES = (GroupedKTile(256, 96, 4), GroupedKTile(256, 112, 4), GroupedKTile(128, 96, 6))
_LOW_TILE = 1.2  # a row of a low tile takes longer: it shares its loads of b with fewer


def choose_grouped_k(groups: int, m: int, n: int, num_sms: int) -> GroupedKTile:
    """The tile whose waves over the SMs cover the least area: low ones need more loads, but fill up the last wave."""

    def cost(tile: GroupedKTile) -> float:
        waves = ceil(groups * ceil(m / tile.block_m) * ceil(n / tile.block_n) / num_sms)
        return waves * tile.block_m * tile.block_n * (_LOW_TILE if tile.block_m == 128 else 1)

    return min(GROUPED_K_TILES, key=cost)
