"""The cost model of the GEMMs: expected microseconds of a tile. docs/findings/cost-model.md says how it was fitted."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from math import ceil, exp, gcd, log
from typing import NamedTuple

from fp8moe.kernels.gemm.sm90 import TileConfig, tokens_of_tile

_CYCLES = 1755  # clock cycles per microsecond of an H200 under load

# Clusters that run at once on 132 SMs with one block per SM; dict key: blocks per cluster. A cluster stays within a
# GPC, which has 16 or 18 SMs, so some SMs are idle. Measured: 40 clusters of three blocks take two waves on every H200.
_RESIDENT_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 16, 7: 15, 8: 15}

# Bytes per microsecond read from L2; dict key: alignment of the operands' rows in bytes. An L2 sector has 32 bytes.
_L2 = {16: 6.1e6, 32: 12.2e6, 64: 16e6, 128: 16.7e6}


def _l2_rate(k: int) -> float:
    return _L2[max(16, gcd(k, 128))]


def resident_clusters(tile: TileConfig, num_sms: int) -> int:
    """Return how many clusters of ``tile`` run at the same time."""
    return max(1, _RESIDENT_CLUSTERS[tile.split_k] * num_sms // 132 * tile.blocks_per_sm)


# ---- one weight matrix ----


class _DenseCosts(NamedTuple):
    """Constants of `dense_time`: microseconds, unless a comment says otherwise."""

    start: float  # time of the launch, the first loads from a cold L2 and the last stores
    per_stage: float  # time between the starts of two consecutive loads, with nothing else running
    split: float  # time added once if the blocks of a cluster split K
    per_split: float  # time added for each block of the cluster after the first, if they split K
    reduction: float  # time to sum a split 128 x 128 tile with 256 threads, through distributed shared memory
    epilogue: float  # time of the epilogue of a 128 x 128 tile
    last_epilogue: float  # time of the epilogue of a block's last 128 x 128 tile, when all blocks store at once
    step: float  # cycles that a stage (128 along K) takes besides its MMAs
    shared: float  # cycles to move 128 bytes into or out of shared memory
    dram: float  # bytes per microsecond from device memory
    # Exponent p of the p-norm that gives the total of overlapping times: 1 means no overlap, infinity full overlap.
    overlap: float
    crowded: float = 0  # memory time is multiplied by 1 - crowded * (blocks on the fullest SM - mean blocks per SM)
    # The following constants apply only to tiles whose 64-row operand is tokens.
    wait: float = 0  # fraction of the MMA time that a single warpgroup cannot hide
    mma: float = 0  # cycles of MMAs per output element and 128 elements of K
    piece: float = 0  # cycles added to `mma` for each piece of the columns that has its own weight scale
    per_tile: float = 0  # time from one tile to the next; unless TMA stores the tile, its epilogue comes on top
    overlapped_step: float = 0  # like `step`, for tiles that overlap MMAs (`TileConfig.overlaps`)
    overlapped_mma: float = 1  # factor of the MMA cycles of tiles that overlap MMAs


_HALF = 0.7  # time of half a tile over time of a whole tile; half a tile loads two thirds of the bytes
# Microseconds that each further part of K adds to a 128 x 128 tile: `_PART` if the sums of earlier parts are in shared
# memory, `_KEPT_PART` if these sums are in registers.
_PART, _KEPT_PART = 0.75, 0.1

_SWAPPED = _DenseCosts(
    start=1.939,
    per_stage=0.1071,
    split=0.1968,
    per_split=0.02917,
    reduction=0.8832,
    epilogue=7.401,
    last_epilogue=3.427,
    step=105.9,
    shared=1.024,
    dram=3.36e6,
    overlap=1.91,
    crowded=0.1044,
)
_STRAIGHT = _DenseCosts(
    start=1.724,
    per_stage=0.04498,
    split=0.5342,
    per_split=0.007489,
    reduction=2.414,
    epilogue=0.2811,
    last_epilogue=1.504,
    step=335.1,
    shared=1.011,
    dram=3.712e6,
    overlap=2.524,
    wait=0.5724,
    mma=0.03426,
    piece=0.001045,
    per_tile=0.5581,
    overlapped_step=51.98,
    overlapped_mma=1.197,
)


def dense_time(tile: TileConfig, m: int, n: int, k: int, num_sms: int) -> float:
    """Return the expected microseconds of ``tile`` for a GEMM (m, n, k) that starts with a cold L2."""
    c = _SWAPPED if tile.weights_as_rows else _STRAIGHT
    tiles = ceil(m / tile.block_m) * ceil(n / tile.block_n)
    slots = resident_clusters(tile, num_sms)
    waves = ceil(tiles / slots)
    rounds = waves - (1 - _HALF if tile.half_tiles else 0)
    mean = min(tiles, slots) * tile.split_k / num_sms
    per_sm = max(1, mean)
    fullest = ceil(per_sm)  # number of blocks on the SM that has the most blocks
    rows = tile.block_m if tile.weights_as_rows else tokens_of_tile(tile, m)
    area, used = tile.block_m * tile.block_n, rows * tile.block_n

    mma = area * (c.mma + c.piece * tile.scale_pieces)
    alone = c.step + (c.wait * mma if tile.warpgroups == 1 else 0)
    if tile.overlaps:
        mma *= c.overlapped_mma
        alone = c.overlapped_step
    # Shared-memory traffic: TMA writes the tiles of both operands; each MMA reads 64 rows and `mma_n` columns of them.
    shared = rows + tile.block_n + area * (1 / 64 + 1 / tile.mma_n)
    loaded = fullest * shared * c.shared
    steps = rounds * ceil(ceil(k / 128) / tile.split_k)
    compute = steps * max(alone, fullest * mma, loaded) / _CYCLES
    dram = (n * k * tile.weight_size + m * k + 2 * m * n) / c.dram * (1 - c.crowded * (fullest - mean))
    # L2 is no bottleneck if rows are multiples of 128 bytes.
    l2 = tiles * (rows + tile.block_n) * k / _l2_rate(k) if k % 128 else 0
    overlapped = (compute**c.overlap + dram**c.overlap + l2**c.overlap) ** (1 / c.overlap)

    epilogue = c.epilogue * used / 128**2
    ends = c.last_epilogue * used / 128**2 + (waves - 1) * (c.per_tile + (0 if tile.tma_store else epilogue))
    if tile.split_k > 1:
        # Each block of a cluster sums one slice of the partial tiles of all blocks of the cluster.
        summed = used / 128**2 * (1 - 1 / tile.split_k) * 2 / min(tile.warpgroups, 2)
        ends += c.split + c.per_split * (tile.split_k - 1) + c.reduction * fullest * summed
    if tile.k_parts > 1:
        kept = tile.part_registers / (tile.slabs * tile.accumulators)
        part = kept * _KEPT_PART + (1 - kept) * _PART
        ends += waves * (tile.k_parts - 1) * part * area / 128**2
    if tile.warpgroups == 1 or tile.split_k > 1:
        ends += c.per_stage * tile.stages
    return c.start + overlapped + ends


# ---- one weight matrix per group: the host knows the expected rows of a group, but not the actual sizes ----

# These constants are microseconds, unless a comment says otherwise.
_GROUPED_START = 3.619
_GROUPED_STEP = 331.8  # cycles that a stage (128 along K) takes for one slab of a warpgroup, besides its MMAs
_GROUPED_SWAPPED = 3.526  # factor of the MMA cycles of a stage if weights, not tokens, are the 64-row operand
_GROUPED_OVERLAPPED = 100  # like _GROUPED_STEP, for tiles that overlap MMAs (`TileConfig.overlaps`)
_GROUPED_OVERLAPPED_PRODUCT = 0.6  # factor of the MMA cycles of a stage, for tiles that overlap MMAs
_GROUPED_MMA = 0.03411  # cycles of MMAs per output element and 128 elements of K
_GROUPED_LOAD = 56.94  # bytes per cycle that one thread block loads
# The load rate of an SM with several blocks, as a multiple of _GROUPED_LOAD:
_GROUPED_SM_LOAD = 1.392  # SM's load rate over _GROUPED_LOAD, for blocks with one math warpgroup
_GROUPED_SWAPPED_SM_LOAD = 0.6052  # SM's load rate over _GROUPED_LOAD, if weights are the 64-row operand
_GROUPED_WIDE_SM_LOAD = 1.03  # like _GROUPED_SWAPPED_SM_LOAD, for tiles of 256 features (SwiGLU only)
_GROUPED_LATENCY = 1970  # minimum cycles to fill and empty all stages of a ring once
_GROUPED_DRAM = 5.411e6  # bytes per microsecond from device memory
_GROUPED_EPILOGUE = 0.7145  # time of the epilogue of a 128 x 128 tile
_GROUPED_STAGED_EPILOGUE = 0.1215  # time of the epilogue of a 128 x 128 tile that TMA writes
_GROUPED_LAST_EPILOGUE = 1.18  # time added to a block's last epilogue, when all blocks store at once
_GROUPED_FULLEST = 0.03384  # weight of the fullest tile in the time of a stage; the average tile has 1 minus this
_GROUPED_SHARED = 0.9521  # factor of the time of a stage whose two MMAs read the same tokens
_GROUPED_PER_SPLIT = 0.08294  # time added for each block of a cluster after the first, if they split K
_GROUPED_REDUCTION = 2.924  # time to sum the parts of a split 128 x 128 tile, through distributed shared memory
_GROUPED_OVERLAP = 1.965  # exponent p of the p-norm that gives the total of overlapping times

# Ratio of a tile's measured time to its modelled time; dict key: `TileConfig.name`. Tiles that are not listed have a
# ratio within half a percent of 1, were never timed (SwiGLU), or split K.
_GROUPED_TILES = {
    "8x64*2": 1.035,
    "8x64*4": 0.964,
    "16x64*1": 0.982,
    "16x64*2": 0.983,
    "16x64*4": 0.990,
    "16x128*2": 0.963,
    "32x64*1": 0.981,
    "32x64*2": 1.016,
    "32x64*3": 0.962,
    "32x64*4": 1.032,
    "64x64*1": 1.067,
    "64x64*2": 1.017,
    "64x128*1": 0.941,
    "128x128*1": 0.946,
    "128x128s*1": 1.073,
    "128x192*1": 0.944,
    "128x192s*1": 0.965,
    "128x256h*1": 0.868,
    "128x256sh*1": 0.934,
    "256x128*1": 0.953,
    "256x128s*1": 1.027,
}

# Of weights in four bits; fitted to products of MXFP4 (docs/findings/four-bit-weights.md).
_PACKED_STEP = 741.2  # like _GROUPED_STEP, if registers hold the weights
_PACKED_SWAPPED = 0.63  # like _GROUPED_SWAPPED
_PACKED_SLAB = 283.2  # cycles that an SM takes at least for a slab of any of its blocks
_UNPACKED = 1.2  # cycles that a stage takes longer for each feature that is unpacked in shared memory

SKEWED = 0.5  # assumed probability that routing is skewed rather than even
_QUANTILES = 16
_FEW = 12  # if the expected size of a group is below this, the size is modelled as Poisson distributed


@lru_cache(maxsize=4096)
def group_sizes(expected_m: float, skewed: bool) -> tuple[tuple[int, float], ...]:
    """Return the distribution of a group's size, as (rows, probability) pairs, for ``expected_m`` expected rows.

    With even routing, sizes lie within a third of ``expected_m``. With skewed routing, they are distributed like the
    square of an exponential variate: half of the groups have less than a quarter of an equal share, and one in thirty
    has more than five equal shares. A size below `_FEW` is replaced by a Poisson distribution with this mean.
    """
    sizes: dict[int, float] = defaultdict(float)
    middles = [(i + 0.5) / _QUANTILES for i in range(_QUANTILES)]
    shares = [log(1 - middle) ** 2 if skewed else 0.68 + 0.64 * middle for middle in middles]
    for share in shares:
        rows = share * _QUANTILES / sum(shares) * expected_m
        if rows >= _FEW:
            sizes[round(rows)] += 1 / _QUANTILES
            continue
        probability = exp(-rows) / _QUANTILES
        for count in range(1, 4 * _FEW):
            probability *= rows / count
            sizes[count] += probability
    return tuple(sizes.items())


@lru_cache(maxsize=256)
def _not_empty(expected_m: float, skewed: bool) -> float:
    """Return the probability that a group has rows."""
    return sum(probability for _, probability in group_sizes(expected_m, skewed))


def _slabs_in_use(tile: TileConfig, rows: int) -> tuple[int, ...]:
    """Return the number of slabs (64 x `mma_n`) that each warpgroup multiplies in a tile with ``rows`` rows in use.

    The kernel does the same in ``slab_row`` of gemm_layout.cuh.
    """
    if tile.weights_as_rows:
        return (tile.slabs,) * tile.warpgroups
    in_use = ceil(rows / 64)
    if tile.mma_n < tile.block_n or tile.slabs == 1:  # each warpgroup has 64 rows of the tile
        return tuple(tile.slabs if i < in_use else 0 for i in range(tile.warpgroups))
    return tuple(ceil((in_use - i) / tile.warpgroups) for i in range(tile.warpgroups))


@lru_cache(maxsize=1024)
def _step_cycles(tile: TileConfig, rows: int) -> float:
    """Return the cycles of one step of 128 along K, for a tile with ``rows`` rows in use that is alone on its SM."""
    height = tile.block_m if tile.weights_as_rows else 64 * ceil(rows / 64)
    product = 64 * tile.mma_n * _GROUPED_MMA  # cycles for the MMAs of one slab (64 rows) over 128 elements of K
    slabs = _slabs_in_use(tile, rows)
    together = sum(slabs) * product
    if tile.overlaps:
        alone = _GROUPED_OVERLAPPED + _GROUPED_OVERLAPPED_PRODUCT * product
    elif tile.packed and tile.weights_as_rows:
        alone = max(slabs) * (_PACKED_STEP + product * _PACKED_SWAPPED)
    else:
        alone = max(slabs) * (_GROUPED_STEP + product * (_GROUPED_SWAPPED if tile.weights_as_rows else 1))
    if tile.unpacks:
        alone, together = (cycles + tile.block_n * _UNPACKED for cycles in (alone, together))
    loaded = (height + tile.block_n * tile.weight_size) * 128 / _GROUPED_LOAD
    return max(alone, together, loaded, _GROUPED_LATENCY / (tile.stages * tile.depth))


@lru_cache(maxsize=256)
def _tiles_by_height(height: int, swap: bool, expected_m: float, skewed: bool) -> dict[int, float]:
    """Return how many tiles a group is expected to have in one column of tiles, by the tile's number of rows in use.

    The keys are numbers of rows in use, rounded up to multiples of 64.
    """
    tiles: dict[int, float] = defaultdict(float)
    for rows, probability in group_sizes(expected_m, skewed):
        whole, rest = divmod(rows, height)
        if swap:
            tiles[height] += probability * (whole + (rest > 0))
        elif height == 256 and whole and 0 < rest <= 64:  # the kernel balances the last two tiles (gemm_schedule.cuh)
            tiles[256] += probability * (whole - 1)
            tiles[192] += probability
            tiles[64 * ceil((64 + rest) / 64)] += probability
        else:
            tiles[height] += probability * whole
            tiles[64 * ceil(rest / 64)] += probability if rest else 0
    return tiles


def grouped_time(
    tile: TileConfig, groups: int, expected_m: float, n: int, k: int, num_sms: int, skewed: float = SKEWED
) -> float:
    """Return the expected microseconds for groups of ``expected_m`` expected rows and weights (n, k), with a cold L2.

    skewed: probability that routing is skewed rather than even.
    """
    shares = ((1 - skewed, False), (skewed, True))
    return sum(share * _grouped_time(tile, groups, expected_m, n, k, num_sms, s) for share, s in shares if share)


def _grouped_time(
    tile: TileConfig, groups: int, expected_m: float, n: int, k: int, num_sms: int, skewed: bool
) -> float:
    """Return the expected microseconds if routing is skewed, or if it is even.

    The two have times of their own, because the number of waves is rounded up: a mean number of tiles would give a
    number of waves that neither has.
    """
    expected_m = max(expected_m, 1 / groups)
    steps, columns, height = ceil(k / 128), ceil(n / tile.block_n), tile.block_m
    by_height = _tiles_by_height(height, tile.weights_as_rows, expected_m, skewed)
    in_column = sum(by_height.values())
    tiles = in_column * groups * columns
    fullest = _step_cycles(tile, height)
    cycles = sum(count * _step_cycles(tile, rows) for rows, count in by_height.items() if count) * groups * columns
    slots = resident_clusters(tile, num_sms)
    share = tiles / slots if tiles > 16 * slots else max(1, ceil(tiles / slots - 0.02))
    if tile.half_tiles and tiles <= 16 * slots and (tiles / slots - 0.02) % 1 <= 0.5:
        share -= 1 - _HALF

    # Blocks that share an SM hide each other's waiting times, but not each other's MMAs and loads.
    loaded = (
        sum(rows * count for rows, count in by_height.items()) / in_column + tile.block_n * tile.weight_size
    ) * 128
    per_sm = max(1.0, min(tiles, slots) * tile.split_k / num_sms)
    step = fullest + (1 - _GROUPED_FULLEST) * (cycles / tiles - fullest)
    if not tile.weights_as_rows and tile.mma_n < tile.block_n:
        step *= _GROUPED_SHARED
    if tile.weights_as_rows or tile.warpgroups == 1:
        several = _GROUPED_SM_LOAD
        if tile.weights_as_rows:
            several = _GROUPED_WIDE_SM_LOAD if tile.block_n == 256 else _GROUPED_SWAPPED_SM_LOAD
        step = max(step, per_sm * height * tile.block_n * _GROUPED_MMA, per_sm * loaded / (several * _GROUPED_LOAD))
        if tile.packed:
            step = max(step, per_sm * tile.slabs * tile.warpgroups * _PACKED_SLAB)
    compute = share * ceil(steps / tile.split_k) * step / _CYCLES

    rows = expected_m * groups
    active = _not_empty(expected_m, skewed) * groups
    dram = (active * n * k * tile.weight_size + rows * k + 2 * rows * n) / _GROUPED_DRAM
    l2 = tiles * loaded * steps / _l2_rate(k)
    overlapped = (compute**_GROUPED_OVERLAP + dram**_GROUPED_OVERLAP + l2**_GROUPED_OVERLAP) ** (1 / _GROUPED_OVERLAP)
    area = height * tile.block_n / 128**2
    ends = (_GROUPED_STAGED_EPILOGUE if tile.tma_store else _GROUPED_EPILOGUE) * share * area
    ends += _GROUPED_LAST_EPILOGUE * area
    if tile.split_k > 1:
        ends += _GROUPED_PER_SPLIT * (tile.split_k - 1) + _GROUPED_REDUCTION * area
    return (1 if tile.packed else _GROUPED_TILES.get(tile.name, 1)) * (_GROUPED_START + overlapped + ends)
