"""Launches of the transposing quantizers: ``cuda/quantize_transpose.cu``, and `Plan` for all over quantize_tile.cuh.

Arguments are checked by the callers; results equal `transpose_reference` bit for bit.
"""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, align, ceil_div, padded_rows
from fp8moe.quant.quantize import quantizer_defines, unit_stride
from fp8moe.quant.transpose_reference import Results, pad_groups
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

TILE_BYTES = BLOCK * BLOCK  # of the transposed tile in shared memory
STRIP = 8  # columns of tiles that thread blocks take side by side
_GATHER_STRIP = 4  # fewer where tokens are read several times, so that L2 still has them
_WARPS = 8  # of a thread block


class _Results(ctypes.Structure):
    """``struct Results`` of cuda/row_tiles.cuh."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "row_scale", "columns", "column_scale", "offsets", "groups")),
        *((name, ctypes.c_int64) for name in ("width", "row_scale_pitch", "column_scale_pitch")),
        *((name, ctypes.c_uint32) for name in ("num_rows", "num_groups", "row_tiles", "column_tiles", "strip")),
    )


class _Source(ctypes.Structure):
    """``struct Source`` of cuda/quantize_transpose.cu."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("x", "tokens", "weights", "row_stride")),
        ("num_tokens", ctypes.c_uint32),
    )


def tile_spec(
    name: str,
    source: type[ctypes.Structure],
    dtype: torch.dtype,
    *,
    shared_bytes: int,
    vector: bool = True,
    weighted: bool = False,
    **defines: int,
) -> KernelSpec:
    """The kernel `name` over quantize_tile.cuh, whose ``struct Source`` is `source`.

    dtype, vector: of its values, as for `quantizer_defines`. shared_bytes: dynamic, of a thread block. weighted: the
    columns have weights. defines: its own constants.
    """
    defines |= {
        "WARPS": _WARPS,
        "WEIGHTED": int(weighted),
        "RESULTS_BYTES": ctypes.sizeof(_Results),
        "SOURCE_BYTES": ctypes.sizeof(source),
        "SHARED_BYTES": shared_bytes,
    }
    return KernelSpec(f"{name}.cu", name, (*quantizer_defines(dtype, vector=vector), *defines.items()))


def kernel_spec(dtype: torch.dtype, vector: bool, weighted: bool) -> KernelSpec:
    """The kernel of `quantize_with_transpose`; see `tile_spec`."""
    return tile_spec("quantize_transpose", _Source, dtype, shared_bytes=TILE_BYTES, vector=vector, weighted=weighted)


class Plan:
    """A kernel of `tile_spec` on the current device, with its grid and all arguments but the pointers.

    source: its ``struct Source``, sizes filled in. rows, width, groups: of the results. column_tiles: of 128 columns,
    the tiles that a row of thread blocks takes.
    """

    def __init__(
        self,
        spec: KernelSpec,
        source: ctypes.Structure,
        *,
        rows: int,
        width: int,
        groups: int,
        column_tiles: int,
        strip: int = STRIP,
    ):
        row_tiles = padded_rows(rows, groups) // BLOCK
        self._source = source
        self._results = _Results(
            width=width,
            row_scale_pitch=align(rows, 4),
            column_scale_pitch=align(width, 4),
            num_rows=rows,
            num_groups=groups,
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            strip=strip,
        )
        self._launcher = Launcher(
            load(spec),
            grid=row_tiles * column_tiles,
            block=_WARPS * WARP,
            smem=int(dict(spec.defines)["SHARED_BYTES"]),
            args=(self._results, source),
        )

    def launch(
        self, stream: int, results: tuple[Tensor | None, ...], groups: Tensor | None, **operands: Tensor | None
    ) -> None:
        """Enqueue the kernel.

        results: in the order of `Results`, None for those that the kernel does not write. groups: offsets (E + 1,),
        contiguous, or None. operands: fields of `source`.
        """
        launcher = self._launcher
        rows, row_scale, columns, column_scale, offsets = results
        targets = {"rows": rows, "row_scale": row_scale, "columns": columns, "column_scale": column_scale}
        with launcher.lock:
            for name, value in (*targets.items(), ("offsets", offsets), ("groups", groups)):
                setattr(self._results, name, _address(value))
            for name, value in operands.items():
                setattr(self._source, name, _address(value))
            launcher.launch(stream)


def _address(value: Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()


_plans: PlanCache[Plan] = PlanCache()


def quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None, results: Results
) -> None:
    """Fill `results` as ``quant.transpose.quantize_with_transpose`` describes."""
    if not results[2].numel():
        write_offsets(group_offsets, results[0].shape[0], results[4])
        return
    x = unit_stride(x)
    group_offsets, tokens, row_weights = (
        None if value is None else value.contiguous() for value in (group_offsets, tokens, row_weights)
    )
    num_tokens, features = x.shape
    rows, groups = results[0].shape[0], results[4].shape[0] - 1
    row_stride = x.stride(0)
    vector = not (x.data_ptr() | (features | row_stride) * x.element_size()) & 15
    strip = STRIP if tokens is None else _GATHER_STRIP
    weighted = row_weights is not None
    index = x.get_device()

    def build() -> Plan:
        return Plan(
            kernel_spec(x.dtype, vector, weighted),
            _Source(row_stride=row_stride, num_tokens=num_tokens),
            rows=rows,
            width=features,
            groups=groups,
            column_tiles=ceil_div(features, BLOCK),
            strip=strip,
        )

    key = (index, x.dtype, vector, weighted, num_tokens, features, row_stride, rows, groups, strip)
    with device_guard(index):
        plan = _plans.get(key, build)
        plan.launch(current_stream(index), results, group_offsets, x=x, tokens=tokens, weights=row_weights)


def write_offsets(group_offsets: Tensor | None, rows: int, offsets: Tensor) -> None:
    """Fill the results' offsets where there is nothing to quantize."""
    offsets.copy_(pad_groups(group_offsets, rows, offsets.device)[2])
