"""Choose the tile of a GEMM: list candidates, and take the candidate with the least expected time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from fp8moe.kernels.gemm.cost import dense_time, grouped_time, resident_clusters
from fp8moe.kernels.gemm.epilogue import Epilogue, PeerStore
from fp8moe.kernels.gemm.sm90 import GroupedKTile, TileConfig, fits, with_stages, without_tma_store
from fp8moe.runtime import config

_TOKENS_IN_L2 = 6.5e6  # bytes of tokens that stay in L2 while weights stream through: an eighth of an H200's L2


def raster_group(tile: TileConfig, m: int, k: int, concurrent: int) -> int:
    """Return the height, in tiles, of the horizontal bands of the result that blocks compute one after the other.

    Blocks compute a band column by column. concurrent: number of tiles computed at once. If all tokens stay in L2, one
    band has all rows, so that weights are read once. Otherwise bands are equally high; with the height returned, the
    tiles computed at once are close to a square, which reads the least of both operands.
    """
    rows = ceil(m / tile.block_m)
    if m * k <= _TOKENS_IN_L2:
        return rows
    ideal = max(1, round((concurrent * tile.block_n / tile.block_m) ** 0.5))
    return ceil(rows / ceil(rows / ideal))


@lru_cache(maxsize=1 << 16)
def _fitting(shape: TileConfig, split_k: int, blocks_per_sm: int, groups: int, parts: int, k: int) -> TileConfig | None:
    """Return ``shape`` with the given attributes and as many stages as fit, or None if it does not fit an SM."""
    shape = replace(shape, split_k=split_k, blocks_per_sm=blocks_per_sm, groups=groups, k_parts=parts)
    tile = with_stages(shape, k)
    return tile if fits(tile, k) else None


# ---- one weight matrix ----


class DenseProblem(NamedTuple):
    """A GEMM of m tokens and weights (n, k). packed: the format of weights in four bits."""

    m: int
    n: int
    k: int
    num_sms: int
    packed: str | None = None


def _packed_tiles(packed: str, heights: Collection[int], *, swiglu: bool = False) -> list[TileConfig]:
    """Return tile shapes of `heights` tokens for weights in four bits, which registers hold as the 64-row operand."""
    shapes = ((256, 2),) if swiglu else ((64, 1), (128, 2), (256, 2))
    four = [TileConfig(32, 256, weights_as_rows=True, warpgroups=4, packed=packed)] if 32 in heights else []
    return four + [
        TileConfig(tokens, block_n, weights_as_rows=True, warpgroups=warpgroups, packed=packed)
        for tokens in heights
        for block_n, warpgroups in shapes
    ]


def dense_candidates(
    m: int, n: int, k: int, num_sms: int, parts: int | None = None, *, packed: str | None = None
) -> list[TileConfig]:
    """Return the tiles worth considering for (m, n, k): they fit an SM, and splits of K fit in one wave.

    parts: if given, the number of parts in which K is summed. Either each part is summed by its own block (split_k) or,
    if tokens are the 64-row operand, one block sums all parts, one after the other (k_parts). Splits with weights as
    rows may then take several waves.
    """
    # Up to 64 tokens, all tiles have one math warpgroup; up to 512 tokens, some tiles have one.
    narrow = [TileConfig(64, block_n, warpgroups=1) for block_n in (64, 96, 128)]
    tokens = max(8, 1 << (m - 1).bit_length())
    if packed:
        tiles = _packed_tiles(packed, [min(tokens, 64)])
    elif m <= 32:
        tiles = [TileConfig(tokens, 64, weights_as_rows=True, warpgroups=1)]
    elif m <= 64:
        tiles = narrow
    else:
        tiles = [TileConfig(128, block_n) for block_n in (64, 96, 112, 128, 160, 176, 192)]
    if m > 128 and not packed:
        tiles += [TileConfig(256, 128), TileConfig(128, 256)]
        tiles += [TileConfig(192, block_n, warpgroups=3) for block_n in (96, 128)]
        tiles += [replace(shape, tma_store=True) for shape in tiles if shape.block_n >= 128 and shape.block_n % 64 == 0]
        if parts and parts > 1:  # narrow tiles, so that registers hold the sums of parts
            tiles += [TileConfig(256, 64), TileConfig(256, 80)]
    if 64 < m <= 512 and not packed:
        tiles += [TileConfig(64, 32, warpgroups=1), *narrow]

    found = []
    for shape in tiles:
        count = ceil(m / shape.block_m) * ceil(n / shape.block_n)
        most = 4 if m <= 64 else 2 if shape.block_m == 64 else 1  # largest number of blocks per SM to try
        filled = 0.7 if shape.weights_as_rows else 1  # fraction of the SMs to fill before several blocks share an SM
        for split_k in _splits(shape, k, parts):
            for blocks_per_sm in range(1, most + 1):
                alone = parts if parts and split_k == 1 else 1
                halves = shape.block_n == 256 and alone == 1 and count > num_sms and 0 < count % num_sms <= num_sms / 2
                tile = _fitting(replace(shape, half_tiles=halves), split_k, blocks_per_sm, 0, alone, k)
                if tile is None:
                    continue
                one_wave = count <= resident_clusters(tile, num_sms)
                crowded = blocks_per_sm == 1 or count * split_k > filled * num_sms * (blocks_per_sm - 1)
                useful = not tile.tma_store or not one_wave  # a TMA store pays only while a next tile is multiplied
                if (one_wave or split_k == 1 or shape.weights_as_rows and split_k == parts) and crowded and useful:
                    found.append(tile)
    return found


def _splits(shape: TileConfig, k: int, parts: int | None) -> Iterable[int]:
    """Return the values of split_k to try for a tile shape. parts: see `dense_candidates`."""
    if parts is None:
        return range(1, 2 if shape.tma_store else min(8, ceil(k / 128)) + 1)
    if shape.weights_as_rows or parts == 1:  # with weights as rows, a block cannot sum K in parts (k_parts)
        return (parts,)
    if shape.tma_store:  # shared memory holds the bfloat16 tile: registers must hold all sums of parts
        return (1,) if replace(shape, k_parts=parts).keeps_parts else ()
    return (1, parts)


@lru_cache(maxsize=4096)
def choose_dense(
    m: int, n: int, k: int, num_sms: int, parts: int | None = None, packed: str | None = None
) -> TileConfig:
    """Return the dense candidate with the least expected time. parts: see `dense_candidates`."""
    found = dense_candidates(m, n, k, num_sms, parts, packed=packed)
    return min(found, key=lambda tile: dense_time(tile, m, n, k, num_sms))


_DECODED = (1, 8, 16, 32, 64)  # batch sizes of the decode steps that `invariant_parts` compares
# Accepted ratio of a decode step's time to its time with the best split. For one part, the cost model's ratio is up to
# 0.17 larger than the measured ratio.
_INVARIANT_COST = 1.19


@lru_cache(maxsize=4096)
def invariant_parts(n: int, k: int) -> int:
    """Return the number of parts in which K is summed in batch-invariant mode, whatever the number of tokens.

    The number depends on the shape of the weights only. A number is a candidate if every decode step takes at most
    `_INVARIANT_COST` times as long as with the best split of this step, on the 132 SMs of an H100 or H200. 1 is chosen
    if it is a candidate. Otherwise the first choice is the smallest candidate that gives equal parts with an even
    number of 128-blocks, because the MMAs of small tiles alternate between two sets of registers. The second choice is
    the smallest candidate that gives equal parts, the third choice the smallest candidate. Without candidates, the
    number is chosen for which the largest of these ratios of times is least.
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
    """Return a table of the candidates for a dense GEMM, the fastest expected first. Needs no GPU."""
    return _table((dense_time(c, m, n, k, num_sms), c) for c in dense_candidates(m, n, k, num_sms))


