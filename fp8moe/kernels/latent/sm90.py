"""The kernels of latent attention, ``cuda/sm90/latent_attention.cu`` and ``cuda/ops/latent_merge.cu``."""

import ctypes

from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.jit import KernelSpec, constants
from fp8moe.runtime.sm90 import SHARED_LIMIT, WARPGROUP, wgmma_source

WIDTH, VALUE = 576, 512
"""Values of a latent, and those of them that are the value: the sizes that the kernels take."""

CODED = VALUE + VALUE // 128 * 4 + (WIDTH - VALUE) * 2
"""Bytes of a latent in FP8."""

ROWS = (16, 24, 32, 64)
"""Queries times heads of a sequence that one thread block computes together: of these, the fewest that are enough."""

TILE = 64
"""Latents in a tile, and in a block of a paged cache."""

FEWEST_TILES = 2
"""Tiles that a thread block takes at least, if there are as many: what fewer save, merging more sums costs."""

THREADS = 3 * WARPGROUP
_MOST_ROWS_OF_CODES = 24  # whose sums, of all columns, a thread's registers hold
_SCORED = TILE // 2
# Of math threads and of those that load. Sums take up to 128. All threads together have 65536.
_REGISTERS, _REGISTERS_OF_FEW_CODES = (216, 72), (232, 40)
MERGE_THREADS = 512
_WARP_COLUMNS = 128
_FEW_GROUPS = 8


class Arguments(ctypes.Structure):
    """``struct Arguments`` of latent_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lengths", "begin", "block_table", "out", "sums")),
        *((name, ctypes.c_int64) for name in ("statistics", "records", "indices", "latents", "q")),
        *((name, ctypes.c_int) for name in ("sequences", "rows", "heads", "queries", "limit")),
        *((name, ctypes.c_int) for name in ("table_pitch", "num_blocks", "stride", "chosen")),
        ("scale", ctypes.c_float),
    )


class MergeArguments(ctypes.Structure):
    """``struct Arguments`` of latent_merge.cu."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("out", "sums", "statistics", "records")),
        ("rows", ctypes.c_int),
    )


def rows_together(rows: int, codes: bool) -> int:
    """Return which of ROWS a thread block computes together, of the queries times heads of a sequence.

    codes: whether the latents are in FP8.
    """
    found = next((size for size in ROWS if rows <= size), ROWS[-1])
    return ROWS[-1] if codes and found > _MOST_ROWS_OF_CODES else found


def attention_spec(chosen: bool, rows: int, codes: bool = False) -> KernelSpec:
    """Return the spec of the kernel that attends.

    chosen: each query reads the latents that indices name. rows: one of ROWS. codes: whether the latents are in FP8.
    """
    few = rows < ROWS[-1]
    math_registers, producer_registers = _REGISTERS_OF_FEW_CODES if few and codes else _REGISTERS
    values = {
        "ROWS": rows,
        "THREADS": THREADS,
        "FEWEST_TILES": FEWEST_TILES,
        "STAGES": (3 if few else 1) if codes else 2,
        "MATH_REGISTERS": math_registers,
        "PRODUCER_REGISTERS": producer_registers,
        "SHARED_BYTES": SHARED_LIMIT,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
    if few and codes:
        kinds = {"scores": "f16", "rest": "bf16", "values": "f16"}
        sources = [wgmma_source(rows, name=f"wgmma_{n}", kind=k, rows_in_registers=True) for n, k in kinds.items()]
    else:
        how = {"rows_across": True} if few else {"across": True}
        sources = [
            wgmma_source(rows if few else _SCORED, name="wgmma_scores", kind="bf16"),
            wgmma_source(rows if few else VALUE // 2, name="wgmma_values", kind="bf16", **how),
        ]
    defines = (
        ("CHOSEN", int(chosen)),
        ("FEW", int(few)),
        ("CODES", int(codes)),
    )  # macros, because they choose code with #if
    return KernelSpec("latent_attention.cu", "latent_attention", defines, prelude=constants(values) + "".join(sources))


def merge_spec(blocks: int, parts: int, rows: int) -> KernelSpec:
    """Return the spec of the kernel that adds up what several thread blocks have of one group.

    blocks, rows: of the kernel that attends. parts: how many warps share the pieces of some columns of a row.
    """
    defines = ("THREADS", MERGE_THREADS), ("PARTS", parts), ("BLOCKS", blocks), ("ROWS", rows)
    defines += (("FEWEST_TILES", FEWEST_TILES),)
    return KernelSpec("latent_merge.cu", "latent_merge", (*defines, ("ARGUMENTS_BYTES", ctypes.sizeof(MergeArguments))))


def merge_grid(groups: int, rows: int, blocks: int) -> tuple[int, tuple[int, int]]:
    """Return the parts of `merge_spec` and its grid. groups: of `rows` rows, those of a thread block, in all sequences.

    Few groups are of many pieces each, which the warps of a thread block share; of many groups each warp takes rows.
    """
    items, warps = rows * (VALUE // _WARP_COLUMNS), MERGE_THREADS // 32
    if groups <= _FEW_GROUPS:
        return warps, (groups, items)
    return 1, (min(groups, blocks), min(4, ceil_div(items, warps)))
