"""Find the kernels to compile before use: kernels that given calls launch, and GEMM variants for other row counts."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import ceil, gcd
from typing import NamedTuple

import torch

from fp8moe.kernels.gemm.epilogue import Columns, Epilogue
from fp8moe.kernels.gemm.sm90 import GATHERED_ROWS, TileConfig, gathering, with_columns
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import DenseProblem, Grouping, choose
from fp8moe.runtime.jit import KernelSpec
from fp8moe.runtime.record import Recorder

_LADDER = 1.07  # ratio of consecutive numbers of rows for which tiles are chosen
# Limits on numbers of rows: between them, every number at which the count or height of tiles changes is tried.
_FEW, _MANY = 128, 8192
_HEIGHTS, _NARROW = (64, 128, 192, 256), 512  # tile heights for over _FEW rows; height 64 only up to _NARROW rows


class Family(NamedTuple):
    """GEMMs that differ only in their number of rows.

    n, k: shape of the weights. groups: number of weight matrices, 0 for a dense GEMM. columns: what is applied to each
    output feature; see `epilogue.Columns`. gathers: as in `TileConfig`.
    """

    n: int
    k: int
    groups: int
    epilogue: Epilogue
    columns: Columns = Columns()
    gathers: bool = False

    def variants(self, rows: int, num_sms: int) -> set[KernelSpec]:
        """Return the kernels chosen for 1 to `rows` rows, in a fraction of a second.

        Only some numbers of rows are tried. A kernel that is chosen only for other numbers may be missed; it is then
        only slightly faster than the kernels that are found.
        """
        rows = min(rows, GATHERED_ROWS) if self.gathers else rows
        sizes = _ladder(1, rows)
        if not self.groups:
            ends = _full_tiles(_MANY)
            first = (end + 1 for end in ends)  # the smallest number of rows in each interval
            sizes = (min(size, rows) for size in (*range(1, _FEW), *ends, *first, *_ladder(_MANY, rows)))
        return self._kernels(map(self._choice(num_sms), sizes))

    def all_variants(self, step: int, rows: int, num_sms: int) -> set[KernelSpec]:
        """Return every kernel chosen for 1 to `rows` rows; if grouped, for multiples of `step` rows. Takes seconds."""
        rows = min(rows, GATHERED_ROWS) if self.gathers else rows
        chosen = self._choice(num_sms)
        if self.groups:
            return self._kernels(map(chosen, range(step, rows + 1, step)))
        return self._kernels(_of_each_interval(chosen, _full_tiles(rows), rows))

    def _choice(self, num_sms: int) -> Callable[[int], TileConfig]:
        """Return a function that maps a number of rows to the tile that `launch.build` chooses."""
        n, k, groups, epilogue, columns, _ = self
        packed = None if columns.packing is None else columns.packing.format
        if not groups:
            return lambda rows: choose(DenseProblem(rows, n, k, num_sms, packed), epilogue)
        options = {"swiglu": epilogue.gated, "packed": packed}
        return lambda rows: choose(Grouping().problem(rows, groups, n, k, num_sms, **options), epilogue)

    def _kernels(self, tiles: Iterable[TileConfig]) -> set[KernelSpec]:
        n, k, _, epilogue, columns, gathers = self
        found = {with_columns(tile, columns.bytes, k) for tile in tiles}
        if gathers:
            found = {gathering(tile, k) for tile in found if tile.weights_as_rows}
        return {kernel_spec(tile, n, k, epilogue, columns) for tile in found}


families: dict[Family, int] = {}
"""The GEMM families that this process has launched (not in the masked layout), each with its number of rows per token.

For a grouped GEMM, the rows per token are taken to be the greatest common divisor of the row counts of all launches,
which is right unless all numbers of tokens have a common divisor. A dense GEMM has one row per token or sequence.
"""


def note(family: Family, rows: int) -> None:
    """Add a family to `families`. rows: number of rows of the GEMM or, if it is a part, of the whole GEMM."""
    families[family] = gcd(rows, families.get(family, 0)) if family.groups else 1


class RequiredKernels(NamedTuple):
    """The kernels that calls launched, and the families of the launched GEMMs, as in `families`."""

    kernels: set[KernelSpec]
    families: dict[Family, int]


def required_by(calls: Iterable[Callable[[], object]], num_sms: int) -> RequiredKernels:
    """Run calls without gradients, and return the kernels they would need on a GPU of `num_sms` SMs.

    Creates a `Recorder`, after which this process must not be used for anything else.
    """
    torch.set_num_threads(1)
    recorder = Recorder(num_sms)
    with torch.no_grad():
        for call in calls:
            call()
    return RequiredKernels(set(recorder.kernels), dict(families))


def lengths(tokens: int) -> list[int]:
    """Return the prompt lengths at which to look for kernels other than GEMMs: powers of two, and `tokens` itself."""
    return sorted({*(1 << i for i in range(tokens.bit_length())), tokens})


def _ladder(least: int, most: int) -> Iterator[int]:
    rows = least
    while rows < most:
        yield rows
        rows = ceil(_LADDER * rows)
    yield most


def _full_tiles(most: int) -> list[int]:
    """Return the numbers of rows from _FEW to `most` - 1 after which one more row changes the tiling.

    That is, for some tile height, one more row means one more tile or more tokens per tile: tiles share the rows
    evenly, in multiples of 8 (`sm90.tokens_of_tile`).
    """
    found = set()
    for height in _HEIGHTS:
        end = min(_NARROW, most) if height == 64 else most
        for tiles in range(1, ceil(end / height) + 1):
            each = range(height * (tiles - 1) // tiles // 8 * 8, height + 1, 8)
            found.update(tiles * tokens for tokens in each)
    return sorted(rows for rows in found if _FEW <= rows < most)


def _of_each_interval(chosen_for: Callable[[int], TileConfig], ends: list[int], most: int) -> set[TileConfig]:
    """Return the tiles chosen for 1 to `most` rows. ends: the largest numbers of rows in intervals, from _FEW on.

    Within an interval the tokens per tile are constant, and the difference of two candidates' times is monotonic: a
    tile that is chosen at both ends of an interval is chosen everywhere between the ends.
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