# ---- one weight matrix per group ----

# Limits on the expected rows of a group: weights are tried as the 64-row operand up to the first limit, tokens from the
# second limit on.
_MOST_AS_COLUMNS, FEWEST_AS_ROWS = 24, 6


def row_tiles_bound(block_m: int, rows: int, groups: int, max_m: int | None) -> int:
    """Return the largest number of tiles along M that the groups can take, whatever their sizes.

    The groups have ``rows`` rows in all or, if ``max_m`` is given, up to ``max_m`` rows each.
    """
    if max_m is not None:
        return groups * ceil(max_m / block_m)
    return (rows + min(groups, rows) * (block_m - 1)) // block_m


class GroupedProblem(NamedTuple):
    """A grouped GEMM: `rows` rows in all, `expected_m` expected rows per group, and weights (n, k) for each group.

    max_m: as in `Grouping`. swiglu: the weights are a gate_up projection; a tile has 128 columns of gate and 128 of up,
    which give one quantization block. packed: the format of weights in four bits.
    """

    rows: int
    groups: int
    expected_m: float
    n: int
    k: int
    num_sms: int
    max_m: int | None = None
    swiglu: bool = False
    packed: str | None = None


def grouped_candidates(problem: GroupedProblem) -> list[TileConfig]:
    """Return the tiles worth considering for a grouped GEMM: they fit an SM, and splits of K fit in one wave."""
    rows, groups, expected_m, n, k, num_sms, max_m, swiglu, packed = problem
    tiles = []
    if packed:
        tiles = _packed_tiles(packed, (8, 16, 32, 64), swiglu=swiglu)
        if packed != "int4" and expected_m >= FEWEST_AS_ROWS and k > 384:
            tiles += [TileConfig(128, 256, packed=packed), *([] if swiglu else [TileConfig(256, 128, packed=packed)])]
    if expected_m <= _MOST_AS_COLUMNS and not packed:
        shapes = [(8, 256, 2), (16, 256, 2), (32, 256, 2)]
        if not swiglu:
            shapes = [(8, 64, 1), (16, 64, 1), (16, 128, 2), (32, 64, 1)]
        tiles += [TileConfig(m, n_, weights_as_rows=True, warpgroups=w) for m, n_, w in shapes]
    if expected_m >= FEWEST_AS_ROWS and not packed:
        straight = [TileConfig(128, 256)]
        if not swiglu:
            # Of equally fast tiles the first is chosen. So put high tiles first: they read a group's weights once.
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
            # Largest number of blocks per SM to try; more blocks would leave each too few registers.
            most = (3 if shape.block_n == 256 else 4) if shape.weights_as_rows else 3 if shape.warpgroups == 1 else 1
            if shape.packed:  # unpacking needs registers
                most = min(most, {1: 3, 2: 2, 4: 1}[shape.warpgroups])
            for blocks_per_sm in range(1, most + 1):
                tile = _fitting(shape, split_k, blocks_per_sm, groups, 1, k)
                if tile is None:
                    continue
                slots = resident_clusters(tile, num_sms)
                # tma_store pays only if blocks have a next tile to multiply while TMA stores the last tile.
                tiles_expected = groups * ceil(expected_m / shape.block_m) * ceil(n / shape.block_n)
                useful = not tile.tma_store or tiles_expected > slots
                if (split_k == 1 or bound <= slots) and useful:
                    found.append(tile)
    return found


