"""The kernels of latent attention, ``cuda/sm90/latent_attention.cu`` and ``cuda/ops/latent_merge.cu``."""

import ctypes

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
_MATH_REGISTERS, _PRODUCER_REGISTERS = 224, 56
MERGE_THREADS = 512


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
        "CHOSEN": int(chosen),
        "THREADS": THREADS,
        "STAGES": _STAGES,
        "MATH_REGISTERS": _MATH_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "SHARED_BYTES": SHARED_LIMIT,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
    scores = wgmma_source(_SCORED, name="wgmma_scores", bfloat16=True)
    sums = wgmma_source(VALUE // 2, name="wgmma_values", bfloat16=True, across=True)
    return KernelSpec("latent_attention.cu", "latent_attention", prelude=constants(values) + scores + sums)


def merge_spec(blocks: int, columns: int) -> KernelSpec:
    """Return the spec of the kernel that adds up what several thread blocks have of one sequence.

    blocks: of the kernel that attends. columns: how many of the values a thread block adds up.
    """
    defines = ("THREADS", MERGE_THREADS), ("COLUMN_THREADS", columns // 4), ("BLOCKS", blocks)
    return KernelSpec("latent_merge.cu", "latent_merge", (*defines, ("ARGUMENTS_BYTES", ctypes.sizeof(MergeArguments))))


def merge_columns(groups: int) -> int:
    """Return how many columns a thread block adds up: few where few groups, and so many pieces of each, are shared out.

    groups: those of ROWS queries and heads, of all sequences.
    """
    return VALUE // 4 if groups <= 8 else VALUE
