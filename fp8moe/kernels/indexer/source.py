"""The compiled variants of ``cuda/mqa_logits.cu``: how the heads are laid over warpgroups, and constants."""

from dataclasses import dataclass

from fp8moe.kernels.wgmma import wgmma_source
from fp8moe.quant.formats import align
from fp8moe.runtime.hopper import SHARED_LIMIT
from fp8moe.runtime.jit import KernelSpec

TILE = 64  # kv tokens; a block of the paged cache
_Q_SLOTS = 2
# Of tiles on their way: prefill, paged. 80 KB are enough for the whole bandwidth; with 190 KB paged lost 5% of it.
_RING_BYTES = {False: 160 << 10, True: 88 << 10}
# Of a math thread and of one of the producer's warpgroup, for so many math warpgroups: together what a block has at its
# launch, where all threads have the same.
_REGISTERS = {2: (232, 40), 3: (152, 56), 4: (112, 32)}


@dataclass(frozen=True)
class MqaConfig:
    """A variant.

    Attributes:
        heads, head_dim: of the queries.
        queries: that share a kv tile; `next_n` if the kv is paged.
        column_groups, row_groups: math warpgroups; the former split the queries, the latter take tiles in turns.
        paged: whether tiles are blocks of a cache.
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
        return 128 * (self.warpgroups + 1)

    @property
    def columns(self) -> int:
        """Of one wgmma."""
        return self.queries // self.column_groups * self.heads

    @property
    def _fixed_bytes(self) -> int:
        """Shared memory beside the ring."""
        rows = self.queries * self.heads
        slot = rows * self.head_dim + 4 * rows + 4 * (4 + 2 * self.queries) + 16
        return 1024 + _Q_SLOTS * slot + 4 * (self.threads + self.threads // 32)

    @property
    def _stage_bytes(self) -> int:
        if self.paged:  # scales follow their keys
            return align(TILE * (self.head_dim + 4), 1024) + 16
        return TILE * (self.head_dim + 4) + 16

    @property
    def stages(self) -> int:
        fit = min(_RING_BYTES[self.paged], SHARED_LIMIT - self._fixed_bytes) // self._stage_bytes
        return fit // self.row_groups * self.row_groups

    @property
    def shared_bytes(self) -> int:
        return self._fixed_bytes + self.stages * self._stage_bytes


def prefill_config(heads: int, head_dim: int) -> MqaConfig:
    """128 columns a warpgroup; four queries in one take more registers than four warpgroups leave each other."""
    if heads == 64:
        return MqaConfig(heads, head_dim, 4, column_groups=2, row_groups=2, paged=False)
    return MqaConfig(heads, head_dim, 12, column_groups=3, row_groups=1, paged=False)


def paged_config(heads: int, head_dim: int, next_n: int) -> MqaConfig:
    """Up to 128 columns a warpgroup, a whole number of queries each."""
    if next_n * heads <= 128:
        return MqaConfig(heads, head_dim, next_n, column_groups=1, row_groups=3, paged=True)
    if next_n % 2:
        return MqaConfig(heads, head_dim, next_n, column_groups=3, row_groups=1, paged=True)
    return MqaConfig(heads, head_dim, next_n, column_groups=2, row_groups=2, paged=True)


def kernel_spec(cfg: MqaConfig) -> KernelSpec:
    math_registers, producer_registers = _REGISTERS[cfg.warpgroups]
    constants = {
        "HEADS": cfg.heads,
        "HEAD_DIM": cfg.head_dim,
        "QUERIES": cfg.queries,
        "PAGED": int(cfg.paged),
        "COLUMN_GROUPS": cfg.column_groups,
        "ROW_GROUPS": cfg.row_groups,
        "STAGES": cfg.stages,
        "MATH_REGISTERS": math_registers,
        "PRODUCER_REGISTERS": producer_registers,
        "SHARED_LIMIT": SHARED_LIMIT,
    }
    prelude = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    return KernelSpec("mqa_logits.cu", "mqa_logits", prelude=prelude + wgmma_source(cfg.columns))
