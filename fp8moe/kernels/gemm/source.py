"""Kernel specs of ``cuda/sm90/gemm.cu`` and ``gemm_k.cu``: source files with a prelude of generated constants."""

import ctypes
import functools

from fp8moe.kernels.gemm.epilogue import Columns, Epilogue, PeerStore
from fp8moe.kernels.gemm.sm90 import (
    BUSY_PRODUCER_REGISTERS,
    PRODUCER_REGISTERS,
    UNPACK_REGISTERS,
    GroupedKTile,
    TileConfig,
)
from fp8moe.runtime.jit import KernelSpec, constants


def is_dynamic(tile: TileConfig, k: int, epilogue: Epilogue) -> bool:
    """Return whether thread blocks take tiles from a counter in memory.

    They do so for gated epilogues, because blocks of the kernel that precedes such a GEMM end at different times.
    """
    return epilogue.gated and tile.may_be_dynamic(k)


# Cached, as are the arguments' types: a plan for another number of rows mostly takes a kernel that there is.
@functools.lru_cache(maxsize=4096)
def kernel_spec(
    tile: TileConfig,
    n: int,
    k: int,
    epilogue: Epilogue,
    columns: Columns = Columns(),  # noqa: B008 (immutable)
) -> KernelSpec:
    """Return the kernel spec for weights (n, k). All arguments become compile-time constants; M is given at launch."""
    dynamic = is_dynamic(tile, k, epilogue)
    values = _common(tile, n, arguments_type(epilogue)) | {
        "K": k,
        "SWAP": int(tile.weights_as_rows),
        "COLUMNS": tile.mma_n,
        "PRODUCTS": tile.products,
        "OVERLAPS": int(tile.overlaps),
        "A_SCALE_BOX": tile.scale_box,
        "FIRST_STAGES": tile.first_stages,
        "SPLIT_K": tile.split_k,
        "PARTS": tile.k_parts,
        "PART_REGISTERS": tile.part_registers,
        "BLOCKS_PER_SM": tile.blocks_per_sm,
        "STAGED": int(tile.tma_store),
        "HALVES": int(tile.half_tiles),
        "GROUPS": tile.groups,
        "GATED": int(epilogue.gated),
        "DYNAMIC": int(dynamic),
        "GATHERS": int(tile.gathers),
    }
    busy = dynamic or tile.column_bytes or (tile.half_tiles and isinstance(epilogue, PeerStore))
    if tile.math_registers and tile.unpacks:
        values |= {"MATH_REGISTERS": tile.math_registers - 24, "PRODUCER_REGISTERS": UNPACK_REGISTERS}
    elif tile.math_registers and busy:
        values |= {"MATH_REGISTERS": tile.math_registers - 8, "PRODUCER_REGISTERS": BUSY_PRODUCER_REGISTERS}
    values |= columns.constants | epilogue.constants
    header, math, helpers = ("gemm_math.cuh", "MathWarp", "Idle")
    if tile.packed:
        header, math = ("gemm_unpack.cuh", math) if tile.unpacks else ("gemm_packed.cuh", "PackedMathWarp")
        helpers = "Unpacker" if tile.unpacks else helpers
    prelude = f'{constants(values)}{tile.mma_source}\n#include "{header}"\n#include "{epilogue.header}"\n'
    prelude += f"using Math = {math};\nusing Helpers = {helpers};\nusing Epilogue = {type(epilogue).__name__};\n"
    return KernelSpec("gemm.cu", "gemm", epilogue.defines, prelude)


def grouped_k_spec(tile: GroupedKTile, n: int, *, out_float32: bool, accumulate: bool) -> KernelSpec:
    """Return the kernel spec for N = `n`. M, K and the groups are given at launch."""
    modes = {"ACCUMULATE": int(accumulate), "BLOCK_SCALES": int(tile.block_scales)}
    modes |= {"PIECES": tile.pieces.count, "PIECE_PITCH": tile.pieces.pitch}
    prelude = constants(_common(tile, n, GroupedKArguments) | modes)
    prelude += f"using Out = {'float' if out_float32 else 'unsigned short'};\n{tile.mma_source}"
    return KernelSpec("gemm_k.cu", "gemm_k", prelude=prelude)


@functools.lru_cache(maxsize=4096)
def arguments_type(epilogue: Epilogue) -> type[ctypes.Structure]:
    """Return the ctypes type of ``struct Arguments`` of cuda/sm90/gemm.cu, including the epilogue's ``Output``."""
    sizes = ("m", "max_m", "raster", "group_pitch", "tile_m", "tile_rows", "counter", "early_stages", "top_k")
    addresses = (("groups", ctypes.c_int64), ("rows", ctypes.c_int64))
    schedule = (*addresses, *((name, ctypes.c_int) for name in sizes))
    columns = (("b_scale", ctypes.c_int64), ("bias", ctypes.c_int64))
    fields = (*columns, *epilogue.fields, *schedule)
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


class GroupedKArguments(ctypes.Structure):
    """``struct Arguments`` of cuda/sm90/gemm_k.cu."""

    _fields_ = (("offsets", ctypes.c_int64), *((name, ctypes.c_int) for name in ("groups", "m", "k", "raster")))


def _common(tile: TileConfig | GroupedKTile, n: int, arguments: type[ctypes.Structure]) -> dict[str, int]:
    return {
        "N": n,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WARPGROUPS": tile.warpgroups,
        "STAGES": tile.stages,
        "MATH_REGISTERS": tile.math_registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "SHARED_BYTES": tile.shared_bytes,
        "ARGUMENTS_BYTES": ctypes.sizeof(arguments),
    }
