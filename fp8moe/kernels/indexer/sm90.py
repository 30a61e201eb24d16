"""Compiled variants of ``cuda/sm90/mqa_logits.cu``: heads per warpgroup, registers, shared memory, pipeline stages."""

import ctypes
from dataclasses import dataclass

from fp8moe.kernels.indexer.checks import BLOCK_TOKENS
from fp8moe.quant.formats import align
from fp8moe.runtime.jit import KernelSpec, constants
from fp8moe.runtime.sm90 import SHARED_LIMIT, SWIZZLE_ALIGNMENT, WARP, WARPGROUP, wgmma_source

TILE = BLOCK_TOKENS
"""Keys in a tile. With a paged cache, a tile is one block of the cache."""

_Q_SLOTS = 2  # buffers for queries in shared memory
# Bytes of the shared-memory ring buffer of key tiles; dict key: whether the cache is paged. 80 KB suffice for full
# bandwidth; with a paged cache, 190 KB were 5% slower.
_RING_BYTES = {False: 160 << 10, True: 88 << 10}
# Registers per (math thread, producer thread); dict key: number of math warpgroups. The sum over a thread block is the
# same as at launch, when all threads have equally many registers.
_REGISTERS = {2: (232, 40), 3: (152, 56), 4: (112, 32)}
_BARRIERS_BYTES = 16  # bytes of the two mbarriers, full and empty, of a pipeline stage or a query buffer


class Arguments(ctypes.Structure):
    """``struct Arguments`` of cuda/sm90/mqa_logits.cu, with its nested structs flattened."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("starts", "ends")),
        *((name, ctypes.c_int) for name in ("queries", "limit", "longest", "per_query")),
        *((name, ctypes.c_int64) for name in ("weights", "block_table")),
        *((name, ctypes.c_int) for name in ("table_pitch", "num_blocks")),
        ("scores", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("columns", "from_starts", "fill_masked")),
    )


@dataclass(frozen=True)
class MqaConfig:
    """A compiled variant of the kernel.

    heads, head_dim: H and D of the queries. queries: number of queries scored against each key tile while it is in
    shared memory; `next_n` with a paged cache. paged: key tiles are blocks of a paged cache.
    row_groups: number of groups of math warpgroups; the groups process tiles in turn. column_groups: number of math
    warpgroups in such a group, which split the queries between them.
    """

    heads: int
    head_dim: int
    queries: int
    column_groups: int
    row_groups: int
    paged: bool

    @property
    def warpgroups(self) -> int:
        return self.column_groups * self.row_groups

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def columns(self) -> int:
        """Columns (N) of one wgmma: one for each head of each query of a warpgroup."""
        return self.queries // self.column_groups * self.heads

    @property
    def tile_rows(self) -> int:
        """Rows of head_dim bytes per tile in the keys' tensor map: one per key, and rows for scales if paged."""
        return TILE + 4 * TILE // self.head_dim if self.paged else TILE

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of shared memory for everything but the ring of key tiles, alignment padding included."""
        rows = self.queries * self.heads
        slot = rows * (self.head_dim + 4) + 4 * (3 + 2 * self.queries) + _BARRIERS_BYTES
        return SWIZZLE_ALIGNMENT + _Q_SLOTS * slot + 4 * (self.threads + self.threads // WARP)

    @property
    def _stage_bytes(self) -> int:
        tile = TILE * (self.head_dim + 4)
        return (align(tile, SWIZZLE_ALIGNMENT) if self.paged else tile) + _BARRIERS_BYTES

    @property
    def stages(self) -> int:
        fit = min(_RING_BYTES[self.paged], SHARED_LIMIT - self._fixed_bytes) // self._stage_bytes
        return fit // self.row_groups * self.row_groups

    @property
    def shared_bytes(self) -> int:
        return align(self._fixed_bytes + self.stages * self._stage_bytes, SWIZZLE_ALIGNMENT)


def prefill_config(heads: int, head_dim: int) -> MqaConfig:
    """Return the variant for ``mqa_logits``.

    64 heads: two queries (128 columns) per warpgroup. 32 heads: four queries; registers then suffice for only three
    math warpgroups.
    """
    if heads == 64:
        return MqaConfig(heads, head_dim, 4, column_groups=2, row_groups=2, paged=False)
    return MqaConfig(heads, head_dim, 12, column_groups=3, row_groups=1, paged=False)


def paged_config(heads: int, head_dim: int, next_n: int) -> MqaConfig:
    """Return the variant for ``paged_mqa_logits``.

    Each warpgroup gets a whole number of queries, whose heads fill up to 128 wgmma columns.
    """
    if next_n * heads <= 128:
        return MqaConfig(heads, head_dim, next_n, column_groups=1, row_groups=3, paged=True)
    if next_n % 2:
        return MqaConfig(heads, head_dim, next_n, column_groups=3, row_groups=1, paged=True)
    return MqaConfig(heads, head_dim, next_n, column_groups=2, row_groups=2, paged=True)


def kernel_spec(cfg: MqaConfig) -> KernelSpec:
    """Return the spec of the kernel compiled for a variant."""
    math_registers, producer_registers = _REGISTERS[cfg.warpgroups]
    values = {
        "HEADS": cfg.heads,
        "HEAD_DIM": cfg.head_dim,
        "QUERIES": cfg.queries,
        "PAGED": int(cfg.paged),
        "COLUMN_GROUPS": cfg.column_groups,
        "ROW_GROUPS": cfg.row_groups,
        "COLUMNS": cfg.columns,
        "THREADS": cfg.threads,
        "TILE": TILE,
        "TILE_ROWS": cfg.tile_rows,
        "STAGES": cfg.stages,
        "Q_SLOTS": _Q_SLOTS,
        "MATH_REGISTERS": math_registers,
        "PRODUCER_REGISTERS": producer_registers,
        "SHARED_BYTES": cfg.shared_bytes,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
    return KernelSpec("mqa_logits.cu", "mqa_logits", prelude=constants(values) + wgmma_source(cfg.columns))
