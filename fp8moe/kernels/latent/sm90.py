"""The kernels of latent attention, ``cuda/sm90/latent_attention.cu`` and ``cuda/ops/latent_merge.cu``."""

import ctypes

from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.jit import KernelSpec, constants
from fp8moe.runtime.sm90 import SHARED_LIMIT, WARPGROUP, wgmma_source

WIDTH, VALUE = 576, 512
"""Values of a latent, and those of them that are the value: the sizes that the kernels take."""

ROWS = 64
"""Queries times heads of a sequence that one thread block computes together."""

TILE = 64
"""Latents in a tile, and in a block of a paged cache."""

THREADS = 3 * WARPGROUP
_STAGES = 2
_SCORED = TILE // 2
# Math threads need 128 registers for sums and 16 for scores; all threads together have 65536.
_MATH_REGISTERS, _PRODUCER_REGISTERS = 216, 72
MERGE_THREADS = 512
_WARP_COLUMNS = 128
_FEW_GROUPS = 8


class Arguments(ctypes.Structure):
    """``struct Arguments`` of latent_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lengths", "begin", "block_table", "out", "sums")),
        *((name, ctypes.c_int64) for name in ("statistics", "records", "indices", "latents")),
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


def attention_spec(chosen: bool) -> KernelSpec:
    """Return the spec of the kernel that attends. chosen: each query reads the latents that indices name."""
    values = {
        "THREADS": THREADS,
        "STAGES": _STAGES,
        "MATH_REGISTERS": _MATH_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "SHARED_BYTES": SHARED_LIMIT,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
    scores = wgmma_source(_SCORED, name="wgmma_scores", bfloat16=True)
    sums = wgmma_source(VALUE // 2, name="wgmma_values", bfloat16=True, across=True)
    defines = (("CHOSEN", int(chosen)),)  # a macro, because it chooses code with #if
    return KernelSpec("latent_attention.cu", "latent_attention", defines, prelude=constants(values) + scores + sums)


def merge_spec(blocks: int, parts: int) -> KernelSpec:
    """Return the spec of the kernel that adds up what several thread blocks have of one group.

    blocks: of the kernel that attends. parts: how many warps share the pieces of some columns of a row.
    """
    defines = ("THREADS", MERGE_THREADS), ("PARTS", parts), ("BLOCKS", blocks)
    return KernelSpec("latent_merge.cu", "latent_merge", (*defines, ("ARGUMENTS_BYTES", ctypes.sizeof(MergeArguments))))


def merge_grid(groups: int, rows: int, blocks: int) -> tuple[int, tuple[int, int]]:
    """Return the parts of `merge_spec` and its grid. groups: of `rows` rows, at most ROWS, in all sequences.

    Few groups are of many pieces each, which the warps of a thread block share; of many groups each warp takes rows.
    """
    items, warps = rows * (VALUE // _WARP_COLUMNS), MERGE_THREADS // 32
    if groups <= _FEW_GROUPS:
        return warps, (groups, items)
    return 1, (min(groups, blocks), min(4, ceil_div(items, warps)))