@lru_cache(maxsize=4096)
def choose_grouped(
    problem: GroupedProblem, *, whole: tuple[int, int] | None = None, unsplit: bool = False
) -> TileConfig:
    """Return the grouped candidate with the least expected time.

    whole: as in `Grouping`; K is split as in the whole GEMM, so that results are equal. unsplit: never split K.
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
    """Return the expected microseconds of a grouped GEMM with this tile."""
    return grouped_time(tile, problem.groups, problem.expected_m, problem.n, problem.k, problem.num_sms)


def describe_grouped(
    rows: int, groups: int, expected_m: float, n: int, k: int, num_sms: int = 132, *, swiglu: bool = False
) -> str:
    """Return a table of the candidates for contiguous groups, the fastest expected first."""
    problem = GroupedProblem(rows, groups, expected_m, n, k, num_sms, swiglu=swiglu)
    return _table((expected_us(problem, tile), tile) for tile in grouped_candidates(problem))


def _table(costs: Iterable[tuple[float, TileConfig]]) -> str:
    return "\n".join(f"{cost:9.1f} us  {tile}" for cost, tile in sorted(costs, key=lambda pair: pair[0]))


# ---- the choice under the current settings ----


def rounded_rows(rows: int) -> int:
    """Round many rows up, by a thirty-second at most: a choice takes the CPU longer than a launch.

    Parallel experts and packed sequences have another number of rows in each call.
    """
    step = 1 << max(0, rows.bit_length() - 6)
    return rows if rows <= 2048 else -(-rows // step) * step


class Grouping(NamedTuple):
    """The groups of a GEMM's rows; each group has weights of its own.

    expected_m: expected rows of a group; None: all rows divided by the number of groups.
    max_m: in the masked layout, the number of rows that each group has room for.
    whole: in the contiguous layout, (rows, groups) of the whole GEMM if this is a part of it; the expected rows of a
        group and the order of sums over K are then equal to the whole GEMM's.
    """

    expected_m: float | None = None
    max_m: int | None = None
    whole: tuple[int, int] | None = None

    def layouts(self) -> Grouping:
        """Return this tuple, which serves as a part of the key under which `planned` caches launchers."""
        return self

    def problem(
        self, rows: int, groups: int, n: int, k: int, num_sms: int, *, swiglu: bool, packed: str | None = None
    ) -> GroupedProblem:
        """Return the `GroupedProblem` for `rows` rows, rounded, `groups` groups, weights (n, k) and these options."""
        expected_m = self.expected_m
        if expected_m is None:
            of_all, among = self.whole or (rows, groups)
            expected_m = rounded_rows(of_all) / among
        return GroupedProblem(rounded_rows(rows), groups, expected_m, n, k, num_sms, self.max_m, swiglu, packed)


def choose(
    problem: GroupedProblem | DenseProblem, epilogue: Epilogue, whole: tuple[int, int] | None = None
) -> TileConfig:
    """Return the tile for a problem under the current settings; without tma_store if the epilogue stores to peers."""
    if isinstance(problem, GroupedProblem):
        whole = whole and (rounded_rows(whole[0]), whole[1])
        tile = choose_grouped(problem, whole=whole, unsplit=config.settings.batch_invariant)
    else:
        m, n, k, num_sms, packed = problem
        parts = invariant_parts(n, k) if config.settings.batch_invariant else None
        tile = choose_dense(m, n, k, num_sms, parts, packed)
    return without_tma_store(tile, problem.k) if isinstance(epilogue, PeerStore) else tile


# ---- groups along K ----

GROUPED_K_TILES = (
    *(GroupedKTile(256, 96, 4), GroupedKTile(256, 112, 4), GroupedKTile(128, 96, 6)),
    *(GroupedKTile(256, 128, 3, block_scales=True), GroupedKTile(128, 128, 5, block_scales=True)),
)
# Time per row in a tile of 128 rows over time per row in a tile of 256 rows: fewer rows share each load of ``b``.
_LOW_TILE = 1.2


def choose_grouped_k(groups: int, m: int, n: int, num_sms: int, block_scales: bool = False) -> GroupedKTile:
    """Return the tile with the least number of waves times area; tiles of 128 rows count `_LOW_TILE` times their area.

    Low tiles need more loads, but fill the last wave better. block_scales: see `GroupedKTile`.
    """

    def cost(tile: GroupedKTile) -> float:
        waves = ceil(groups * ceil(m / tile.block_m) * ceil(n / tile.block_n) / num_sms)
        return waves * tile.block_m * tile.block_n * (_LOW_TILE if tile.block_m == 128 else 1)

    return min((tile for tile in GROUPED_K_TILES if tile.block_scales == block_scales), key=cost)
