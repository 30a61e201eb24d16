"""Checks of what callers pass: one comparison each on the way through, a message only where one fails.

Every error names the argument, what is needed and what came. A wrong type or dtype is a TypeError, a wrong rank, size,
device or memory layout a ValueError. Checks that read addresses are apart from those that trace with fake tensors.
"""

import operator

import torch
from torch import Tensor

from fp8moe.quant.formats import align, ceil_div, empty_mn_major

FLOAT8 = torch.float8_e4m3fn
FLOAT32 = torch.float32
BFLOAT16 = torch.bfloat16
FLOAT16 = torch.float16


def operand(name: str, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The two tensors of an FP8Tensor or of any other (data, scale) pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}: expected an FP8Tensor or a (data, scale) pair, got {describe(pair)}")
    data, scale = pair
    if not (isinstance(data, Tensor) and isinstance(scale, Tensor)):
        raise TypeError(f"{name}: expected a pair of tensors, got {describe(data)} and {describe(scale)}")
    return data, scale


def tensor(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {describe(value)}")


def out_dtype(dtype: torch.dtype, out: Tensor | None) -> None:
    """A dtype that ``gemm`` writes and that does not contradict ``out``, to which the default, bfloat16, yields."""
    if dtype is not BFLOAT16 and dtype is not FLOAT32:
        raise TypeError(f"out_dtype: expected torch.bfloat16 or torch.float32, got {dtype}")
    if out is not None and dtype is FLOAT32 and out.dtype is not FLOAT32:
        raise TypeError(f"out_dtype: {dtype} contradicts out, {describe(out)}")


def gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    """Dtypes, shapes and devices of the operands of ``gemm``. Returns M, N, K."""
    m, k = fp8_matrix("a.data", a)
    n, b_k = fp8_matrix("b.data", b)
    if b_k != k:
        raise ValueError(f"b.data: expected shape (N, {k}) to match a.data (M, K) = {(m, k)}, got {(n, b_k)}")
    if k % 16:
        raise ValueError(f"a.data, b.data: K must be a multiple of 16 (pad both with zeros), got K = {k}")
    if n % 8:
        raise ValueError(f"b.data: N must be a multiple of 8 (pad with zero rows), got N = {n}")
    device = a.device
    if b.device != device:
        raise ValueError(f"b.data: expected on {device} like a.data, got {b.device}")
    k_blocks = ceil_div(k, 128)
    scale("a.scale", a_scale, (m, k_blocks), device)
    scale("b.scale", b_scale, (ceil_div(n, 128), k_blocks), device)
    if bias is not None:
        gemm_bias(bias, n, device)
    return m, n, k


def fp8_matrix(name: str, data: Tensor) -> torch.Size:
    """The shape of a float8_e4m3fn matrix."""
    if data.dtype is not FLOAT8:
        raise TypeError(f"{name}: expected float8_e4m3fn, got {data.dtype}")
    shape = data.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: expected two dimensions, got shape {tuple(shape)}")
    return shape


def scale(name: str, value: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    if value.dtype is not FLOAT32:
        raise TypeError(f"{name}: expected float32, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, one scale per quantization block, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected on {device} like the data, got {value.device}")


def gemm_bias(bias: Tensor, n: int, device: torch.device) -> None:
    if bias.dtype is not BFLOAT16 and bias.dtype is not FLOAT32 and bias.dtype is not FLOAT16:
        raise TypeError(f"bias: expected bfloat16, float16 or float32, got {bias.dtype}")
    if bias.shape != (n,):
        raise ValueError(f"bias: expected shape {(n,)}, got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"bias: expected on {device} like a.data, got {bias.device}")


def gemm_out(out: Tensor, m: int, n: int, device: torch.device) -> None:
    """Dtype, shape, device and strides of a result that the caller allocated."""
    if out.dtype is not BFLOAT16 and out.dtype is not FLOAT32:
        raise TypeError(f"out: expected bfloat16 or float32, got {out.dtype}")
    if out.shape != (m, n):
        raise ValueError(f"out: expected shape {(m, n)}, got {tuple(out.shape)}")
    if out.device != device:
        raise ValueError(f"out: expected on {device} like a.data, got {out.device}")
    row, column = out.stride()
    if m and n and (column != 1 or row < n or row * out.itemsize % 16):
        raise ValueError(
            f"out: expected row-major, strides (s, 1) with s >= {n} a multiple of {16 // out.itemsize} (16 bytes), "
            f"got {(row, column)}"
        )


def gemm_out_memory(out: Tensor, operands: dict[str, Tensor | None]) -> None:
    """The address of ``out``, and that it shares no memory with an operand."""
    begin, end = _span(out)
    if begin % 16:
        raise ValueError(f"out: expected to start at a multiple of 16 bytes, got address {begin:#x}")
    for name, value in operands.items():
        if value is not None:
            other_begin, other_end = _span(value)
            if begin < other_end and other_begin < end:
                raise ValueError(f"out: expected memory of its own, got a tensor that overlaps {name}")


def linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> None:
    """Dtypes, shapes and devices of an FP8 linear layer's input and parameters."""
    dtype = x.dtype
    if dtype is not BFLOAT16 and dtype is not FLOAT16 and dtype is not FLOAT32:
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {dtype}")
    n, k = fp8_matrix("weight", weight)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: expected shape (..., {k}) to match the weight {(n, k)}, got {tuple(x.shape)}")
    device = x.device
    if weight.device != device:
        raise ValueError(f"weight: expected on {device} like x, got {weight.device}")
    scale("weight_scale_inv", weight_scale_inv, (ceil_div(n, 128), ceil_div(k, 128)), device)
    if bias is not None:
        gemm_bias(bias, n, device)


def row_major(data: Tensor) -> Tensor:
    """``data`` (R, K) as TMA can load it, rows at multiples of 16 bytes: itself where it lies so, otherwise a copy."""
    row, column = data.stride()
    if column == 1 and row >= data.shape[1] and not row % 16 and not data.data_ptr() % 16:
        return data
    return torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)


def mn_major(activation_scale: Tensor) -> Tensor:
    """``activation_scale`` (M, K blocks) MN-major and 16-byte aligned: itself where it lies so, otherwise a copy."""
    m = activation_scale.shape[0]
    row, column = activation_scale.stride()
    if (row == 1 or m == 1) and column == align(m, 4) and not activation_scale.data_ptr() % 16:
        return activation_scale
    return empty_mn_major(*activation_scale.shape, device=activation_scale.device).copy_(activation_scale)


def bias_vector(bias: Tensor | None) -> Tensor | None:
    """``bias`` as the kernels read it, contiguous bfloat16 or float32: itself where it is, otherwise a copy."""
    if bias is None:
        return None
    return (bias.float() if bias.dtype is FLOAT16 else bias).contiguous()


def describe(value: object) -> str:
    """What came, for a message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r:.60}"


def _span(value: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one past the last."""
    begin = value.data_ptr()
    if value.is_contiguous():
        return begin, begin + value.nbytes
    strides = value.stride()
    last = sum(map(operator.mul, value.shape, strides)) - sum(strides)
    return begin, begin + (last + 1) * value.itemsize
