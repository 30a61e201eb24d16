"""Checks of the arguments of GEMMs, and conversions to the layouts that the kernels load."""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8moe.quant.arranged import ARRANGED, arrange, as_stored, projections_of
from fp8moe.quant.checks import check_scale, check_weight_scale, fp8_data, mn_major, weight_data
from fp8moe.quant.formats import (
    FP8Tensor,
    ceil_div,
    empty_mn_major,
    has_block_scales,
    has_channel_scales,
    is_packed,
    packed_format,
)
from fp8moe.runtime.checks import (
    FLOATING,
    aligned,
    check_device,
    check_dtype,
    check_like,
    check_own_memory,
    describe,
    row_major,
)

RESULTS = (torch.bfloat16, torch.float32)


def out_dtype(dtype: torch.dtype, out: Tensor | None) -> None:
    """Raise TypeError unless `dtype` is bfloat16 or float32, or if it is float32 and ``out`` has another dtype."""
    if dtype not in RESULTS:
        raise TypeError(f"out_dtype: expected torch.bfloat16 or torch.float32, got {dtype}")
    if out is not None and dtype is torch.float32 and out.dtype is not torch.float32:
        raise TypeError(f"out_dtype: {dtype} contradicts out, {describe(out)}")


def dense(a: FP8Tensor, b: FP8Tensor, bias: Tensor | None) -> tuple[int, int]:
    """Check dtypes, shapes and devices of the operands of ``gemm``. Returns M and N."""
    m, n = _operands(a, b, weights="(N, K)")
    if bias is not None:
        check_like("bias", bias, FLOATING, (n,), a.data.device, "a.data")
    return m, n


def contiguous(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor) -> tuple[int, int]:
    """Check dtypes, shapes and devices of the operands of ``grouped_gemm``. Returns M and N."""
    shape = rows_of_experts(a, b)
    _groups("group_offsets", group_offsets, (b.data.shape[0] + 1,), "(E + 1,)", a.data)
    return shape


def part(whole: tuple[int, int] | None, rows: int, groups: int) -> None:
    """Raise ValueError if a GEMM of `whole` = (rows, groups) cannot have a part of `rows` rows and `groups` groups."""
    if whole is not None and (whole[0] < rows or whole[1] < groups):
        raise ValueError(f"whole: expected at least the {rows} rows and {groups} groups that are a part, got {whole}")


def low_rank(ranks: Tensor | None, factors: Tensor | None, a: Tensor, b: Tensor) -> None:
    """Check dtypes, shapes and devices of ranks (M, r) and factors (E, N, r); their product is added to a @ b.T."""
    for name, value in (("ranks", ranks), ("factors", factors)):
        if value is None:
            raise ValueError(f"{name}: expected a tensor beside the other factor of the product, got None")
    m, (experts, n, k) = a.shape[0], b.shape
    rank = ranks.shape[-1]
    check_like("ranks", ranks, (torch.bfloat16,), (m, rank), a.device, "a.data")
    check_like("factors", factors, (torch.bfloat16,), (experts, n, rank), a.device, "a.data")
    if rank % 16 or not rank:
        raise ValueError(f"ranks: expected a multiple of 16 ranks (pad with zeros), got {rank}")
    if not k:
        raise ValueError("a.data: expected a K to which ranks are added, got K = 0")


def group_bias(bias: Tensor | None, a: Tensor, b: Tensor) -> None:
    """Check dtype, shape and device of a bias (E, N), or None."""
    if bias is None:
        return
    check_like("bias", bias, FLOATING, tuple(b.shape[:2]), a.device, "a.data")
    if not b.shape[2]:
        raise ValueError("a.data: expected a K to whose sums a bias is added, got K = 0")


def rows_of_experts(a: FP8Tensor, b: FP8Tensor) -> tuple[int, int]:
    """Check the activations ``a`` and weights ``b`` of a grouped GEMM. Returns M and N."""
    m, _, n = _operands(a, b)
    return m, n


def masked(a: FP8Tensor, b: FP8Tensor, masked_m: Tensor) -> tuple[int, int, int]:
    """Check dtypes, shapes and devices of the operands of ``grouped_gemm_masked``. Returns E, max_m and N."""
    experts, max_m, b_experts, n = _operands(a, b, rows="(E, max_m, K)")
    if b_experts != experts:
        expected = f"({experts}, N, K), as many experts as a.data {tuple(a.data.shape)} has"
        raise ValueError(f"b.data: expected shape {expected}, got {tuple(b.data.shape)}")
    _groups("masked_m", masked_m, (experts,), "(E,)", a.data)
    return experts, max_m, n


