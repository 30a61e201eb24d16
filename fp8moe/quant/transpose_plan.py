"""Launches ``cuda/quantize_transpose.cu`` on its three sources. Arguments are checked by the callers.

Rows and columns of `quantize_with_transpose` equal those of `transpose_reference` bit for bit; SwiGLU is computed with
the GPU's own exponential.
"""

import ctypes
import functools

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.quant.formats import BLOCK, align, ceil_div
from fp8moe.quant.quantize_plan import quantizer_defines, unit_stride
from fp8moe.quant.transpose_reference import Results, pad_groups, padded_rows
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard

_THREADS = 256
_OPERANDS = {"SWIGLU": 2, "SWIGLU_BACKWARD": 3}
# Columns of tiles that blocks take side by side: few where tokens are read several times, so that L2 still has them.
_STRIP, _GATHER_STRIP = 8, 4


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("x", "grad", "tokens", "weights", "groups", "rows", "row_scale")),
        *((name, ctypes.c_int64) for name in ("columns", "column_scale", "offsets", "dots")),
        *((name, ctypes.c_int64) for name in ("width", "row_stride", "grad_stride")),
        *((name, ctypes.c_int64) for name in ("row_scale_pitch", "column_scale_pitch")),
        *((name, ctypes.c_uint32) for name in ("num_rows", "num_tokens", "num_groups")),
        *((name, ctypes.c_uint32) for name in ("row_tiles", "column_tiles", "strip")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )


def rows_spec(dtype: torch.dtype, vector: bool, weighted: bool) -> KernelSpec:
    """The kernel for rows of `dtype`.

    vector: they start at multiples of 16 bytes and are multiples of 16 bytes long. weighted: `columns` has weights.
    """
    return _spec(dtype, "ROWS", vector, weighted, 1)


def swiglu_spec(activation: Activation, backward: bool) -> KernelSpec:
    """The kernel for a SwiGLU of bfloat16 rows or for its gradients."""
    form = 1 if activation.limit is None else 2 if activation.alpha is None else 3
    return _spec(torch.bfloat16, "SWIGLU_BACKWARD" if backward else "SWIGLU", True, False, form)


def _spec(dtype: torch.dtype, source: str, vector: bool, weighted: bool, form: int) -> KernelSpec:
    defines = (("SOURCE", source), ("WEIGHTED", int(weighted)), ("FORM", form))
    return KernelSpec(
        "quantize_transpose.cu", "quantize_transpose", (*quantizer_defines(dtype, vector=vector), *defines)
    )


def shared_bytes(source: str) -> int:
    """Dynamic shared memory of a block: the transposed tile, in which the bfloat16 operands of SwiGLU have been."""
    return BLOCK * BLOCK * 2 * _OPERANDS[source] if source in _OPERANDS else BLOCK * BLOCK


class Plan:
    """One kernel on the current device with its grid and every argument but the pointers.

    spec: of `rows_spec` or `swiglu_spec`. rows, groups: of the result. column_tiles: blocks of 128 columns of the
    source. sizes: the other fields of `Arguments`.
    """

    def __init__(self, spec: KernelSpec, rows: int, groups: int, column_tiles: int, **sizes: float):
        row_tiles = padded_rows(rows, groups) // BLOCK
        self._arguments = Arguments(
            num_rows=rows,
            num_groups=groups,
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            row_scale_pitch=align(rows, 4),
            column_scale_pitch=align(sizes["width"], 4),
            **sizes,
        )
        self._launcher = Launcher(
            load(spec),
            grid=row_tiles * column_tiles,
            block=_THREADS,
            smem=shared_bytes(dict(spec.defines)["SOURCE"]),
            args=(self._arguments,),
        )

    def launch(self, stream: int, results: tuple[Tensor, ...], **operands: Tensor | None) -> None:
        """Enqueue the kernel. results: rows, row_scale, columns, column_scale, offsets; operands: fields by name."""
        launcher, arguments = self._launcher, self._arguments
        rows, row_scale, columns, column_scale, offsets = results
        with launcher.lock:
            arguments.rows = rows.data_ptr()
            arguments.row_scale = row_scale.data_ptr()
            arguments.columns = columns.data_ptr()
            arguments.column_scale = column_scale.data_ptr()
            arguments.offsets = offsets.data_ptr()
            for name, value in operands.items():
                setattr(arguments, name, 0 if value is None else value.data_ptr())
            launcher.launch(stream)


