"""The variants of a GEMM that may be chosen for some number of rows: to compile them before a call needs one."""

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from fp8moe.kernels.gemm.config import unstaged
from fp8moe.kernels.gemm.epilogue import Epilogue, PeerStore
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import choose_dense, choose_grouped
from fp8moe.runtime.jit import KernelSpec

_LADDER = 1.1  # from one number of rows to the next one that is looked at
_FEW, _MANY = 128, 8192  # between them, wherever the number of tiles changes


class Family(NamedTuple):
    """GEMMs with the same weights' shape (n, k), groups of rows (0: a dense GEMM) and epilogue."""

    n: int
    k: int
    groups: int
    epilogue: Epilogue

    def variants(self, rows: int, num_sms: int) -> set[KernelSpec]:
        """The kernels that are chosen for up to so many rows, by the cost model."""
        n, k, groups, epilogue = self
        if groups:
            options = {"max_m": None, "swiglu": epilogue.gated}
            chosen = {choose_grouped(m, groups, m / groups, n, k, num_sms, **options) for m in _ladder(1, rows)}
            if isinstance(epilogue, PeerStore):
                chosen = {unstaged(config, k) for config in chosen}
        else:
            sizes = (*range(1, _FEW), *range(_FEW, _MANY, _FEW), *_ladder(_MANY, rows))
            chosen = {choose_dense(min(m, rows), n, k, num_sms) for m in sizes}
        return {kernel_spec(config, n, k, epilogue) for config in chosen}


families: set[Family] = set()
"""Of the plans of this process, but for the masked layout's."""


def _ladder(least: int, most: int) -> Iterator[int]:
    rows = least
    while rows < most:
        yield rows
        rows = ceil(_LADDER * rows)
    yield most