def swiglu(a: FP8Tensor, gate_up: FP8Tensor, groups: Tensor, max_m: int | None) -> None:
    """Check dtypes, shapes and devices of the operands of ``grouped_gemm_swiglu``."""
    m, experts, _ = _operands(a, gate_up, gated=True)
    count, dimensions = (experts + 1, "(E + 1,)") if max_m is None else (experts, "(E,)")
    _groups("groups", groups, (count,), dimensions, a.data)
    if max_m is not None and m != experts * max_m:
        raise ValueError(f"a.data: expected E * max_m = {experts} * {max_m} rows, got {m}")


def along_k(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor) -> tuple[int, int, int]:
    """Check dtypes, shapes and devices of the operands of ``grouped_gemm_k``. Returns E, M and N."""
    shape = matrices_along_k(a, b, blocks_of_b=True)
    if group_offsets.dim() != 1 or not group_offsets.shape[0]:
        raise ValueError(f"group_offsets: expected shape (E + 1,), got {tuple(group_offsets.shape)}")
    _groups("group_offsets", group_offsets, tuple(group_offsets.shape), "(E + 1,)", a.data)
    return group_offsets.shape[0] - 1, *shape


def matrices_along_k(a: FP8Tensor, b: FP8Tensor, *, blocks_of_b: bool = False) -> tuple[int, int]:
    """Check the operands ``a`` and ``b`` of ``grouped_gemm_k``. Returns M and N.

    blocks_of_b: whether ``b`` may have scales of 128x128 blocks.
    """
    m, k = fp8_data("a.data", a.data, "(M, K)")
    fp8_data("b.data", b.data, "(N, K)")  # not packed
    (n,) = _weights("b.data", b.data, "(N, K)", a.data, multiple=128)
    check_scale("a.scale", a.scale, (m, k // 128), a.data.device)
    of_blocks = blocks_of_b and b.scale.dim() == 2 and has_block_scales(*b)
    check_scale("b.scale", b.scale, (ceil_div(n, 128) if of_blocks else n, k // 128), a.data.device)
    return m, n


def expected_rows(expected_m: int | None) -> None:
    if expected_m is None:
        return
    if isinstance(expected_m, bool) or not isinstance(expected_m, int | torch.SymInt):
        raise TypeError(f"expected_m: expected an int or None, got {type(expected_m).__name__}")
    if expected_m < 0:
        raise ValueError(f"expected_m: expected a number of rows, got {expected_m}")


def result(out: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check dtype, shape, device and strides of a result (..., M, N) that the caller allocated."""
    check_like("out", out, RESULTS, shape, device, "a.data")
    # Ask for out.numel() last, and only if strides are wrong: in a compiled graph sizes may depend on data.
    *_, rows, columns = shape
    *lead, row, column = out.stride()
    if lead and shape[0] > 1 and lead[0] != rows * row and rows == 1:
        row = lead[0]  # experts have a single row each: the distance between rows is the stride between experts
    if (column != 1 or row < columns or row * out.itemsize % 16) and out.numel():
        expected = f"(..., s, 1) with s >= {columns} a multiple of {16 // out.itemsize} (16 bytes)"
        raise ValueError(f"out: expected row-major, strides {expected}, got {out.stride()}")
    if lead and shape[0] > 1 and lead[0] != rows * row and out.numel():
        expected = f"all rows of all experts equally far apart, strides ({rows * row}, {row}, 1)"
        raise ValueError(f"out: expected {expected}, got {out.stride()}")


def own_memory(out: Tensor, a: FP8Tensor, b: FP8Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless ``out`` starts at a multiple of 16 bytes and shares no memory with an operand."""
    named = {"a.data": a.data, "a.scale": a.scale, "b.data": b.data, "b.scale": b.scale}
    check_own_memory(out, named | others)


def activations(a: Tensor, a_scale: Tensor) -> FP8Tensor:
    """Return activations in the layout that the kernels load: views if possible, otherwise copies.

    a (..., K) becomes (rows, K) with rows at multiples of 16 bytes; a_scale (..., K blocks) becomes (rows, K blocks),
    MN-major.
    """
    if a.dim() == 2:
        return FP8Tensor(row_major(a), mn_major(a_scale))
    rows, k_blocks = a.shape[0] * a.shape[1], a_scale.shape[-1]
    if a_scale.numel() and a_scale.shape[0] > 1 and a_scale.stride(0) != a_scale.shape[1] * a_scale.stride(1):
        flat = empty_mn_major((rows, k_blocks), device=a.device)
        flat.view(a_scale.shape).copy_(a_scale)
        a_scale = flat
    return FP8Tensor(row_major(a.reshape(rows, a.shape[-1])), mn_major(a_scale.reshape(rows, k_blocks)))


def weights(b: Tensor, scale: Tensor, projections: int = 1, layout: Callable[[Tensor], Tensor] = aligned) -> FP8Tensor:
    """Return weights as kernels load them: MXFP4 and NVFP4 arranged, scales contiguous.

    Scales of channels and of four bits start at multiples of 16 bytes. projections: number of matrices stacked along N.
    layout: a function that returns data that kernels can load, itself or a copy.
    """
    if is_packed(b) and packed_format(scale) in ARRANGED and projections_of(b, scale) != projections:
        return FP8Tensor(*arrange(as_stored(b, scale), projections)[:2])
    if has_channel_scales(b, scale) or is_packed(b):
        return FP8Tensor(layout(b), aligned(scale))
    return FP8Tensor(layout(b), scale.contiguous())


def bias_vector(bias: Tensor | None) -> Tensor | None:
    """Return ``bias``, or a copy if it is float16, not contiguous or not at a multiple of 16 bytes."""
    if bias is None:
        return None
    return aligned(bias.float() if bias.dtype is torch.float16 else bias)


def _operands(
    a: FP8Tensor, b: FP8Tensor, *, rows: str = "(M, K)", weights: str = "(E, N, K)", gated: bool = False
) -> tuple[int, ...]:
    """Check activations ``a`` and weights ``b``. gated: b is a gate_up projection. Returns all sizes except K."""
    name = "gate_up" if gated else "b"
    *lead, k = fp8_data("a.data", a.data, rows)
    scale_shape = (*lead, ceil_div(k, 128))
    if a.scale.shape != scale_shape and _are_swapped(a, b):
        raise ValueError(
            f"a, {name}: expected activations and then weights, got a.scale {tuple(a.scale.shape)}, as weights "
            f"{tuple(a.data.shape)} have it, and {name}.scale {tuple(b.scale.shape)}, as activations "
            f"{tuple(b.data.shape)} have it; swap the two"
        )
    *experts, n = _weights(f"{name}.data", b.data, weights, a.data)
    if gated and n % 32:
        raise ValueError(f"gate_up.data: expected 2 * I rows an expert with I a multiple of 16, got {n}")
    check_scale("a.scale", a.scale, scale_shape, a.data.device)
    check_weight_scale(f"{name}.scale", b, a.data.device, projections=2 if gated else 1)
    return *lead, *experts, n


def _are_swapped(a: FP8Tensor, b: FP8Tensor) -> bool:
    """Return whether ``a`` and ``b`` seem swapped.

    They seem swapped if ``a`` has block or channel scales, as weights have, and ``b`` has 1x128 scales, as
    activations have.
    """
    if a.data.dim() != b.data.dim() or is_packed(b.data):
        return False
    *experts, n, k = a.data.shape
    *rows, b_k = b.data.shape
    of_weights = a.scale.shape == (*experts, ceil_div(n, 128), ceil_div(k, 128)) or has_channel_scales(*a)
    return of_weights and b.scale.shape == (*rows, ceil_div(b_k, 128))


def _weights(name: str, data: Tensor, dimensions: str, a: Tensor, multiple: int = 16) -> torch.Size:
    """Check weights (..., N, K). K must equal the K of ``a`` and be a multiple of `multiple`. Returns (..., N).

    K of packed weights must be a multiple of 32.
    """
    *lead, n, b_k = weight_data(name, data, dimensions)
    k = a.shape[-1]
    if b_k != k:
        expected = dimensions.replace("K", str(k // 2 if is_packed(data) else k))
        raise ValueError(f"{name}: expected shape {expected} to match the K = {k} of a.data, got {tuple(data.shape)}")
    if k % multiple:
        raise ValueError(f"a.data, {name}: K must be a multiple of {multiple} (pad both with zeros), got K = {k}")
    if n % 8:
        raise ValueError(f"{name}: N must be a multiple of 8 (pad with zero rows), got N = {n}")
    check_device(name, data, a.device, "a.data")
    return *lead, n


def _groups(name: str, value: Tensor, shape: tuple[int], dimensions: str, a: Tensor) -> None:
    check_dtype(name, value, torch.int32)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {dimensions} = {shape}, got {tuple(value.shape)}")
    check_device(name, value, a.device, "a.data")
