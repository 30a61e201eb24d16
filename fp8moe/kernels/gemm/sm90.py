"""Compiled variants of the GEMM kernels, up to the shape of the weights: tiles, and the resources that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from fp8moe.quant.formats import align
from fp8moe.runtime.sm90 import REGISTERS_PER_SM, SHARED_LIMIT, SHARED_PER_SM, SWIZZLE_ALIGNMENT, wgmma_source

PRODUCER_REGISTERS = 24
BUSY_PRODUCER_REGISTERS = 40  # of one with more to do (`source.kernel_spec`), 8 fewer in each math thread
MAX_STAGES = 16
_TILE_BYTES = 24  # ``struct Tile`` of cuda/sm90/gemm_layout.cuh
_OTHER_REGISTERS = 28  # of a math thread, beside sums and products
_LEAST_OTHER_REGISTERS = 24  # where sums of parts take all that is left


@dataclass(frozen=True)
class TileConfig:
    """One compiled variant of ``cuda/gemm.cu``, up to the shape of the weights.

    block_m: tokens of a tile. block_n: output features of a tile.
    weights_as_rows: weights, not tokens, are the 64-row operand of wgmma.
    warpgroups: math warpgroups that share a tile. stages: depth of the shared-memory ring.
    split_k: blocks of a cluster that share the K of one tile.
    blocks_per_sm: resident blocks the registers and the shared memory are sized for.
    tma_store: the bfloat16 tile has shared memory of its own, out of which TMA writes it under the next tile's
        products; otherwise each warp writes its rows by way of a small buffer, and the ring is deeper.
    groups: weight matrices of a grouped GEMM, of whose rows the block keeps a table; 0 for a dense one.
    k_parts: of K, that a block sums one by one and adds up, as a split of so many blocks does.
    column_bytes: scales and biases of an output feature, which lie in shared memory where sums stay in the registers.
    half_tiles: of tiles of 128x256 those of the last wave are halved, where that fills no more than half of the blocks,
        and those of groups may be 192x128 (``TileShape`` of cuda/sm90/gemm_layout.cuh).
    """

    block_m: int
    block_n: int
    weights_as_rows: bool = False
    warpgroups: int = 2
    stages: int = 4
    split_k: int = 1
    blocks_per_sm: int = 1
    tma_store: bool = False
    groups: int = 0
    k_parts: int = 1
    half_tiles: bool = False
    column_bytes: int = 0

    @property
    def name(self) -> str:
        """Tokens x features, and what else there is: s if TMA writes the tile, h if the last ones are halved, / split
        of K, * blocks on an SM."""
        marks = ("s" if self.tma_store else "") + ("h" if self.half_tiles else "")
        split = f"/{self.split_k}" if self.split_k > 1 else ""
        return f"{self.block_m}x{self.block_n}{marks}{split}*{self.blocks_per_sm}"

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def mma_n(self) -> int:
        """Width of one wgmma. A tile of 256 columns takes two, and so does one of 192 that sums parts of K, so that
        registers have room for most of these sums."""
        if self.weights_as_rows:
            return self.block_m
        halves = self.block_n == 256 or self.block_n == 192 and self.k_parts > 1
        return self.block_n // 2 if halves else self.block_n

    @property
    def mma_source(self) -> str:
        """CUDA text of the products' instruction."""
        return wgmma_source(self.mma_n)

    @property
    def scale_pieces(self) -> int:
        """Pieces of one wgmma's columns that may each have a weight scale of its own (``GRANULE`` of the kernel)."""
        return 1 if self.weights_as_rows else ceil(self.mma_n / min(128, self.block_n & -self.block_n))

    @property
    def accumulators(self) -> int:
        """Float32 registers that one slab of 64 rows takes in a math thread."""
        return self.mma_n // 2

    @property
    def slabs(self) -> int:
        """Slabs of 64 rows and `mma_n` columns that one math warpgroup takes, one after the other."""
        return self.block_m * self.block_n // (64 * self.mma_n * self.warpgroups)

    @property
    def math_registers(self) -> int:
        """Registers of a math thread, by ``setmaxnreg``; 0 leaves every thread its even share."""
        return {2: 240, 3: 160}.get(self.warpgroups, 0) if self.blocks_per_sm == 1 else 0

    @property
    def registers(self) -> int:
        """Registers that a math thread may use."""
        return self.math_registers or min(255, REGISTERS_PER_SM // (self.threads * self.blocks_per_sm) // 8 * 8)

    @property
    def overlaps(self) -> bool:
        """Whether a warpgroup starts its next product before it promotes the last one: registers have room for both.

        Where there are parts of K, for the sums of those before too: these would cost more in shared memory.
        """
        needed = (3 if self.k_parts == 1 else 4) * self.accumulators + _OTHER_REGISTERS
        return not self.weights_as_rows and self.slabs == 1 and needed <= self.registers

    @property
    def part_registers(self) -> int:
        """Values of the sums of the parts so far that have room in a thread's registers, beside all that is there
        without them."""
        values = self.slabs * self.accumulators
        products = 2 if self.overlaps else 1
        room = self.registers - _LEAST_OTHER_REGISTERS - values - products * self.accumulators
        return max(0, min(values, room // 4 * 4)) if self.k_parts > 1 else 0

    @property
    def keeps_parts(self) -> bool:
        """Whether registers have room for all of them."""
        return self.part_registers == self.slabs * self.accumulators

    @property
    def part_sum_bytes(self) -> int:
        """Shared memory for the sums of the parts so far."""
        if self.k_parts == 1:
            return 0
        return self.block_m * self.block_n * 4 - self.part_registers * 128 * self.warpgroups * 4

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: both tiles, the scales of the tokens, two mbarriers and, of groups whose tokens
        are the 64-row operand, the tile that may be announced with it."""
        scales = self.block_m
        if self.groups:
            scales = self.block_m * (2 if self.half_tiles else 1) + 4  # 192x128 takes two loads of 128 and 4
        following = 0 if self.weights_as_rows or not self.groups else _TILE_BYTES
        return (self.block_m + self.block_n) * 128 + align(scales * 4, 128) + 16 + following

    @property
    def first_stages(self) -> int:
        """Stages that are loaded before the threads of a block meet: with more of them products begin later."""
        return min(2, self.stages)

    @property
    def reduces(self) -> bool:
        """Whether the epilogue sums through the reduction buffer."""
        return self.weights_as_rows or self.split_k > 1

    @property
    def scale_box(self) -> int:
        """Token scales that one load brings: a group may begin at any row, a load only at a multiple of 4."""
        return self.block_m // ceil(self.block_m / 128) + (4 if self.groups else 0)

    def may_be_dynamic(self, k: int) -> bool:
        """Whether blocks may take tiles from a counter in memory (``DYNAMIC`` of cuda/sm90/gemm_layout.cuh).

        Products that overlap would pause where a tile is announced, and the loop for a short K would spill registers.
        """
        tokens_as_rows = self.groups > 0 and not self.weights_as_rows
        return tokens_as_rows and self.math_registers == 240 and not self.overlaps and k > 1024

    @property
    def single_tile(self) -> bool:
        """Whether a block computes one tile only, rather than walk over many."""
        return self.split_k > 1 or (self.weights_as_rows and self.groups == 0)

    @property
    def partial_bytes(self) -> int:
        """Shared memory of a float32 tile: the reduction buffer, or what a split block sends."""
        slices = self.split_k * ceil(self.block_m / self.split_k)
        return align(slices * (self.block_n + (4 if self.weights_as_rows else 8)) * 4, 128)

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory of the epilogue: the reduction buffer; otherwise the bfloat16 tile, or 16 x 64 of it per math
        warp, the sums of parts, and the `column_bytes` of two tiles."""
        if self.reduces:
            return self.partial_bytes
        staging = self.block_m * self.block_n * 2 if self.tma_store else self.warpgroups * 4 * 16 * 128
        return staging + self.part_sum_bytes + 2 * self.block_n * self.column_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: ``struct Shared`` of cuda/gemm_layout.cuh and room to align it."""
        return self.stages * self.stage_bytes + self.epilogue_bytes + self.tail_bytes + SWIZZLE_ALIGNMENT

    @property
    def tail_bytes(self) -> int:
        """Shared memory of the barrier that sums arrive at and of the table of groups."""
        table = 1  # an empty struct takes a byte
        if self.groups:
            table = align((3 * self.groups + 1) * 4, 8) + (_TILE_BYTES if self.weights_as_rows else 0)
        return align(8 + table, 8)


def with_stages(tile: TileConfig, k: int) -> TileConfig:
    """``tile`` with as many stages as the shared memory of its share of an SM holds, and no more than K needs.

    A split's partial tile takes the place of the ring, which must be large enough for it.
    """
    budget = min(SHARED_LIMIT, SHARED_PER_SM // tile.blocks_per_sm - 1024)
    fit = (budget - SWIZZLE_ALIGNMENT - tile.tail_bytes - tile.epilogue_bytes) // tile.stage_bytes
    most = ceil(ceil(k / 128) / tile.split_k) if tile.single_tile or tile.column_bytes else MAX_STAGES
    if tile.split_k > 1:
        most = max(most, ceil(tile.partial_bytes / ((tile.block_m + tile.block_n) * 128)))
    return replace(tile, stages=max(1, min(fit, most, MAX_STAGES)))


def with_columns(tile: TileConfig, column_bytes: int, k: int) -> TileConfig:
    """``tile`` with room for scales and biases of its output features, and perhaps fewer stages."""
    return with_stages(replace(tile, column_bytes=column_bytes), k) if column_bytes and not tile.reduces else tile


def without_tma_store(tile: TileConfig, k: int) -> TileConfig:
    """``tile`` whose tile TMA does not write, with a deeper ring."""
    return with_stages(replace(tile, tma_store=False), k)


def fits(tile: TileConfig, k: int) -> bool:
    """Whether registers and shared memory suffice, with two stages to alternate between, or three beside sums of parts:
    with two these took half as long again."""
    blocks = ceil(k / 128)
    others = _OTHER_REGISTERS + (8 if tile.groups and not tile.weights_as_rows else 0)
    registers = tile.accumulators * (tile.slabs + 1) + others
    shared = tile.shared_bytes
    return (
        registers <= tile.registers
        and shared <= SHARED_LIMIT
        and (shared + 1024) * tile.blocks_per_sm <= SHARED_PER_SM
        and tile.stages >= min(2 if tile.k_parts == 1 else 3, ceil(blocks / tile.split_k))
        and (tile.split_k == 1 or tile.stages * (tile.block_m + tile.block_n) * 128 >= tile.partial_bytes)
    )


def tokens_of_tile(tile: TileConfig, m: int) -> int:
    """Tokens that each tile takes: tiles of one matrix share its ``m`` evenly, unless TMA writes them."""
    if tile.groups or tile.tma_store:
        return tile.block_m
    return min(tile.block_m, align(ceil(m / ceil(m / tile.block_m)), 8))


@dataclass(frozen=True)
class GroupedKTile:
    """One compiled variant of ``cuda/gemm_k.cu``: block_m rows of a, block_n of b, a ring of stages of about 190 KB."""

    block_m: int
    block_n: int
    stages: int

    warpgroups = 2
    threads = 384  # two math warpgroups and the producer's
    math_registers = 240

    @property
    def mma_source(self) -> str:
        """CUDA text of the products' instruction."""
        return wgmma_source(self.block_n)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages of both tiles, their scales and two mbarriers, two pieces of the result for
        each math warp, and room to align them."""
        rows = self.block_m + self.block_n
        pieces = 4 * self.warpgroups * 2 * 16 * 128
        return self.stages * (rows * 128 + align(rows * 4, 128) + 16) + pieces + SWIZZLE_ALIGNMENT