@functools.lru_cache(maxsize=4096)
def _plan(device_index: int, spec: KernelSpec, rows: int, groups: int, column_tiles: int, **sizes: float) -> Plan:
    return Plan(spec, rows, groups, column_tiles, **sizes)


def quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None, results: Results
) -> None:
    """Fill `results` as ``quant.transpose.quantize_with_transpose`` describes."""
    rows, columns = results[0], results[2]
    if not columns.numel():
        _offsets_only(group_offsets, results)
        return
    x = unit_stride(x)
    num_tokens, features = x.shape
    vector = not (x.data_ptr() | (features | x.stride(0)) * x.element_size()) & 15
    index = x.get_device()
    with device_guard(index):
        plan = _plan(
            *(index, rows_spec(x.dtype, vector, row_weights is not None)),
            *(rows.shape[0], results[4].shape[0] - 1, ceil_div(features, BLOCK)),
            width=features,
            row_stride=x.stride(0),
            num_tokens=num_tokens,
            strip=_STRIP if tokens is None else _GATHER_STRIP,
        )
        operands = {"groups": _contiguous(group_offsets), "tokens": _contiguous(tokens)}
        plan.launch(current_stream(index), results, x=x, weights=_contiguous(row_weights), **operands)


def swiglu_quantize(gate_up: Tensor, group_offsets: Tensor, activation: Activation, results: Results) -> None:
    """Fill `results` as ``kernels.swiglu_training.swiglu_quantize`` describes."""
    rows, columns = results[0], results[2]
    if not columns.numel():
        _offsets_only(group_offsets, results)
        return
    gate_up = _vectors(gate_up)
    num_rows, width = rows.shape
    index = gate_up.get_device()
    with device_guard(index):
        plan = _plan(
            *(index, swiglu_spec(activation, backward=False), num_rows, results[4].shape[0] - 1, width // BLOCK),
            width=width,
            row_stride=gate_up.stride(0),
            strip=_STRIP,
            **_form(activation),
        )
        plan.launch(current_stream(index), results, x=gate_up, groups=_contiguous(group_offsets))


def swiglu_backward_quantize(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, group_offsets: Tensor, activation: Activation, results: Results
) -> Tensor:
    """Fill `results` as ``kernels.swiglu_training.swiglu_backward_quantize`` describes, and return the dots (R,)."""
    rows, columns = results[0], results[2]
    num_rows, width = rows.shape
    if not columns.numel():
        _offsets_only(group_offsets, results)
        return torch.zeros(num_rows, dtype=torch.float32, device=gate_up.device)
    gate_up, grad = _vectors(gate_up), _vectors(grad)
    column_tiles = width // 2 // BLOCK
    # A part of each dot per tile, summed in a fixed order below.
    dots = torch.empty((column_tiles, num_rows), dtype=torch.float32, device=gate_up.device)
    index = gate_up.get_device()
    with device_guard(index):
        plan = _plan(
            *(index, swiglu_spec(activation, backward=True), num_rows, results[4].shape[0] - 1, column_tiles),
            width=width,
            row_stride=gate_up.stride(0),
            grad_stride=grad.stride(0),
            strip=_STRIP,
            **_form(activation),
        )
        operands = {"x": gate_up, "grad": grad, "weights": _contiguous(row_weights)}
        plan.launch(current_stream(index), results, groups=_contiguous(group_offsets), dots=dots, **operands)
    return dots.sum(0)


def _form(activation: Activation) -> dict[str, float]:
    return {"limit": activation.limit or 0.0, "alpha": activation.alpha or 0.0}


def _offsets_only(group_offsets: Tensor | None, results: Results) -> None:
    """Fill `results` where there is nothing to quantize."""
    results[4].copy_(pad_groups(group_offsets, results[0].shape[0], results[4].device)[2])


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _vectors(x: Tensor) -> Tensor:
    """x with every row at a multiple of 16 bytes: itself where it lies so, otherwise a copy."""
    x = unit_stride(x)
    if (x.data_ptr() | x.stride(0) * x.element_size()) & 15:
        return x.clone(memory_format=torch.contiguous_format)
    return x
