"""The cost model of the GEMMs: how long a compiled variant is expected to take.

A pure function of the problem and the number of SMs: nothing is measured at run time. Times in microseconds, bytes a
microsecond, cycles at the 1755 MHz that an H200 keeps under load; docs/kernel-notes.md tells how the constants were
fitted to one.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp, inf
from typing import NamedTuple

from fp8moe.kernels.gemm.config import GemmConfig

_CYCLES = 1755

# Clusters of each size that 132 SMs hold at one block per SM: GPCs have 16 or 18 of them, so that some are left over.
_RESIDENT_CLUSTERS = {1: 132, 2: 66, 3: 43, 4: 30, 5: 22, 6: 16, 7: 15, 8: 15}


def resident_clusters(config: GemmConfig, num_sms: int) -> int:
    """Clusters of ``config`` that run at one time."""
    return max(1, _RESIDENT_CLUSTERS[config.split_k] * num_sms // 132 * config.blocks_per_sm)


# ---- one matrix ----


class _Dense(NamedTuple):
    """Constants of `dense_time`."""

    start: float  # launch, first loads from a cold L2, last stores
    per_stage: float  # start of the first load to start of the next
    per_split: float  # each further block that shares a K
    reduction: float  # of a 128 x 128 tile through distributed shared memory
    epilogue: float  # of a 128 x 128 tile
    step: float  # cycles from a full stage to an empty one, beside the product itself
    wait: float  # part of the product that a single warpgroup cannot hide
    mma: float  # cycles of one output element and 128 products
    shared: float  # cycles of 128 bytes into or out of shared memory
    sparse: float  # reading takes longer where the rings of an SM hold less than 200 KB
    l2: float  # bytes a microsecond out of L2
    dram: float  # bytes a microsecond out of memory
    overlap: float  # exponent of the norm that joins times that overlap: 1 not at all, infinity fully
    # Of tiles whose rows are tokens:
    staged_epilogue: float = 0  # of a 128 x 128 tile that TMA writes, under the next one
    shallow: float = 1  # products take longer behind a ring of less than four stages
    piece: float = 0  # as mma, for each piece of a product's columns that has a weight scale of its own
    overlapped_step: float = 0  # cycles from one stage to the next where the next product is under way
    overlapped_mma: float = 1  # of a product's cycles, with another under way


_SWAPPED = _Dense(
    start=3.71,
    per_stage=0.00527,
    per_split=0.0608,
    reduction=1.81,
    epilogue=3.66,
    step=410.2,
    wait=0.343,
    mma=0.0129,
    shared=1.29,
    sparse=0.00515,
    l2=inf,
    dram=3.36e6,
    overlap=3.72,
)
_STRAIGHT = _Dense(
    start=3.63,
    per_stage=0.0132,
    per_split=0.0516,
    reduction=3.95,
    epilogue=2.16,
    step=350.9,
    wait=0.646,
    mma=0.0355,
    shared=0.875,
    sparse=0.115,
    l2=15.4e6,
    dram=3.6e6,
    overlap=3.26,
    staged_epilogue=0.379,
    shallow=1.05,
    piece=0.000259,
    overlapped_step=63.5,
    overlapped_mma=1.15,
)


def dense_time(config: GemmConfig, m: int, n: int, k: int, num_sms: int) -> float:
    """Microseconds that ``config`` is expected to take for (m, n, k), from a cold L2."""
    c = _SWAPPED if config.swap else _STRAIGHT
    tiles = ceil(m / config.block_m) * ceil(n / config.block_n)
    slots = resident_clusters(config, num_sms)
    waves = ceil(tiles / slots)
    per_sm = max(1, min(tiles, slots) * config.split_k / num_sms)
    area = config.block_m * config.block_n

    mma = area * (c.mma + c.piece * config.scale_pieces)
    alone = c.step + (c.wait * mma if config.warpgroups == 1 else 0)
    if config.overlaps:
        mma *= c.overlapped_mma
        alone = c.overlapped_step
    # TMA writes both tiles; each product reads its 64 rows and its columns.
    shared = config.block_m + config.block_n + area * (1 / 64 + 1 / config.columns)
    loaded = per_sm * shared * c.shared
    steps = waves * ceil(ceil(k / 128) / config.split_k)
    shallow = c.shallow if config.staged and config.stages < 4 else 1
    compute = steps * max(alone, per_sm * mma, loaded) / _CYCLES * shallow
    in_flight = min(1.0, per_sm * config.stages * (config.block_m + config.block_n) * 128 / 200e3)
    sparse = 1 + c.sparse * (1 - in_flight)
    dram = (n * k + m * k + 2 * m * n) / c.dram * sparse
    l2 = tiles * (config.block_m + config.block_n) * k / c.l2 * sparse
    overlapped = (compute**c.overlap + dram**c.overlap + l2**c.overlap) ** (1 / c.overlap)

    before = (waves - 1) * (c.staged_epilogue if config.staged else c.epilogue)
    ends = (before + c.epilogue) * area / 128**2
    if config.split_k > 1:
        ends += c.per_split * (config.split_k - 1) + c.reduction * area / 128**2
    if config.warpgroups == 1 or config.split_k > 1:
        ends += c.per_stage * config.stages
    return c.start + overlapped + ends


# ---- one matrix for each group: the host does not know their sizes, only how many rows one is expected to have ----

_GROUPED_START = 7.65
_GROUPED_STEP = 357.1  # cycles from a full stage to an empty one for one slab of a warpgroup, its product aside
_GROUPED_OVERLAPPED = 251.2  # the same with its product, where the next one is under way meanwhile
_GROUPED_MMA = 0.0332  # cycles of one output element and 128 products
_GROUPED_LOAD = 62.8  # bytes a cycle into one SM
_GROUPED_L2 = 10.3e6
_GROUPED_DRAM = 4.67e6
_GROUPED_EPILOGUE = 1.59  # of a 128 x 128 tile
_GROUPED_STAGED_EPILOGUE = 0.0216  # of one that TMA writes
_GROUPED_SPARSE = 0.0346  # reading from memory takes longer where the rings of an SM hold less than 200 KB
_GROUPED_SHALLOW = 1.02  # products take longer behind a ring of less than four stages
_GROUPED_FULLEST = 0.092  # how much the fullest tiles of a round decide when it ends, the average one the rest
_GROUPED_SHARED = 0.961  # of a product whose tokens a second one shares
_GROUPED_OVERLAP = 2.99  # exponent of the norm that joins times that overlap


@lru_cache(maxsize=4096)
def group_sizes(expected_m: float) -> tuple[tuple[int, float], ...]:
    """Sizes of a group of about ``expected_m`` rows, with their probabilities.

    Few rows are taken to be Poisson distributed, many to lie within a third of what is expected.
    """
    if expected_m >= 16:
        return tuple((round(expected_m * (0.68 + 0.64 * (i + 0.5) / 32)), 1 / 32) for i in range(32))
    sizes, probability = [], exp(-expected_m)
    for rows in range(1, 48):
        probability *= expected_m / rows
        sizes.append((rows, probability))
    return tuple(sizes)


def _slabs_in_use(config: GemmConfig, rows: int) -> tuple[int, ...]:
    """Slabs that each warpgroup multiplies where a tile has ``rows`` of a group (``slab_row`` of gemm_layout.cuh)."""
    if config.swap:
        return (config.slabs,) * config.warpgroups
    in_use = ceil(rows / 64)
    if config.columns < config.block_n or config.slabs == 1:  # a warpgroup has 64 rows
        return tuple(config.slabs if i < in_use else 0 for i in range(config.warpgroups))
    return tuple(ceil((in_use - i) / config.warpgroups) for i in range(config.warpgroups))


@lru_cache(maxsize=65536)
def _step_cycles(config: GemmConfig, rows: int) -> float:
    """Cycles of one step of 128 along K in a tile with ``rows`` of a group, on an SM that has nothing else."""
    height = config.block_m if config.swap else 64 * ceil(rows / 64)
    product = 64 * config.columns * _GROUPED_MMA  # of one slab
    slabs = _slabs_in_use(config, rows)
    alone = _GROUPED_OVERLAPPED if config.overlaps else max(slabs) * (_GROUPED_STEP + product)
    return max(alone, sum(slabs) * product, (height + config.block_n) * 128 / _GROUPED_LOAD)


@lru_cache(maxsize=65536)
def _group_cycles(config: GemmConfig, rows: int) -> float:
    """The same of all tiles of a group, in one column of tiles."""
    whole, rest = divmod(rows, config.block_m)
    if config.block_m == 256 and whole and 0 < rest <= 64:  # gemm_schedule.cuh evens out the last two
        return (whole - 1) * _step_cycles(config, 256) + _step_cycles(config, 192) + _step_cycles(config, 64 + rest)
    return whole * _step_cycles(config, config.block_m) + (_step_cycles(config, rest) if rest else 0)


def grouped_time(config: GemmConfig, groups: int, expected_m: float, n: int, k: int, num_sms: int) -> float:
    """Microseconds expected for groups of about ``expected_m`` rows and weights (n, k), from a cold L2."""
    expected_m = max(expected_m, 1 / groups)
    steps, columns, height = ceil(k / 128), ceil(n / config.block_n), config.block_m
    sizes = group_sizes(expected_m)
    tiles = sum(probability * ceil(rows / height) for rows, probability in sizes) * groups * columns
    cycles = sum(probability * _group_cycles(config, rows) for rows, probability in sizes) * groups * columns
    active = sum(probability for _, probability in sizes)
    slots = resident_clusters(config, num_sms)
    share = tiles / slots if tiles > 16 * slots else max(1, ceil(tiles / slots - 0.2))

    # Blocks that share an SM hide each other's waits, not each other's products and loads.
    product = height * config.block_n * _GROUPED_MMA if config.swap else 0
    loaded = (height + config.block_n) * 128
    per_sm = max(1.0, min(tiles, slots) * config.split_k / num_sms)
    fullest = _step_cycles(config, height)
    average = fullest + (1 - _GROUPED_FULLEST) * (cycles / tiles - fullest)
    if not config.swap and config.columns < config.block_n:
        average *= _GROUPED_SHARED
    step = max(average, per_sm * product, per_sm * loaded / _GROUPED_LOAD if config.swap else 0)
    shallow = _GROUPED_SHALLOW if config.stages < 4 and not config.swap else 1
    compute = share * ceil(steps / config.split_k) * step / _CYCLES * shallow

    rows = expected_m * groups
    in_flight = min(1.0, per_sm * config.stages * loaded / 200e3)
    dram = (active * groups * n * k + rows * k + 2 * rows * n) / _GROUPED_DRAM * (1 + _GROUPED_SPARSE * (1 - in_flight))
    l2 = tiles * loaded * steps / _GROUPED_L2
    overlapped = (compute**_GROUPED_OVERLAP + dram**_GROUPED_OVERLAP + l2**_GROUPED_OVERLAP) ** (1 / _GROUPED_OVERLAP)
    ends = (_GROUPED_STAGED_EPILOGUE if config.staged else _GROUPED_EPILOGUE) * share * height * config.block_n / 128**2
    return _GROUPED_START + overlapped + ends
