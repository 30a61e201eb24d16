"""Tile configurations of the dense GEMM and the cost model that chooses one.

A pure function of the problem and the number of SMs: nothing is measured at run time. The constants below were fitted to
an H200 (docs/kernel-notes.md has the sweep); ``choose`` can be called, and printed, on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

SHARED_LIMIT = 227 * 1024  # bytes of shared memory one block may use
SHARED_PER_SM = 228 * 1024  # of which every resident block costs 1 KB more
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
        cluster_m: tiles along M that share weight loads by multicast.
        cluster_n: tiles along N that share token loads by multicast.
        blocks_per_sm: resident blocks the registers and the shared memory are sized for.
    """

    block_m: int
    block_n: int
    swap: bool = False
    warpgroups: int = 2
    stages: int = 4
    split_k: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    blocks_per_sm: int = 1

    @property
    def cluster(self) -> int:
        """Blocks in a cluster."""
        return self.split_k * self.cluster_m * self.cluster_n

    @property
    def threads(self) -> int:
        """Threads of a block: the math warpgroups and the producer's."""
        return 128 * (self.warpgroups + 1)

    @property
    def math_registers(self) -> int:
        """Registers a math thread is given by ``setmaxnreg``; 0 leaves the launch's even share in place."""
        return 232 if self.warpgroups == 2 and self.blocks_per_sm == 1 else 0

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: both tiles, their scales and two mbarriers."""
        granule = min(128, self.block_n & -self.block_n)
        scales = _round_up(self.block_m * 4, 128) + _round_up(self.block_n // granule * 4, 16)
        return (self.block_m + self.block_n) * 128 + scales + 16

    @property
    def reduces(self) -> bool:
        """Whether the epilogue sums through the reduction buffer."""
        return self.swap or self.split_k > 1

    def epilogue_bytes(self, *, float32: bool) -> int:
        """Shared memory of the epilogue: the reduction buffer, or a 16 x 64 bfloat16 tile per math warp."""
        if self.reduces:
            return self.block_m * (self.block_n + (4 if self.swap else 8)) * 4
        return 0 if float32 else self.warpgroups * 4 * 16 * 128

    def shared_bytes(self, *, float32: bool = False) -> int:
        """Dynamic shared memory of a block, alignment included."""
        return self.stages * self.stage_bytes + self.epilogue_bytes(float32=float32) + 8 + 1024


def _round_up(a: int, b: int) -> int:
    return -(-a // b) * b


def with_stages(config: GemmConfig, k: int) -> GemmConfig:
    """``config`` with as many stages as the shared memory of its share of an SM holds, and no more than K needs.

    A split's partial tile takes the place of the ring, which must be large enough for it.
    """
    budget = min(SHARED_LIMIT, SHARED_PER_SM // config.blocks_per_sm - 1024) - 1024 - 8
    fit = (budget - config.epilogue_bytes(float32=False)) // config.stage_bytes
    most = ceil(ceil(k / 128) / config.split_k) if config.reduces else MAX_STAGES
    if config.split_k > 1:
        most = max(most, ceil(config.epilogue_bytes(float32=True) / ((config.block_m + config.block_n) * 128)))
    return replace(config, stages=max(1, min(fit, most, MAX_STAGES)))


def raster_group(config: GemmConfig, m: int, n: int, clusters: int) -> int:
    """Height, in cluster tiles, of the groups that ``clusters`` concurrent cluster tiles walk column by column.

    The square-most footprint reads the least of both operands; the groups are then evened out over the rows.
    """
    height, width = config.block_m * config.cluster_m, config.block_n * config.cluster_n
    rows = ceil(m / height)
    ideal = max(1, round((clusters * width / height) ** 0.5))
    return ceil(rows / ceil(rows / ideal))


def choose(m: int, n: int, k: int, num_sms: int) -> GemmConfig:
    return with_stages(GemmConfig(block_m=128,block_n=128),k)
