"""Tile configurations of the grouped GEMMs: which ones there are, and the choice by the cost model of `gemm_config`.

The host does not know the group sizes, so the choice rests on how many rows a group is expected to have.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, exp

from fp8moe.kernels.gemm.config import GemmConfig, fits, resident_clusters, with_stages

# Most expected rows of a group whose weights are the 64-row operand, and fewest of one whose tokens are.
_MOST_SWAPPED, _FEWEST_STRAIGHT = 24, 16


def row_tiles_bound(block_m: int, rows: int, groups: int, max_m: int | None) -> int:
    """The most tile rows that any sizes of the groups make: of ``rows`` rows, or with ``max_m`` of that many each."""
    if max_m is not None:
        return groups * ceil(max_m / block_m)
    return (rows + min(groups, rows) * (block_m - 1)) // block_m


def candidates(
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
            straight = [GemmConfig(256, 128), *straight, GemmConfig(128, 192), GemmConfig(128, 128)]
            straight += [replace(tile, staged=True) for tile in straight]
        tiles += straight

    found = []
    for tile in tiles:
        bound = row_tiles_bound(tile.block_m, rows, groups, max_m) * ceil(n / tile.block_n)
        for split_k in range(1, min(8, ceil(k / 128)) + 1 if tile.swap else 2):
            most = (3 if tile.block_n == 256 else 4) if tile.swap else 1  # beyond it, too few registers
            for blocks_per_sm in range(1, most + 1):
                shape = replace(tile, split_k=split_k, blocks_per_sm=blocks_per_sm, groups=groups)
                config = with_stages(shape, k)
                if fits(config, k) and (split_k == 1 or bound <= resident_clusters(config, num_sms)):
                    found.append(config)
    return found


# The cost model: `gemm_config.predict` for many small matrices at once. Microseconds, cycles at 1755 MHz, bytes a
# microsecond; docs/kernel-notes.md tells how the constants were fitted.
_START = 7.11
_STEP = 324  # cycles from a full stage to an empty one for one slab of a warpgroup, its product aside
_MMA = 0.0401  # cycles of one output element and 128 products
_LOAD = 64.6  # bytes a cycle into one SM
_L2 = 14e6
_DRAM = 3.9e6
_EPILOGUE = 0.219  # of a 128 x 128 tile
_STAGED_EPILOGUE = 0.0351  # of one that TMA writes
_SPARSE = 0.096  # reading from memory takes longer where the rings of an SM hold less than 200 KB
_SHALLOW = 1.02  # products take longer behind a ring of less than four stages
_OVERLAP = 3.47  # exponent of the norm that joins times that overlap
_CYCLES = 1755


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


def _cycles(config: GemmConfig) -> float:
    """Cycles of one step of 128 along K in a tile, on an SM that has nothing else.

    A tile with fewer rows takes as long: one warpgroup alone has nothing to hide its promotions behind.
    """
    loaded = (config.block_m + config.block_n) * 128 / _LOAD
    product = 64 * config.columns * _MMA  # of one slab
    return max(config.waves * (_STEP + product), config.waves * config.warpgroups * product, loaded)


def predict(config: GemmConfig, groups: int, expected_m: float, n: int, k: int, num_sms: int) -> float:
    """Microseconds expected for groups of about ``expected_m`` rows and weights (n, k), from a cold L2."""
    expected_m = max(expected_m, 1 / groups)
    steps, columns, height = ceil(k / 128), ceil(n / config.block_n), config.block_m
    sizes = group_sizes(expected_m)
    tiles = sum(probability * ceil(rows / height) for rows, probability in sizes) * groups * columns
    active = sum(probability for _, probability in sizes)
    slots = resident_clusters(config, num_sms)
    share = tiles / slots if tiles > 16 * slots else max(1, ceil(tiles / slots - 0.2))

    # Blocks that share an SM hide each other's waits, not each other's products and loads.
    product = height * config.block_n * _MMA if config.swap else 0
    loaded = (height + config.block_n) * 128
    per_sm = max(1.0, min(tiles, slots) * config.split_k / num_sms)
    step = max(_cycles(config), per_sm * product, per_sm * loaded / _LOAD)
    shallow = _SHALLOW if config.stages < 4 and not config.swap else 1
    compute = share * ceil(steps / config.split_k) * step / _CYCLES * shallow

    rows = expected_m * groups
    in_flight = min(1.0, per_sm * config.stages * loaded / 200e3)
    dram = (active * groups * n * k + rows * k + 2 * rows * n) / _DRAM * (1 + _SPARSE * (1 - in_flight))
    l2 = tiles * loaded * steps / _L2
    overlapped = (compute**_OVERLAP + dram**_OVERLAP + l2**_OVERLAP) ** (1 / _OVERLAP)
    ends = (_STAGED_EPILOGUE if config.staged else _EPILOGUE) * share * height * config.block_n / 128**2
    return _START + overlapped + ends


@lru_cache(maxsize=4096)
def choose(
    rows: int, groups: int, expected_m: float, n: int, k: int, num_sms: int, *, max_m: int | None, swiglu: bool
) -> GemmConfig:
    """The candidate that the cost model expects to be fastest."""
    found = candidates(rows, groups, expected_m, n, k, num_sms, max_m=max_m, swiglu=swiglu)
    return min(found, key=lambda config: predict(config, groups, expected_m, n, k, num_sms))


def describe(
    rows: int, groups: int, expected_m: float, n: int, k: int, num_sms: int = 132, *, swiglu: bool = False
) -> str:
    """A table of the candidates for contiguous groups, the fastest expected first."""
    found = candidates(rows, groups, expected_m, n, k, num_sms, max_m=None, swiglu=swiglu)
    costs = sorted(((predict(c, groups, expected_m, n, k, num_sms), c) for c in found), key=lambda pair: pair[0])
    return "\n".join(f"{cost:9.1f} us  {config}" for cost, config in costs)
