"""Quantize to FP8 E4M3 with one scale per block, and dequantize. Blocks: 1x128 for activations, 128x128 for weights.

Block-wise scaling as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), with scales in float32 or rounded up to powers
of two (the E8M0 scales of the OCP Microscaling specification v1.0, section 5.4, kept as float32 values).
Quantization has no derivative: the results are detached from the input's autograd graph.
"""

import ctypes
import functools
import math
import operator as operators
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant import reference
from fp8moe.quant.checks import FLOAT8, check_scale_format, fp8_operand
from fp8moe.quant.formats import (
    BLOCK,
    FP8_MAX,
    SCALE_DEFINES,
    FP8Tensor,
    PackedTensor,
    align,
    ceil_div,
    empty_quantized,
    has_channel_scales,
)
from fp8moe.quant.packed import dequantized
from fp8moe.runtime.autograd import check_out, detached
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_like, check_tensor, overlap
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, planned
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import WARP

INPUT_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}


# Kernel -> its macros: warps per thread block, rows per warp, columns per thread block.
class _BlockSizes(ctypes.Structure):
    """``struct Sizes`` of cuda/ops/quantize_128x128.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("n", "k", "expert_stride", "row_stride", "k_blocks", "out_n", "out_blocks")
    )


_CONSTANTS = {
    "quantize_1x128": {"WARPS": 4, "ROWS_PER_WARP": 8},
    "quantize_128x128": {"WARPS": 8, "SIZES_BYTES": ctypes.sizeof(_BlockSizes)},
    "quantize_128x1": {"WARPS": 8, "COLUMNS": 64},
}


def quantize_1x128(x: Tensor, *, scale_format: str = "float32") -> FP8Tensor:
    """Quantize activations, one scale per row and 128 columns.

    x: (..., K) bfloat16, float16 or float32, any strides.
    scale_format: "float32", or "ue8m0" for scales rounded up to powers of two.
    Returns data (..., K) contiguous and scale (..., ceil(K/128)), a view over one MN-major (rows, ceil(K/128)) buffer
    with rows = product of the leading sizes: strides (..., 1, align(rows, 4)).
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or scale_format.
    """
    check_tensor("x", x)
    check_scale_format(scale_format)
    return FP8Tensor(*_quantize_1x128(detached(x), scale_format))


def quantize_128x128(w: Tensor, *, scale_format: str = "float32", out: FP8Tensor | None = None) -> FP8Tensor:
    """Quantize weights, one scale per block of 128x128.

    w: (..., N, K) bfloat16, float16 or float32, any strides.
    scale_format: "float32", or "ue8m0" for scales rounded up to powers of two.
    out: FP8Tensor or (data, scale) with the result's shapes, to write to. If it is not contiguous, such as the gate
        rows of a gate_up_proj, the FP8 values are computed elsewhere and copied into it.
    Returns ``out``, or data (..., N, K) and scale (..., ceil(N/128), ceil(K/128)), both contiguous.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or scale_format, or an ``out`` that does not
    fit or overlaps w.
    """
    check_tensor("w", w)
    check_scale_format(scale_format)
    if out is None:
        return FP8Tensor(*_quantize_128x128(detached(w), scale_format))
    data, scale = out = FP8Tensor(*fp8_operand("out", out))
    check_out("fp8moe.quantize_128x128", ("out.data", "out.scale"), out)
    _quantize_128x128_out(detached(w), scale_format, data, scale)
    return out


class Requantizer:
    """Repeats ``quantize_128x128(w, out=out)`` for tensors w with the layout of `like`, with one launch per call.

    like, out: arguments that a call of `quantize_128x128` has checked. Calls do not increase the version of `out`.
    """

    def __init__(self, like: Tensor, out: FP8Tensor):
        data, scale = out
        self._layout = like.dtype, like.device, like.shape, like.stride()
        self._device, self._size = like.get_device(), like.numel() * like.element_size()
        self._data, self._scale = data.data_ptr(), scale.data_ptr()
        self._data_end, self._scale_end = self._data + data.numel(), self._scale + 4 * scale.numel()
        contiguous = like.is_contiguous() and data.is_contiguous() and scale.is_contiguous()
        self._launcher = None
        if use_cuda(like) and like.numel() and contiguous and has_vector_rows(like) and not self._data % 16:
            self._launcher = launcher(self._device, "quantize_128x128", _merged(like, 2), True)

    def takes(self, w: Tensor) -> bool:
        """Return whether a call can quantize `w`: it must have the layout of `like` and not overlap `out`."""
        if self._launcher is None or (w.dtype, w.device, w.shape, w.stride()) != self._layout:
            return False
        start = w.data_ptr()
        end = start + self._size
        apart = (end <= self._data or self._data_end <= start) and (end <= self._scale or self._scale_end <= start)
        return apart and not start % 16

    def __call__(self, w: Tensor) -> None:
        """Quantize `w` into `out`. `takes(w)` must be True."""
        assert self._launcher is not None
        with device_guard(self._device):
            self._launcher.launch(current_stream(self._device), w.data_ptr(), self._data, self._scale, 0, 0)


def quantize_128x1(x: Tensor) -> FP8Tensor:
    """Transpose x and quantize it with one scale per column and 128 rows of x, for a GEMM that sums over x's rows.

    x: (K, M) bfloat16, float16 or float32, any strides.
    Returns data (M, K) contiguous and MN-major scale (M, ceil(K/128)): what `quantize_1x128(x.t())` returns.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank.
    """
    check_tensor("x", x)
    return FP8Tensor(*_quantize_128x1(detached(x)))


def quantize_channels(w: Tensor) -> FP8Tensor:
    """Quantize weights with one scale per output channel, with PyTorch operations on any device.

    w: (..., N, K) of a floating dtype, K > 0. Returns data (..., N, K) and scale (..., N, 1) float32.
    """
    amax = detached(w).float().abs().amax(-1, keepdim=True)
    scale = reference.block_scale(amax, False)
    return FP8Tensor((detached(w).float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale)


def dequantize(t: FP8Tensor | tuple[Tensor, Tensor] | PackedTensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of quantized data, computed in float32: ``data * scale`` for each block.

    t: FP8Tensor or (data, scale). data (..., R, K) float8_e4m3fn; scale float32, any strides,
        (..., R, ceil(K/128)) for 1x128 blocks, (..., ceil(R/128), ceil(K/128)) for 128x128 blocks or (..., R, 1) for
        rows. Or a PackedTensor of any format: (code * scale of its group) * tensor_scale.
    dtype: floating dtype of the result, which has the shape (..., R, K).
    Raises TypeError for a wrong type or dtype, ValueError for a scale of another shape, and for a PackedTensor whose
    tensors do not fit its format.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating dtype, got {dtype!r}")
    if isinstance(t, PackedTensor):
        return dequantized(t).to(dtype)
    data, scale = fp8_operand("t", t)
    check_dtype("t.data", data, *FLOAT8)
    check_dtype("t.scale", scale, torch.float32)
    if data.dim() == 0:
        raise ValueError("t.data: expected at least one dimension, got a scalar")
    check_device("t.scale", scale, data.device, "t.data")
    k = data.shape[-1]
    per_row = (*data.shape[:-1], ceil_div(k, BLOCK))
    if data.dim() > 1 and has_channel_scales(data, scale):
        return (data.float() * scale).to(dtype)
    if scale.shape != per_row:
        per_tile = data.dim() > 1 and (*data.shape[:-2], ceil_div(data.shape[-2], BLOCK), per_row[-1])
        if scale.shape != per_tile:
            expected = f"{per_row} (1x128 blocks)" + (f" or {per_tile} (128x128 blocks)" if per_tile else "")
            shapes = f"for data of shape {tuple(data.shape)}, got {tuple(scale.shape)}"
            raise ValueError(f"t.scale: expected shape {expected} {shapes}")
        scale = scale.repeat_interleave(BLOCK, dim=-2)[..., : data.shape[-2], :]
    values = data.float()
    whole = k // BLOCK
    values[..., : whole * BLOCK].unflatten(-1, (whole, BLOCK)).mul_(scale[..., :whole, None])
    values[..., whole * BLOCK :].mul_(scale[..., whole:])
    return values.to(dtype)


class Places(NamedTuple):
    """Where "quantize_128x128" writes: the rows of data, and of scale, from one expert's first to the next expert's."""

    rows: int
    row_blocks: int

    @classmethod
    def of(cls, data: Tensor, scale: Tensor) -> "Places | None":
        """Return the places of data (..., N, K) and its scale, or None where the kernel cannot write.

        Rows must be dense. There may be space between experts, as between the gate rows of a gate_up_proj.
        """
        if data.is_contiguous() and scale.is_contiguous():
            return None if data.data_ptr() % 16 else cls(data.shape[-2], scale.shape[-2])
        if data.dim() != 3 or 0 in data.shape or data.data_ptr() % 8:
            return None
        for value in (data, scale):
            if value.stride()[1:] != (value.shape[2], 1) or value.stride(0) % value.shape[2]:
                return None
        return cls(*(value.stride(0) // value.shape[2] for value in (data, scale)))


def input_defines(dtype: torch.dtype, *, vector: bool = True) -> tuple[tuple[str, int | str], ...]:
    """Return the macros for cuda/common/input.cuh. dtype: dtype of the input. vector: see `has_vector_rows`."""
    return ("INPUT", INPUT_TYPES[dtype]), ("VECTOR", int(vector))


def quantizer_defines(
    dtype: torch.dtype, *, ue8m0: bool = False, vector: bool = True
) -> tuple[tuple[str, int | str], ...]:
    """Return the macros for cuda/common/quantize.cuh.

    dtype, vector: see `input_defines`. ue8m0: round scales up to powers of two.
    """
    return (*input_defines(dtype, vector=vector), ("UE8M0", int(ue8m0)), *SCALE_DEFINES)


def kernel_spec(name: str, dtype: torch.dtype, ue8m0: bool, vector: bool) -> KernelSpec:
    """Return the spec of "quantize_1x128", "quantize_128x128" or "quantize_128x1". Options: see `quantizer_defines`."""
    defines = quantizer_defines(dtype, ue8m0=ue8m0, vector=vector)
    return KernelSpec(f"{name}.cu", name, (*defines, *_CONSTANTS[name].items()))


@planned
def launcher(
    device_index: int, name: str, x: Tensor, vector: bool, ue8m0: bool = False, places: Places | None = None
) -> PointerLauncher:
    """Build the launcher of the kernel `name`, to be called with the tensors (x, data, scale).

    "quantize_128x128" takes data and scale of the transpose, too, or None for both.

    x: (M, K), for "quantize_128x128" (E, N, K), for "quantize_128x1" (K, M); last stride 1, not empty.
    vector: `has_vector_rows` of x. data: contiguous, at a multiple of 16 bytes. scale of "quantize_1x128": row i and K
    block j at element i + j * align(M, 4). places: of "quantize_128x128"; None: data and scale are contiguous.
    """
    constants = _CONSTANTS[name]
    *lead, rows, columns = x.shape
    stride = x.stride(-2)
    blocks = ceil_div(columns, BLOCK)
    sizes: tuple[int, ...]
    if name == "quantize_128x128":
        grid = math.prod(lead) * ceil_div(rows, BLOCK) * blocks
        sizes = rows, columns, x.stride(0), stride, blocks, *(places or Places(rows, ceil_div(rows, BLOCK)))
    elif name == "quantize_1x128":
        grid = ceil_div(ceil_div(rows, constants["ROWS_PER_WARP"]) * blocks, constants["WARPS"])
        sizes = rows, columns, stride, align(rows, 4), blocks
    else:
        tiles = ceil_div(columns, constants["COLUMNS"])
        grid = ceil_div(rows, BLOCK) * tiles
        sizes = rows, columns, stride, align(columns, 4), tiles
    kernel = load(kernel_spec(name, x.dtype, ue8m0, vector))
    block = constants["WARPS"] * WARP
    if name == "quantize_128x128":
        return PointerLauncher(kernel, grid=grid, block=block, pointers=5, args=(_BlockSizes(*sizes),))
    return PointerLauncher(kernel, grid=grid, block=block, pointers=3, args=tuple(map(ctypes.c_int64, sizes)))


def has_vector_rows(x: Tensor) -> bool:
    """Return whether the rows of x start at multiples of 16 bytes and are multiples of 16 bytes long."""
    lengths = functools.reduce(operators.or_, x.stride()[:-1], x.shape[-1])
    return not (x.data_ptr() | lengths * x.element_size()) & 15


def unit_stride(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if the stride of x's last dimension is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_input(name: str, x: Tensor, min_dim: int) -> None:
    check_dtype(name, x, *FLOATING)
    if x.dim() < min_dim:
        raise ValueError(f"{name}: expected at least {min_dim} dimension(s), got shape {tuple(x.shape)}")


def _check_matrix(x: Tensor) -> None:
    check_dtype("x", x, *FLOATING)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (K, M), got {tuple(x.shape)}")


def _merged(x: Tensor, kept: int) -> Tensor:
    """Return x with all but its last `kept` dimensions merged into one."""
    return x if x.dim() == kept + 1 else x.reshape(math.prod(x.shape[:-kept]), *x.shape[-kept:])


def _launch(name: str, x: Tensor, scale_format: str, results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if x.numel():
        x = unit_stride(x)
        launcher(x.get_device(), name, x, has_vector_rows(x), scale_format == "ue8m0")(x, *results)
    return results


def launch_128x128(
    w: Tensor, scale_format: str, results: Sequence[Tensor], places: Places, transposed: Sequence[Tensor | None]
) -> None:
    """Quantize w (..., N, K) into results (data, scale), which have these places, and into `transposed`, or None."""
    if w.numel():
        w = unit_stride(_merged(w, 2))
        launch = launcher(w.get_device(), "quantize_128x128", w, has_vector_rows(w), scale_format == "ue8m0", places)
        launch(w, *results, *transposed)


def _launch_128x1(x: Tensor) -> tuple[Tensor, Tensor]:
    results = _empty_1x128(x.t(), "float32")
    if x.stride(0) == 1 and x.shape[0] > 1:
        return _launch("quantize_1x128", x.t(), "float32", results)
    return _launch("quantize_128x1", x, "float32", results)


def _reference_1x128(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    data, scale = reference.quantize_1x128(_merged(x, 1), scale_format == "ue8m0")
    return (data, scale) if x.dim() == 2 else (data.view(x.shape), scale.view(*x.shape[:-1], scale.shape[-1]))


def _reference_128x128(w: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    data, scale = reference.quantize_128x128(_merged(w, 2), scale_format == "ue8m0")
    return data.view(w.shape), scale.view(*w.shape[:-2], *scale.shape[-2:])


def _empty_1x128(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    data, scale = empty_quantized(x, math.prod(lead), k)
    return (data, scale) if len(lead) == 1 else (data.view(x.shape), scale.view(*lead, scale.shape[-1]))


def _empty_128x128(w: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    *lead, n, k = w.shape
    scale = w.new_empty((*lead, ceil_div(n, BLOCK), ceil_div(k, BLOCK)), dtype=torch.float32)
    return w.new_empty(w.shape, dtype=torch.float8_e4m3fn), scale


def _check_out(w: Tensor, scale_format: str, data: Tensor, scale: Tensor) -> None:
    _check_input("w", w, 2)
    *lead, n, k = w.shape
    check_like("out.data", data, FLOAT8[:1], w.shape, w.device, "w")
    check_like("out.scale", scale, (torch.float32,), (*lead, ceil_div(n, BLOCK), ceil_div(k, BLOCK)), w.device, "w")


def _check_apart(w: Tensor, data: Tensor, scale: Tensor) -> None:
    for name, value in (("data", data), ("scale", scale)):
        if overlap(value, w):
            raise ValueError(f"out.{name}: expected memory of its own, got a tensor that overlaps w")


def _launch_128x128(w: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    results = _empty_128x128(w, scale_format)
    launch_128x128(w, scale_format, results, Places(*(value.shape[-2] for value in results)), (None, None))
    return results


def _write_128x128(w: Tensor, scale_format: str, data: Tensor, scale: Tensor) -> None:
    """Quantize w into data and scale; where the kernel cannot write to their layout, by way of temporary tensors."""
    _check_apart(w, data, scale)
    places = Places.of(data, scale)
    if places is not None:
        launch_128x128(w, scale_format, (data, scale), places, (None, None))
        return
    found = _launch_128x128(w, scale_format)
    # Copy eight values as one int64 if start and length of every row are multiples of eight values.
    pitches = (data.shape[-1], data.storage_offset(), *data.stride()[:-1])
    wide = torch.int64 if data.stride(-1) == 1 and not any(pitch % 8 for pitch in pitches) else torch.uint8
    data.view(wide).copy_(found[0].view(wide))
    scale.copy_(found[1])


def _copy_128x128(w: Tensor, scale_format: str, data: Tensor, scale: Tensor) -> None:
    _check_apart(w, data, scale)
    found = _reference_128x128(w, scale_format)
    data.view(torch.uint8).copy_(found[0].view(torch.uint8))
    scale.copy_(found[1])


_quantize_1x128 = operator(
    "quantize_1x128(Tensor x, str scale_format) -> (Tensor, Tensor)",
    check=lambda x, scale_format: _check_input("x", x, 1),
    cuda=lambda x, scale_format: _launch("quantize_1x128", _merged(x, 1), scale_format, _empty_1x128(x, scale_format)),
    reference=_reference_1x128,
    fake=_empty_1x128,
)
_quantize_128x128 = operator(
    "quantize_128x128(Tensor w, str scale_format) -> (Tensor, Tensor)",
    check=lambda w, scale_format: _check_input("w", w, 2),
    cuda=_launch_128x128,
    reference=_reference_128x128,
    fake=_empty_128x128,
)
_quantize_128x128_out = operator(
    "quantize_128x128_out(Tensor w, str scale_format, Tensor(a!) data, Tensor(b!) scale) -> ()",
    check=_check_out,
    cuda=_write_128x128,
    reference=_copy_128x128,
    fake=lambda *_: None,
)
_quantize_128x1 = operator(
    "quantize_128x1(Tensor x) -> (Tensor, Tensor)",
    check=_check_matrix,
    cuda=_launch_128x1,
    reference=lambda x: reference.quantize_1x128(x.t(), False),
    fake=lambda x: _empty_1x128(x.t(), "float32"),
)
