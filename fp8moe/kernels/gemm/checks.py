"""Checks of the arguments of the GEMMs, in the manner of `runtime.checks`, and the layouts that the kernels ask for.

Group sizes are on the device: the kernels clamp them.
"""

import torch
from torch import Tensor

from fp8moe.quant.checks import FLOAT32, check_scale, fp8_data, fp8_matrix, mn_major
from fp8moe.quant.formats import ceil_div, empty_mn_major
from fp8moe.runtime.checks import describe, row_major

BFLOAT16 = torch.bfloat16
FLOAT16 = torch.float16


def out_dtype(dtype: torch.dtype, out: Tensor | None) -> None:
    """A dtype that ``gemm`` writes and that does not contradict ``out``, to which the default, bfloat16, yields."""
    if dtype is not BFLOAT16 and dtype is not FLOAT32:
        raise TypeError(f"out_dtype: expected torch.bfloat16 or torch.float32, got {dtype}")
    if out is not None and dtype is FLOAT32 and out.dtype is not FLOAT32:
        raise TypeError(f"out_dtype: {dtype} contradicts out, {describe(out)}")


def dense(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
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
    check_scale("a.scale", a_scale, (m, k_blocks), device)
    check_scale("b.scale", b_scale, (ceil_div(n, 128), k_blocks), device)
    if bias is not None:
        check_bias(bias, n, device)
    return m, n, k


def check_bias(bias: Tensor, n: int, device: torch.device) -> None:
    if bias.dtype is not BFLOAT16 and bias.dtype is not FLOAT32 and bias.dtype is not FLOAT16:
        raise TypeError(f"bias: expected bfloat16, float16 or float32, got {bias.dtype}")
    if bias.shape != (n,):
        raise ValueError(f"bias: expected shape {(n,)}, got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"bias: expected on {device} like a.data, got {bias.device}")


def dense_out(out: Tensor, m: int, n: int, device: torch.device) -> None:
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


def contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_offsets: Tensor
) -> tuple[int, int, int, int]:
    """Dtypes, shapes and devices of the operands of ``grouped_gemm``. Returns E, M, N, K."""
    m, k = fp8_data("a.data", a, "(M, K)")
    experts, n = _weights(b, k, a.device)
    k_blocks = ceil_div(k, 128)
    check_scale("a.scale", a_scale, (m, k_blocks), a.device)
    check_scale("b.scale", b_scale, (experts, ceil_div(n, 128), k_blocks), a.device)
    _groups("group_offsets", group_offsets, (experts + 1,), "(E + 1,)", a.device)
    return experts, m, n, k


def masked(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, masked_m: Tensor) -> tuple[int, int, int, int]:
    """Dtypes, shapes and devices of the operands of ``grouped_gemm_masked``. Returns E, max_m, N, K."""
    experts, max_m, k = fp8_data("a.data", a, "(E, max_m, K)")
    b_experts, n = _weights(b, k, a.device)
    if b_experts != experts:
        raise ValueError(
            f"b.data: expected shape ({experts}, N, K), as many experts as a.data {tuple(a.shape)} has, "
            f"got {tuple(b.shape)}"
        )
    k_blocks = ceil_div(k, 128)
    check_scale("a.scale", a_scale, (experts, max_m, k_blocks), a.device)
    check_scale("b.scale", b_scale, (experts, ceil_div(n, 128), k_blocks), a.device)
    _groups("masked_m", masked_m, (experts,), "(E,)", a.device)
    return experts, max_m, n, k


def swiglu(
    a: Tensor, a_scale: Tensor, gate_up: Tensor, gate_up_scale: Tensor, groups: Tensor, max_m: int | None
) -> tuple[int, int, int]:
    """Dtypes, shapes and devices of the operands of ``grouped_gemm_swiglu``. Returns E, M, I."""
    m, k = fp8_data("a.data", a, "(M, K)")
    experts, n = _weights(gate_up, k, a.device, "gate_up")
    if n % 32:
        raise ValueError(f"gate_up.data: expected 2 * I rows an expert with I a multiple of 16, got {n}")
    k_blocks = ceil_div(k, 128)
    check_scale("a.scale", a_scale, (m, k_blocks), a.device)
    check_scale("gate_up.scale", gate_up_scale, (experts, 2 * ceil_div(n // 2, 128), k_blocks), a.device)
    if max_m is None:
        _groups("groups", groups, (experts + 1,), "(E + 1,)", a.device)
    else:
        _groups("groups", groups, (experts,), "(E,)", a.device)
        if m != experts * max_m:
            raise ValueError(f"a.data: expected E * max_m = {experts} * {max_m} rows, got {m}")
    return experts, m, n // 2


def along_k(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_offsets: Tensor) -> tuple[int, int, int]:
    """Dtypes, shapes and devices of the operands of ``grouped_gemm_k``. Returns E, M, N."""
    m, k = fp8_data("a.data", a, "(M, K)")
    n, b_k = fp8_data("b.data", b, "(N, K)")
    if b_k != k:
        raise ValueError(f"b.data: expected shape (N, {k}) to match a.data (M, K) = {(m, k)}, got {(n, b_k)}")
    if k % 128:
        raise ValueError(f"a.data, b.data: K must be a multiple of 128 (pad each group with zeros), got K = {k}")
    if n % 8:
        raise ValueError(f"b.data: N must be a multiple of 8 (pad with zero rows), got N = {n}")
    if b.device != a.device:
        raise ValueError(f"b.data: expected on {a.device} like a.data, got {b.device}")
    check_scale("a.scale", a_scale, (m, k // 128), a.device)
    check_scale("b.scale", b_scale, (n, k // 128), a.device)
    if group_offsets.dim() != 1 or not group_offsets.shape[0]:
        raise ValueError(f"group_offsets: expected shape (E + 1,), got {tuple(group_offsets.shape)}")
    _groups("group_offsets", group_offsets, tuple(group_offsets.shape), "(E + 1,)", a.device)
    return group_offsets.shape[0] - 1, m, n


def expected_rows(expected_m: int | None) -> None:
    if expected_m is None:
        return
    if isinstance(expected_m, bool) or not isinstance(expected_m, int | torch.SymInt):
        raise TypeError(f"expected_m: expected an int or None, got {type(expected_m).__name__}")
    if expected_m < 0:
        raise ValueError(f"expected_m: expected a number of rows, got {expected_m}")


def out(value: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Dtype, shape, device and strides of a result (..., M, N) that the caller allocated."""
    if value.dtype is not BFLOAT16 and value.dtype is not FLOAT32:
        raise TypeError(f"out: expected bfloat16 or float32, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"out: expected shape {tuple(shape)}, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"out: expected on {device} like a.data, got {value.device}")
    # Where nothing is wrong nobody asks whether it is empty: compiled, sizes may depend on data.
    *_, rows, columns = shape
    *lead, row, column = value.stride()
    if (column != 1 or row < columns or row * value.itemsize % 16) and value.numel():
        raise ValueError(
            f"out: expected row-major, strides (..., s, 1) with s >= {columns} a multiple of {16 // value.itemsize} "
            f"(16 bytes), got {value.stride()}"
        )
    if lead and shape[0] > 1 and lead[0] != rows * row and value.numel():
        raise ValueError(
            f"out: expected all rows of all experts equally far apart, strides ({rows * row}, {row}, 1), "
            f"got {value.stride()}"
        )


def activations(a: Tensor, a_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Activations as the kernels load them, views where possible, otherwise copies.

    a (..., K) -> (rows, K), rows at multiples of 16 bytes; a_scale (..., K blocks) -> (rows, K blocks), MN-major.
    """
    if a.dim() == 2:
        return row_major(a), mn_major(a_scale)
    rows, k_blocks = a.shape[0] * a.shape[1], a_scale.shape[-1]
    if a_scale.numel() and a_scale.shape[0] > 1 and a_scale.stride(0) != a_scale.shape[1] * a_scale.stride(1):
        flat = empty_mn_major(rows, k_blocks, device=a.device)
        flat.view(a_scale.shape).copy_(a_scale)
        a_scale = flat
    return row_major(a.reshape(rows, a.shape[-1])), mn_major(a_scale.reshape(rows, k_blocks))


def weights(data: Tensor) -> Tensor:
    """``data`` (E, N, K) contiguous and 16-byte aligned: itself where it lies so, otherwise a copy."""
    if data.is_contiguous() and not data.data_ptr() % 16:
        return data
    return torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)


def _weights(data: Tensor, k: int, device: torch.device, name: str = "b") -> tuple[int, int]:
    """E and N of the experts' weights."""
    name += ".data"
    experts, n, b_k = fp8_data(name, data, "(E, N, K)")
    if b_k != k:
        raise ValueError(f"{name}: expected shape (E, N, {k}) to match the K = {k} of a.data, got {tuple(data.shape)}")
    if k % 16:
        raise ValueError(f"a.data, {name}: K must be a multiple of 16 (pad both with zeros), got K = {k}")
    if n % 8:
        raise ValueError(f"{name}: N must be a multiple of 8 (pad with zero rows), got N = {n}")
    if data.device != device:
        raise ValueError(f"{name}: expected on {device} like a.data, got {data.device}")
    return experts, n


def _groups(name: str, value: Tensor, shape: tuple[int], dimensions: str, device: torch.device) -> None:
    if value.dtype is not torch.int32:
        raise TypeError(f"{name}: expected int32, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {dimensions} = {shape}, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected on {device} like a.data, got {value.device}")


def bias_vector(bias: Tensor | None) -> Tensor | None:
    """``bias`` as the kernels read it, contiguous bfloat16 or float32: itself where it is, otherwise a copy."""
    if bias is None:
        return None
    return (bias.float() if bias.dtype is FLOAT16 else bias).contiguous()
