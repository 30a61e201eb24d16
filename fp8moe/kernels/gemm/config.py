"""Tile configurations of the dense GEMM and the cost model that chooses one.

A pure function of the problem and the number of SMs: nothing is measured at run time. The constants below were fitted
to an H200 (docs/kernel-notes.md); ``choose`` can be called, and printed, on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from fp8moe.runtime.hopper import REGISTERS_PER_SM, SHARED_LIMIT, SHARED_PER_SM

PRODUCER_REGISTERS = 24
MAX_STAGES = 16


@dataclass(frozen=True)
class GemmConfig:
    """One compiled variant of ``cuda/gemm.cu``, up to the shape of the weights.

    Attributes:
        block_m: tokens of a tile.
        block_n: output features of a tile.
        swap: weights, not tokens, are the 64-row operand of wgmma.
        warpgroups: math warpgroups that share a tile.
        stages: depth of the shared-memory ring.
        split_k: blocks of a cluster that share the K of one tile.
        blocks_per_sm: resident blocks the registers and the shared memory are sized for.
        staged: the bfloat16 tile has shared memory of its own, out of which TMA writes it under the next tile's
            products; otherwise each warp writes its rows by way of a small buffer, and the ring is deeper.
        groups: weight matrices of a grouped GEMM, of whose rows the block keeps a table; 0 for a dense one.
    """

    block_m: int
    block_n: int
    swap: bool = False
    warpgroups: int = 2
    stages: int = 4
    split_k: int = 1
    blocks_per_sm: int = 1
    staged: bool = False
    groups: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block: the math warpgroups and the producer's."""
        return 128 * (self.warpgroups + 1)

    @property
    def columns(self) -> int:
        """Width of one wgmma; a tile of 256 columns takes two."""
        if self.swap:
            return self.block_m
        return 128 if self.block_n == 256 else self.block_n

    @property
    def accumulators(self) -> int:
        """Float32 registers that one slab of 64 rows takes in a math thread."""
        return self.columns // 2

    @property
    def waves(self) -> int:
        """Slabs of one math warpgroup."""
        return self.block_m * self.block_n // (64 * self.columns * self.warpgroups)

    @property
    def math_registers(self) -> int:
        """Registers of a math thread, by ``setmaxnreg``; 0 leaves every thread its even share."""
        return 240 if self.warpgroups == 2 and self.blocks_per_sm == 1 else 0

    @property
    def registers(self) -> int:
        """Registers that a math thread may use."""
        return self.math_registers or min(255, REGISTERS_PER_SM // (self.threads * self.blocks_per_sm) // 8 * 8)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: both tiles, the scales of the tokens and two mbarriers."""
        return (self.block_m + self.block_n) * 128 + _round_up((self.block_m + (4 if self.groups else 0)) * 4, 128) + 16

    @property
    def reduces(self) -> bool:
        """Whether the epilogue sums through the reduction buffer."""
        return self.swap or self.split_k > 1

    @property
    def scale_box(self) -> int:
        """Token scales that one load brings: a group may begin at any row, a load only at a multiple of 4."""
        return min(self.block_m, 128) + (4 if self.groups else 0)

    @property
    def single_tile(self) -> bool:
        """Whether a block computes one tile only, rather than walk over many."""
        return self.split_k > 1 or (self.swap and self.groups == 0)

    @property
    def partial_bytes(self) -> int:
        """Shared memory of a float32 tile: the reduction buffer, or what a split block sends."""
        slices = self.split_k * ceil(self.block_m / self.split_k)
        return _round_up(slices * (self.block_n + (4 if self.swap else 8)) * 4, 128)

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory of the epilogue: the reduction buffer, the bfloat16 tile, or 16 x 64 of it per math warp."""
        if self.reduces:
            return self.partial_bytes
        return self.block_m * self.block_n * 2 if self.staged else self.warpgroups * 4 * 16 * 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, alignment included."""
        return self.stages * self.stage_bytes + self.epilogue_bytes + 8 + self.table_bytes + 1024

    @property
    def table_bytes(self) -> int:
        """Shared memory of the table of groups."""
        return (3 * self.groups + 1) * 4 if self.groups else 0


def _round_up(a: int, b: int) -> int:
    return -(-a // b) * b


def with_stages(config: GemmConfig, k: int) -> GemmConfig:
    """``config`` with as many stages as the shared memory of its share of an SM holds, and no more than K needs.

    A split's partial tile takes the place of the ring, which must be large enough for it.
    """
    budget = min(SHARED_LIMIT, SHARED_PER_SM // config.blocks_per_sm - 1024) - 1024 - 8 - config.table_bytes
    fit = (budget - config.epilogue_bytes) // config.stage_bytes
    most = ceil(ceil(k / 128) / config.split_k) if config.single_tile else MAX_STAGES
    if config.split_k > 1:
        most = max(most, ceil(config.partial_bytes / ((config.block_m + config.block_n) * 128)))
    return replace(config, stages=max(1, min(fit, most, MAX_STAGES)))


def raster_group(config: GemmConfig, m: int, concurrent: int) -> int:
    """Height, in tiles, of the groups that ``concurrent`` tiles walk column by column.

    The square-most footprint reads the least of both operands; the groups are then evened out over the rows.
    """
    rows = ceil(m / config.block_m)
    ideal = max(1, round((concurrent * config.block_n / config.block_m) ** 0.5))
    return ceil(rows / ceil(rows / ideal))


# The cost model. Times in microseconds, cycles at the 1755 MHz the GPU keeps under load; docs/kernel-notes.md tells how
# they were fitted.
_START = 3.26  # launch, first loads from a cold L2, last stores
_PER_STAGE = 0.002  # start of the first load to start of the next
_PER_SPLIT = 0.026  # each further block that shares a K
_REDUCTION = 2.93  # of a 128 x 128 tile through distributed shared memory
_EPILOGUE = 0.679  # of a 128 x 128 tile
_STAGED_EPILOGUE = 0.254  # of one that TMA writes
_SHALLOW = 1.03  # products take longer behind a ring of less than four stages
_STEP_LATENCY = 320  # cycles from a full stage to an empty one, beside the product itself
_STEP_WAIT = 0.295  # part of the product that a single warpgroup cannot hide
_MMA = 1.172 / 32  # cycles of one output element and 128 products
_LOAD = 66.5  # bytes a cycle into one SM
_L2 = 12.8e6  # bytes a microsecond out of L2
_DRAM = 2.88e6  # bytes a microsecond out of memory
_OVERLAP = 3.96  # exponent of the norm that joins times that overlap: 1 not at all, infinity fully
_CYCLES = 1755

# Clusters of each size that 132 SMs hold at one block per SM: GPCs have 16 or 18 of them, so that some are left over.
_RESIDENT_CLUSTERS = {1: 132, 2: 66, 3: 43, 4: 30, 5: 22, 6: 20, 7: 15, 8: 15}


def resident_clusters(config: GemmConfig, num_sms: int) -> int:
    """Clusters of ``config`` that run at one time."""
    return max(1, _RESIDENT_CLUSTERS[config.split_k] * num_sms // 132 * config.blocks_per_sm)


def predict(config: GemmConfig, m: int, n: int, k: int, num_sms: int) -> float:
    """Microseconds that ``config`` is expected to take for (m, n, k), from a cold L2."""
    tiles = ceil(m / config.block_m) * ceil(n / config.block_n)
    slots = resident_clusters(config, num_sms)
    waves = ceil(tiles / slots)
    return time_of(config, tiles, waves, min(tiles, slots), k, n * k + m * k + 2 * m * n, num_sms)


def time_of(
    config: GemmConfig, tiles: float, waves: float, concurrent: float, k: int, moved: float, num_sms: int
) -> float:
    """Microseconds of ``tiles`` tiles, ``concurrent`` at a time, ``waves`` one after the other, over K = ``k``.

    moved: bytes to and from memory.
    """
    per_sm = max(1, concurrent * config.split_k / num_sms)
    area = config.block_m * config.block_n

    mma = area * _MMA
    alone = _STEP_LATENCY + (_STEP_WAIT * mma if config.warpgroups == 1 else 0)
    loaded = per_sm * (config.block_m + config.block_n) * 128 / _LOAD
    steps = waves * ceil(ceil(k / 128) / config.split_k)
    shallow = _SHALLOW if config.staged and config.stages < 4 else 1
    compute = steps * max(alone, per_sm * mma, loaded) / _CYCLES * shallow
    dram = moved / _DRAM
    l2 = tiles * (config.block_m + config.block_n) * k / _L2
    overlapped = (compute**_OVERLAP + dram**_OVERLAP + l2**_OVERLAP) ** (1 / _OVERLAP)

    ends = (_STAGED_EPILOGUE if config.staged else _EPILOGUE) * waves * area / 128**2
    if config.split_k > 1:
        ends += _PER_SPLIT * (config.split_k - 1) + _REDUCTION * area / 128**2
    if config.warpgroups == 1 or config.split_k > 1:
        ends += _PER_STAGE * config.stages
    return _START + overlapped + ends


def candidates(m: int, n: int, k: int, num_sms: int) -> list[GemmConfig]:
    """The configurations worth considering for (m, n, k): what fits an SM, and splits that fit in one wave.

    Up to 32 tokens, weights are the 64-row operand; up to 64, one warpgroup takes all tokens.
    """
    if m <= 32:
        tokens = max(8, 1 << (m - 1).bit_length())
        tiles = [GemmConfig(tokens, 64 * groups, swap=True, warpgroups=groups) for groups in (1, 2)]
    elif m <= 64:
        tiles = [GemmConfig(64, block_n, warpgroups=1) for block_n in (64, 96, 128)]
    else:
        tiles = [GemmConfig(128, block_n) for block_n in (64, 96, 112, 128, 160, 176, 192)]
    if m > 128:
        tiles.append(GemmConfig(256, 128))
        tiles += [replace(tile, staged=True) for tile in tiles if tile.block_n >= 128 and tile.block_n % 64 == 0]

    found = []
    for tile in tiles:
        count = ceil(m / tile.block_m) * ceil(n / tile.block_n)
        for split_k in range(1, 2 if tile.staged else min(8, ceil(k / 128)) + 1):
            for blocks_per_sm in range(1, 5 if m <= 64 else 2):
                config = with_stages(replace(tile, split_k=split_k, blocks_per_sm=blocks_per_sm), k)
                one_wave = count <= resident_clusters(config, num_sms)
                crowded = blocks_per_sm == 1 or count * split_k > 0.7 * num_sms * (blocks_per_sm - 1)
                if fits(config, k) and (one_wave or split_k == 1) and crowded:
                    found.append(config)
    return found


def fits(config: GemmConfig, k: int) -> bool:
    """Whether registers and shared memory suffice, with two stages to alternate between."""
    registers = config.accumulators * (config.waves + 1) + 28
    shared = config.shared_bytes
    return (
        registers <= config.registers
        and shared <= SHARED_LIMIT
        and (shared + 1024) * config.blocks_per_sm <= SHARED_PER_SM
        and config.stages >= min(2, ceil(ceil(k / 128) / config.split_k))
        and (config.split_k == 1 or config.stages * (config.block_m + config.block_n) * 128 >= config.partial_bytes)
    )


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, num_sms: int) -> GemmConfig:
    """The candidate that the cost model expects to be fastest."""
    return min(candidates(m, n, k, num_sms), key=lambda config: predict(config, m, n, k, num_sms))


def describe(m: int, n: int, k: int, num_sms: int = 132) -> str:
    """A table of the candidates for (m, n, k), the fastest expected first."""
    costs = sorted(((predict(c, m, n, k, num_sms), c) for c in candidates(m, n, k, num_sms)), key=lambda pair: pair[0])
    return "\n".join(f"{cost:9.1f} us  {config}" for cost, config in costs)
