"""Tile configurations of the GEMM kernels, and the registers and shared memory that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from fp8moe.quant.formats import align
from fp8moe.runtime.sm90 import REGISTERS_PER_SM, SHARED_LIMIT, SHARED_PER_SM, SWIZZLE_ALIGNMENT, wgmma_source

PRODUCER_REGISTERS = 24
# Registers of a producer thread with extra work (see `source.kernel_spec`); math threads then get 8 registers fewer.
BUSY_PRODUCER_REGISTERS = 40
UNPACK_REGISTERS = 72  # of a producer thread if its warpgroup unpacks; math threads then get 24 registers fewer
MAX_STAGES = 16
GATHERED_TOKENS, GATHERED_ROWS = 4, 128  # most tokens and rows of a tile that `gathers`
_TILE_BYTES = 24  # size of ``struct Tile`` of cuda/sm90/gemm_layout.cuh
_OTHER_REGISTERS = 28  # registers of a math thread for everything but accumulators
_LEAST_OTHER_REGISTERS = 24  # registers of a math thread for everything but accumulators and sums of parts of K


@dataclass(frozen=True)
class TileConfig:
    """The tile configuration of a compiled variant of ``cuda/sm90/gemm.cu``, without the shape of the weights.

    block_m: tokens of a tile. block_n: output features of a tile.
    weights_as_rows: weights, not tokens, are the 64-row operand of wgmma.
    warpgroups: math warpgroups that share a tile. stages: depth of the shared-memory ring.
    split_k: number of blocks in a cluster; they share one tile, and each sums a part of K.
    blocks_per_sm: resident blocks that the registers and the shared memory are sized for.
    tma_store: TMA writes the bfloat16 tile from its own buffer in shared memory while the next tile is multiplied;
        otherwise each warp writes its rows through a small buffer, and the ring is deeper.
    groups: number of weight matrices of a grouped GEMM, which each block keeps in a table; 0 for a dense GEMM.
    k_parts: number of parts of K. One block sums each part, one part after the other, and then adds these sums. split_k
        with the same number gives bitwise equal results.
    column_bytes: bytes of scale and bias per output feature, kept in shared memory if sums stay in the registers.
    gathers: rows of a group are tokens by index, of up to `GATHERED_TOKENS`; weights are the 64-row operand.
    half_tiles: tiles of 128x256 are halved in a last wave that fills at most half of the blocks, and grouped GEMMs may
        use tiles of 192x128 (``TileShape`` of cuda/sm90/gemm_layout.cuh).
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
    packed: str | None = None
    column_bytes: int = 0
    gathers: bool = False

    @property
    def name(self) -> str:
        """A short name: tokens x features, / `split_k`, * `blocks_per_sm`.

        Marks: s for `tma_store`, h for `half_tiles`, q for four warpgroups.
        """
        marks = ("s" if self.tma_store else "") + ("h" if self.half_tiles else "")
        marks += "q" if self.warpgroups == 4 else ""
        split = f"/{self.split_k}" if self.split_k > 1 else ""
        return f"{self.block_m}x{self.block_n}{marks}{split}*{self.blocks_per_sm}"

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def mma_n(self) -> int:
        """Columns of one wgmma. A tile of 256 columns takes two wgmma. With k_parts > 1, a tile of 192 columns takes
        two wgmma as well, to leave registers for the sums of parts."""
        if self.weights_as_rows:
            return self.block_m
        halves = self.block_n == 256 or self.block_n == 192 and self.k_parts > 1
        return self.block_n // 2 if halves else self.block_n

    @property
    def mma_source(self) -> str:
        """CUDA source of the function ``wgmma`` with `mma_n` columns."""
        more = wgmma_source(self.mma_n, rows_in_registers=True) if self.packed and self.weights_as_rows else ""
        return wgmma_source(self.mma_n) + more

    @property
    def scale_pieces(self) -> int:
        """Number of pieces of one wgmma's columns. Each piece has one weight scale (``GRANULE`` of the kernel)."""
        return 1 if self.weights_as_rows else ceil(self.mma_n / min(128, self.block_n & -self.block_n))

    @property
    def accumulators(self) -> int:
        """Accumulator registers of a math thread for one slab (64 rows x `mma_n` columns)."""
        return self.mma_n // 2

    @property
    def slabs(self) -> int:
        """Number of slabs (64 rows x `mma_n` columns) that one math warpgroup multiplies, one after the other."""
        return self.block_m * self.block_n // (64 * self.mma_n * self.warpgroups)

    @property
    def math_registers(self) -> int:
        """Registers of a math thread, set by ``setmaxnreg``. 0: all threads keep equal numbers of registers."""
        return {2: 240, 3: 160}.get(self.warpgroups, 0) if self.blocks_per_sm == 1 else 0

    @property
    def registers(self) -> int:
        """Registers that a math thread may use."""
        return self.math_registers or min(255, REGISTERS_PER_SM // (self.threads * self.blocks_per_sm) // 8 * 8)

    @property
    def overlaps(self) -> bool:
        """Whether a warpgroup starts its next MMAs before it adds up the partial sums of the last MMAs.

        It does if registers can hold the partial sums of the last and of the next MMAs. With k_parts > 1, registers
        must also hold the sums of earlier parts of K: in shared memory these sums would cost more time.
        """
        needed = (3 if self.k_parts == 1 else 4) * self.accumulators + _OTHER_REGISTERS
        return not self.weights_as_rows and self.slabs == 1 and needed <= self.registers

    @property
    def part_registers(self) -> int:
        """Registers of a math thread that keep sums of earlier parts of K; shared memory keeps the other sums."""
        values = self.slabs * self.accumulators
        products = 2 if self.overlaps else 1
        room = self.registers - _LEAST_OTHER_REGISTERS - values - products * self.accumulators
        return max(0, min(values, room // 4 * 4)) if self.k_parts > 1 else 0

    @property
    def keeps_parts(self) -> bool:
        """Whether registers hold all sums of earlier parts of K."""
        return self.part_registers == self.slabs * self.accumulators

    @property
    def part_sum_bytes(self) -> int:
        """Bytes of shared memory for sums of earlier parts of K."""
        if self.k_parts == 1:
            return 0
        return self.block_m * self.block_n * 4 - self.part_registers * 128 * self.warpgroups * 4

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory per stage: both tiles, token scales and two mbarriers; in a grouped GEMM with tokens
        as the 64-row operand also a ``struct Tile``, with which the producer announces the next tile."""
        scales = self.block_m
        if self.groups:
            scales = self.block_m * (2 if self.half_tiles else 1) + 4  # a tile of 192x128 loads 128 scales twice
        following = 0 if self.weights_as_rows or not self.groups else _TILE_BYTES
        below = self.block_n * {"mxfp4": 4, "nvfp4": 8}.get(self.packed, 0)
        a_block = self.block_m * 128 + align(scales * 4, 128) + below
        return self.depth * a_block + self.block_n * 128 + 16 + following

    @property
    def weight_size(self) -> float:
        """Bytes of device memory of a weight, scales of groups included."""
        return 1 if self.packed is None else 9 / 16 if self.packed == "nvfp4" else 17 / 32

    @property
    def depth(self) -> int:
        """Number of blocks of 128 along K in a stage."""
        return 2 if self.packed and self.weights_as_rows else 1

    @property
    def products(self) -> int:
        """Number of products of weights in registers that a math warp starts before it waits for the first.

        With several blocks per SM, products of other warps run meanwhile.
        """
        return 2 if self.blocks_per_sm == 1 and self._registers_of_products(2) <= self.registers else 1

    def _registers_of_products(self, count: int) -> int:
        """Return the registers that a thread needs for its sums, and for weights, sums and token scales of products."""
        product = 16 + self.accumulators + self.accumulators // 2
        return self.accumulators * self.slabs + count * product + _OTHER_REGISTERS

    @property
    def unpacks(self) -> bool:
        """Whether weights in four bits become E4M3 in shared memory, not in registers."""
        return self.packed is not None and not self.weights_as_rows

    @property
    def packed_bytes(self) -> int:
        """Bytes of shared memory for `packed` weights: ``struct PackedShared`` of gemm_layout.cuh."""
        entries = {"mxfp4": 32, "nvfp4": 256}.get(self.packed, 0)
        return align(entries * 8 + (128 if entries and self.unpacks else 0), SWIZZLE_ALIGNMENT)

    @property
    def first_stages(self) -> int:
        """Number of stages loaded before the first barrier of a block; with more, the first MMA would begin later."""
        return min(2, self.stages)

    @property
    def reduces(self) -> bool:
        """Whether the epilogue writes sums to the reduction buffer in shared memory before it stores them."""
        return self.weights_as_rows or self.split_k > 1

    @property
    def scale_box(self) -> int:
        """Number of token scales per TMA load.

        A load begins at a multiple of 4 scales, but a group may begin at any row: grouped GEMMs load 4 scales more. If
        the tile `gathers`, they load those of all tokens.
        """
        if self.gathers:
            return GATHERED_TOKENS
        return self.block_m // ceil(self.block_m / 128) + (4 if self.groups else 0)

    def may_be_dynamic(self, k: int) -> bool:
        """Whether blocks may take tiles from a counter in memory (``DYNAMIC`` of cuda/sm90/gemm_layout.cuh).

        They may not if MMAs overlap, because announcing a tile would pause the overlap. They may not if K is at most
        1024, because the loop would spill registers.
        """
        tokens_as_rows = self.groups > 0 and not self.weights_as_rows
        return tokens_as_rows and self.math_registers == 240 and not self.overlaps and k > 1024

    @property
    def single_tile(self) -> bool:
        """Whether a block computes only one tile."""
        return self.split_k > 1 or (self.weights_as_rows and self.groups == 0)

    @property
    def partial_bytes(self) -> int:
        """Bytes of shared memory for a float32 tile: the reduction buffer, or a block's partial tile with split_k."""
        slices = self.split_k * ceil(self.block_m / self.split_k)
        return align(slices * (self.block_n + (4 if self.weights_as_rows else 8)) * 4, 128)

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of shared memory for the epilogue: only the reduction buffer if `reduces`; otherwise the bfloat16 tile
        (16 x 64 values per math warp without `tma_store`), sums of parts of K, and `column_bytes` for two tiles."""
        if self.reduces:
            return self.partial_bytes
        staging = self.block_m * self.block_n * 2 if self.tma_store else self.warpgroups * 4 * 16 * 128
        return staging + self.part_sum_bytes + 2 * self.block_n * self.column_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block in bytes: ``struct Shared`` of gemm_layout.cuh, and alignment padding."""
        rest = self.epilogue_bytes + self.tail_bytes + self.packed_bytes + SWIZZLE_ALIGNMENT
        return self.stages * self.stage_bytes + rest

    @property
    def tail_bytes(self) -> int:
        """Bytes of shared memory for the barrier ``sums`` and the table of groups (``GroupTable``)."""
        table = 1  # an empty struct takes a byte
        if self.groups:
            table = align((3 * self.groups + 1) * 4, 8) + (_TILE_BYTES if self.weights_as_rows else 0)
            table += GATHERED_ROWS if self.gathers else 0
        return align(8 + table, 8)


def with_stages(tile: TileConfig, k: int) -> TileConfig:
    """Return ``tile`` with as many stages as fit its share of an SM's shared memory, but no more than K needs.

    With split_k, a block finally writes its partial tile to the memory of its stages, so there are enough stages to
    hold this tile.
    """
    budget = min(SHARED_LIMIT, SHARED_PER_SM // tile.blocks_per_sm - 1024)
    rest = tile.epilogue_bytes + tile.tail_bytes + tile.packed_bytes + SWIZZLE_ALIGNMENT
    fit = (budget - rest) // tile.stage_bytes
    most = ceil(ceil(k / (128 * tile.depth)) / tile.split_k) if tile.single_tile or tile.column_bytes else MAX_STAGES
    if tile.split_k > 1:
        most = max(most, ceil(tile.partial_bytes / (tile.depth * tile.block_m * 128 + tile.block_n * 128)))
    return replace(tile, stages=max(1, min(fit, most, MAX_STAGES)))


def with_columns(tile: TileConfig, column_bytes: int, k: int) -> TileConfig:
    """Return ``tile`` with shared memory for scales and biases of its output features, and so perhaps fewer stages."""
    return with_stages(replace(tile, column_bytes=column_bytes), k) if column_bytes and not tile.reduces else tile


def gathering(tile: TileConfig, k: int) -> TileConfig:
    """Return ``tile``, whose 64-row operand is weights, with `gathers` and the shared memory that it takes."""
    return with_stages(replace(tile, gathers=True), k)


def without_tma_store(tile: TileConfig, k: int) -> TileConfig:
    """Return ``tile`` without `tma_store`, and with as many more stages as the freed shared memory allows."""
    return with_stages(replace(tile, tma_store=False), k)


def fits(tile: TileConfig, k: int) -> bool:
    """Return whether registers and shared memory suffice for two stages, or for three if K is summed in parts.

    With only two stages, tiles that sum parts of K would take 1.5 times as long.
    """
    stages = ceil(ceil(k / 128) / tile.split_k / tile.depth)
    others = _OTHER_REGISTERS + (8 if tile.groups and not tile.weights_as_rows else 0)
    registers = tile.accumulators * (tile.slabs + 1) + others
    if tile.packed and tile.weights_as_rows:
        registers = tile._registers_of_products(1)
    shared = tile.shared_bytes
    return (
        registers <= tile.registers
        and shared <= SHARED_LIMIT
        and (shared + 1024) * tile.blocks_per_sm <= SHARED_PER_SM
        and tile.stages >= min(2 if tile.k_parts == 1 else 3, stages)
        and (
            tile.split_k == 1
            or tile.stages * (tile.depth * tile.block_m * 128 + tile.block_n * 128) >= tile.partial_bytes
        )
    )


def tokens_of_tile(tile: TileConfig, m: int) -> int:
    """Return the tokens per tile: tiles of a dense GEMM share its ``m`` tokens evenly, unless TMA stores tiles."""
    if tile.groups or tile.tma_store:
        return tile.block_m
    return min(tile.block_m, align(ceil(m / ceil(m / tile.block_m)), 8))


class Pieces(NamedTuple):
    """The buffers of a math warp through which TMA stores a result: 16 rows of `pitch` bytes each."""

    count: int
    pitch: int


@dataclass(frozen=True)
class GroupedKTile:
    """The tile configuration of ``cuda/sm90/gemm_k.cu``: block_m rows of ``a`` by block_n rows of ``b``.

    All stages together take 150 to 200 KB of shared memory. block_scales: ``b`` has scales of 128x128 blocks;
    block_n is then 128.
    """

    block_m: int
    block_n: int
    stages: int
    block_scales: bool = False

    warpgroups = 2
    threads = 384  # two math warpgroups and a producer warpgroup
    math_registers = 240

    @property
    def b_scales(self) -> int:
        """The number of scales of ``b`` in a stage, see ``B_SCALES`` of the kernel."""
        return 4 if self.block_scales else self.block_n

    @property
    def mma_source(self) -> str:
        """CUDA source of the function ``wgmma`` with block_n columns."""
        return wgmma_source(self.block_n)

    @property
    def pieces(self) -> Pieces:
        """The most and widest pieces for which there is room: a warp that waits for one multiplies nothing."""
        choices = (Pieces(4, 128), Pieces(2, 128), Pieces(2, 64))
        return next(pieces for pieces in choices if self._shared_bytes(pieces) <= SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block in bytes."""
        return self._shared_bytes(self.pieces)

    def _shared_bytes(self, pieces: Pieces) -> int:
        """Count per stage both tiles, their scales and two mbarriers; the pieces of all math warps; and padding for
        alignment."""
        rows = self.block_m + self.block_n
        scales = self.block_m + self.b_scales
        staged = 4 * self.warpgroups * pieces.count * 16 * pieces.pitch
        return self.stages * (rows * 128 + align(scales * 4, 128) + 16) + staged + SWIZZLE_ALIGNMENT
