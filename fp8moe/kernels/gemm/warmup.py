"""The kernels that calls need: those that they launch, and GEMMs that may be chosen for other numbers of rows."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import ceil, gcd
from typing import NamedTuple

import torch

from fp8moe.kernels.gemm.epilogue import Columns, Epilogue
from fp8moe.kernels.gemm.sm90 import TileConfig, with_columns
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import DenseProblem, Grouping, choose
from fp8moe.runtime.jit import KernelSpec
from fp8moe.runtime.record import Recorder

_LADDER = 1.07  # from one number of rows to the next one that is looked at
_FEW, _MANY = 128, 8192  # from the first to the last, wherever the tokens of a tile, or the number of tiles, change
_HEIGHTS, _NARROW = (64, 128, 192, 256), 512  # of tiles for more than _FEW rows; up to so many rows 64 too


class Family(NamedTuple):
    """GEMMs with the same weights' shape (n, k), groups of rows (0: a dense GEMM), epilogue, scales and bias."""

    n: int
    k: int
    groups: int
    epilogue: Epilogue
    columns: Columns = Columns()

    def variants(self, rows: int, num_sms: int) -> set[KernelSpec]:
        """The kernels that are chosen for up to so many rows, but for a few near ties. Takes a fraction of a second."""
        sizes = _ladder(1, rows)
        if not self.groups:
            ends = _full_tiles(_MANY)
            first = (end + 1 for end in ends)  # of the next interval
            sizes = (min(size, rows) for size in (*range(1, _FEW), *ends, *first, *_ladder(_MANY, rows)))
        return self._kernels(map(self._choice(num_sms), sizes))

    def all_variants(self, step: int, rows: int, num_sms: int) -> set[KernelSpec]:
        """Every kernel that is chosen for some multiple of `step` rows up to so many. Takes seconds."""
        chosen = self._choice(num_sms)
        if self.groups:
            return self._kernels(map(chosen, range(step, rows + 1, step)))
        return self._kernels(_of_each_interval(chosen, _full_tiles(rows), rows))

    def _choice(self, num_sms: int) -> Callable[[int], TileConfig]:
        """The tile for a number of rows, as `launch.GemmLauncher` chooses it."""
        n, k, groups, epilogue, _ = self
        if not groups:
            return lambda rows: choose(DenseProblem(rows, n, k, num_sms), epilogue)
        return lambda rows: choose(Grouping().problem(rows, groups, n, k, num_sms, swiglu=epilogue.gated), epilogue)

    def _kernels(self, tiles: Iterable[TileConfig]) -> set[KernelSpec]:
        n, k, _, epilogue, columns = self
        return {kernel_spec(with_columns(tile, columns.bytes, k), n, k, epilogue, columns) for tile in set(tiles)}


families: dict[Family, int] = {}
"""The families of GEMMs that this process has launched, but for the masked layout's, each with its rows for one token.

Of groups that is the greatest common divisor of the plans' rows: right unless all their numbers of tokens have a common
divisor. A dense GEMM has a row for each token, or for each sequence.
"""


def note(family: Family, rows: int) -> None:
    """A plan has been made for so many rows, or for a part of them."""
    families[family] = gcd(rows, families.get(family, 0)) if family.groups else 1


class RequiredKernels(NamedTuple):
    """kernels: those that were launched. families: of GEMMs, each with its rows for one token."""

    kernels: set[KernelSpec]
    families: dict[Family, int]


def required_by(calls: Iterable[Callable[[], object]], num_sms: int) -> RequiredKernels:
    """Find what calls launch without gradients on a GPU of `num_sms` SMs. The process is a `Recorder`'s afterwards."""
    torch.set_num_threads(1)
    recorder = Recorder(num_sms)
    with torch.no_grad():
        for call in calls:
            call()
    return RequiredKernels(set(recorder.kernels), dict(families))


def lengths(tokens: int) -> list[int]:
    """Powers of two up to `tokens`, and `tokens`: numbers that a kernel, but for GEMMs, serves all of or one among."""
    return sorted({*(1 << i for i in range(tokens.bit_length())), tokens})


def _ladder(least: int, most: int) -> Iterator[int]:
    rows = least
    while rows < most:
        yield rows
        rows = ceil(_LADDER * rows)
    yield most


def _full_tiles(most: int) -> list[int]:
    """Rows from _FEW on with one more of which a tile of some height takes more tokens, or there are more such tiles.

    Tiles share the rows evenly, in multiples of 8 (`config.tokens_of_tile`).
    """
    found = set()
    for height in _HEIGHTS:
        end = min(_NARROW, most) if height == 64 else most
        for tiles in range(1, ceil(end / height) + 1):
            each = range(height * (tiles - 1) // tiles // 8 * 8, height + 1, 8)
            found.update(tiles * tokens for tokens in each)
    return sorted(rows for rows in found if _FEW <= rows < most)


def _of_each_interval(chosen_for: Callable[[int], TileConfig], ends: list[int], most: int) -> set[TileConfig]:
    """All that is chosen for 1 to `most` rows. ends: of intervals, from _FEW on.

    In each the tiles stay as they are, and the difference of two candidates' times rises or falls
    throughout: what is chosen at both ends is chosen between them.
    """
    chosen = {chosen_for(rows) for rows in range(1, min(_FEW, most) + 1)}
    for last, end in pairwise((*ends, most)):
        intervals = [(last + 1, end)]
        while intervals:
            low, high = intervals.pop()
            chosen |= {chosen_for(low), chosen_for(high)}
            if chosen_for(low) != chosen_for(high) and high - low > 1:
                middle = (low + high) // 2
                intervals += [(low, middle), (middle, high)]
    return chosen
