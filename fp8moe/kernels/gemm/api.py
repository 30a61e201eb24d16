"""Public functions and PyTorch operators for GEMMs of FP8 operands: dense, grouped by rows, and grouped along K."""

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, overload

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm import checks, launch, reference
from fp8moe.kernels.gemm.epilogue import AddLowRank, PeerStore, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.launch import GemmOperands
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.checks import fp8_operand, mn_major, weight_operand
from fp8moe.quant.formats import FP8Tensor, PackedTensor, empty_quantized
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, check_like, check_out, check_tensor, overlap, row_major
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.operator import Signature, Written, define, operator

Pair = FP8Tensor | tuple[Tensor, Tensor]
NAMES = ("a.data", "a.scale", "b.data", "b.scale")
_PLAIN = {dtype: PlainStore(dtype) for dtype in checks.RESULTS}


# ---- one weight matrix ----


def gemm(
    a: FP8Tensor | tuple[Tensor, Tensor],
    b: FP8Tensor | tuple[Tensor, Tensor] | PackedTensor,
    *,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return ``dequantize(a) @ dequantize(b).T + bias + c``; every 128 products along K are accumulated in float32.

    a: activations, FP8Tensor or (data, scale): data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major as
        `quantize_1x128` writes it. M may be 0; K must be a multiple of 16.
    b: weights, FP8Tensor or (data, scale): data (N, K) float8_e4m3fn, scale (ceil(N/128), ceil(K/128)) float32,
        contiguous. Or a PackedTensor; K must then be a multiple of 32 and of the group. N must be a multiple of 8.
    bias: (N,) bfloat16, float16 or float32, added in float32 before the result is rounded.
    c: (M, N) of the result's dtype, added like bias: ``out`` itself, or a tensor that shares no memory with it.
    out: (M, N) bfloat16 or float32, row-major with rows at multiples of 16 bytes, in memory that no operand but c uses.
    out_dtype: bfloat16 or float32, the result's dtype if ``out`` is None; otherwise ``out`` decides, and float32 with a
        bfloat16 ``out`` is an error.
    Returns ``out``, or a new (M, N) tensor. Equal inputs give bitwise equal results. MXFP4 weights give the bits of FP8
    weights with the same values and powers of two as scales; INT4 codes are multiplied as integers, and the sum over
    each group by its scale. A code of NVFP4 times its group's scale is rounded to E4M3, a relative error of 2.2e-2.

    Operands in another layout (transposed data, rows or base address not at multiples of 16 bytes, row-major activation
    scales) are copied first on the CUDA backend. Not differentiable: a backward through the result raises RuntimeError.
    Method: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, or an ``out``
    that does not fit or overlaps an operand.
    """
    a_data, a_scale = fp8_operand("a", a)
    b_data, b_scale = weight_operand("b", b)
    if bias is not None:
        check_tensor("bias", bias)
    if c is not None:
        check_tensor("c", c)
    if out is not None:
        check_tensor("out", out)
    checks.out_dtype(out_dtype, out)
    operands = (a_data, a_scale, b_data, b_scale, bias, c)
    if out is None:
        return autograd.run(_gemm_op, "fp8moe.gemm", *operands, out_dtype is torch.float32)
    autograd.check_out("fp8moe.gemm", (*NAMES, "bias", "c", "out"), (*operands, out))
    _gemm_out_op(*operands, out)
    return out


def multiply(operands: GemmOperands, out: Tensor, *, pdl: bool = False) -> None:
    """Compute `gemm` for checked operands, and write the result to ``out``.

    pdl: start before the previous kernel in the stream has ended; that kernel must not write b or bias.
    """
    if out.numel() == 0:
        return
    a, a_scale, b, b_scale, bias, c, _ = operands
    if use_cuda(a) and a.shape[1]:
        c = c if c is None else row_major(c)
        a, a_scale = row_major(a), mn_major(a_scale)
        loaded = checks.weights(b, b_scale, layout=row_major)
        operands = GemmOperands(a, a_scale, *loaded, checks.bias_vector(bias), c)
        launch.run(launch.dense(a.get_device(), operands, out.dtype, pdl), operands, out)
        return
    dtype = out.dtype if c is None else torch.float32
    sums = reference.gemm_reference(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), bias, dtype)
    out.copy_(sums if c is None else sums + c)


_DenseOperands = Annotated[GemmOperands, (*GemmOperands._fields[:4], "bias", "c")]


def product(operands: GemmOperands, float32: bool, *, pdl: bool = False) -> Tensor:
    """Compute `gemm`. Operands are checked unless operands in equal layouts have been checked before.

    float32: return float32 instead of bfloat16. pdl: see `multiply`.
    """
    found = launch.find(launch.dense, operands, torch.float32 if float32 else torch.bfloat16, pdl)
    if found is not None:
        return launch.run_new(found, operands)
    out = empty_product(operands, float32)
    multiply(operands, out, pdl=pdl)
    return out


def empty_product(operands: _DenseOperands, float32: bool) -> Tensor:
    """Check the operands of `gemm`, and return an uninitialized tensor with the shape and dtype of the result."""
    dtype = torch.float32 if float32 else torch.bfloat16
    return operands.a.new_empty(_shape(operands, dtype), dtype=dtype)


def _shape(operands: GemmOperands, dtype: torch.dtype) -> tuple[int, int]:
    """Check dtypes, shapes and devices of the operands of `gemm`. Returns the shape (M, N) of the result."""
    a, a_scale, b, b_scale, bias, c, _ = operands
    shape = checks.dense(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), bias)
    if c is not None:
        check_like("c", c, (dtype,), shape, a.device, "a.data")
    return shape


def _gemm_out(operands: _DenseOperands, out: Written) -> None:
    found = launch.find(launch.dense, operands, out.dtype, False)
    a, a_scale, b, b_scale, bias, c, _ = operands
    checks.result(out, _shape(operands, out.dtype) if found is None else found.shape, a.device)
    checks.own_memory(out, FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), bias=bias)
    if c is not None and (c.data_ptr(), c.stride()) != (out.data_ptr(), out.stride()) and overlap(c, out):
        raise ValueError("c: expected out itself or memory of its own, got a tensor that overlaps a part of out")
    if found is None:
        multiply(operands, out)
    else:
        launch.run(found, operands, out)


def _gemm_out_fake(operands: GemmOperands, out: Tensor) -> None:
    checks.result(out, _shape(operands, out.dtype), operands.a.device)


# The operator takes the result's dtype as a bool, because PyTorch needs a microsecond to convert a ScalarType.
_gemm_op = define("gemm -> Tensor", product, empty_product, forward_only=True, signature=Signature(empty_product))
_gemm_out_op = define("gemm_out -> ()", _gemm_out, _gemm_out_fake, forward_only=True)


# ---- one weight matrix per group of rows ----


def grouped_gemm(
    a: FP8Tensor | tuple[Tensor, Tensor],
    b: FP8Tensor | tuple[Tensor, Tensor] | PackedTensor,
    group_offsets: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``dequantize(a)[rows of e] @ dequantize(b)[e].T`` for every expert e, whose rows are contiguous in ``a``.

    a: activations, FP8Tensor or (data, scale): data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major as
        `quantize_1x128` writes it. M may be 0; K must be a multiple of 16.
    b: weights, FP8Tensor or (data, scale): data (E, N, K) float8_e4m3fn, scale (E, ceil(N/128), ceil(K/128)) float32,
        contiguous; or a PackedTensor, see `gemm`. N must be a multiple of 8.
    group_offsets: (E+1,) int32, on the device of the operands: expert e has the rows
        ``group_offsets[e]:group_offsets[e+1]``. A group may have any size and begin at any row. Both ends are clamped
        to [0, M]; a group whose end is before its start is empty.
    out: (M, N) bfloat16 or float32, row-major with rows at multiples of 16 bytes, in memory that no operand uses.
    Returns ``out``, or a new (M, N) bfloat16 tensor. Rows outside all groups are never written: they keep the values
    of ``out``, and are uninitialized in a new tensor. Equal inputs give bitwise equal results.

    On the CUDA backend the host does not read or wait for the group sizes, so a call can be captured in a CUDA graph;
    operands in another layout (weights that are not contiguous, rows or base address not at multiples of 16 bytes,
    row-major activation scales) are copied first. Not differentiable: a backward through the result raises
    RuntimeError. Method: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, or an ``out``
    that does not fit or overlaps an operand.
    """
    operands = (*fp8_operand("a", a), *weight_operand("b", b))
    check_tensor("group_offsets", group_offsets)
    if out is None:
        return autograd.run(_grouped_gemm_op, "fp8moe.grouped_gemm", *operands, group_offsets)
    _check_grouped_out("fp8moe.grouped_gemm", out, (*operands, group_offsets), "group_offsets")
    _grouped_gemm_out_op(*operands, group_offsets, out, None, None, None, None)
    return out


def grouped_rows(
    a: FP8Tensor,
    b: FP8Tensor,
    group_offsets: Tensor,
    dtype: torch.dtype,
    *,
    whole: tuple[int, int] | None = None,
    others_zero: bool = False,
    low_rank: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_gemm` within another operator. Returns (M, N) in `dtype`, bfloat16 or float32.

    whole: (rows, groups) of the whole GEMM if this is a part of it; K is then summed in the order of the whole GEMM.
    others_zero: set rows outside all groups to zero instead of leaving them uninitialized.
    low_rank: (ranks, factors), bfloat16 (M, r) and (E, N, r), r a multiple of 16: ``ranks[rows of e] @ factors[e].T``
        is added to the sums in float32.
    bias: (E, N) bfloat16, float16 or float32, added to the sums of each group in float32.
    """
    new = torch.zeros if others_zero else torch.empty
    out = new((a.data.shape[0], b.data.shape[1]), dtype=dtype, device=a.data.device)
    _grouped_gemm_out_op(*a, *b, group_offsets, out, whole, *(low_rank or (None, None)), bias)
    return out


def grouped_gemm_masked(
    a: FP8Tensor | tuple[Tensor, Tensor],
    b: FP8Tensor | tuple[Tensor, Tensor] | PackedTensor,
    masked_m: Tensor,
    *,
    expected_m: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``dequantize(a)[e, :masked_m[e]] @ dequantize(b)[e].T`` for every expert e; each has room for max_m rows.

    a: activations, FP8Tensor or (data, scale): data (E, max_m, K) float8_e4m3fn, scale (E, max_m, ceil(K/128)) float32
        as `quantize_1x128` writes it, one MN-major buffer over all E * max_m rows. K must be a multiple of 16.
    b: weights, as for `grouped_gemm`: data (E, N, K), N a multiple of 8.
    masked_m: (E,) int32, on the device of the operands: the number of rows in use per expert, clamped to [0, max_m].
    expected_m: the expected number of rows in use per expert; affects the speed only.
    out: (E, max_m, N) bfloat16 or float32, in memory that no operand uses. All rows of all experts have one stride, a
        multiple of 16 bytes.
    Returns ``out``, or a new (E, max_m, N) bfloat16 tensor. Rows not in use are never written. As in `grouped_gemm`,
    operands in other layouts are copied, and a backward through the result raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, a negative
    ``expected_m``, or an ``out`` that does not fit or overlaps an operand.
    """
    operands = (*fp8_operand("a", a), *weight_operand("b", b))
    check_tensor("masked_m", masked_m)
    checks.expected_rows(expected_m)
    if out is None:
        return autograd.run(_masked_op, "fp8moe.grouped_gemm_masked", *operands, masked_m, expected_m)
    _check_grouped_out("fp8moe.grouped_gemm_masked", out, (*operands, masked_m), "masked_m")
    _masked_out_op(*operands, masked_m, expected_m, out)
    return out


def grouped_gemm_swiglu(
    a: FP8Tensor,
    gate_up: FP8Tensor,
    groups: Tensor,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    max_m: int | None = None,
    expected_m: int | None = None,
    whole: tuple[int, int] | None = None,
) -> FP8Tensor:
    """Project every expert's rows to gate and up, apply `activation` in float32, and quantize the result 1x128.

    a: data (M, H) float8_e4m3fn, H a multiple of 16, with scale (M, ceil(H/128)) float32, MN-major.
    gate_up: data (E, 2I, H), gate rows then up rows, I a multiple of 16, with scale (E, 2 * ceil(I/128), ceil(H/128)):
        the scales of the gate rows' blocks, then of the up rows' blocks.
    groups: int32. If max_m is None, group_offsets (E+1,). If max_m is given, masked_m (E,), and M is E * max_m.
    activation: a SwiGLU variant. Any other activation raises ValueError.
    bias: (E, 2I) bfloat16, float16 or float32, added to the sums of gate and up.
    expected_m: with max_m, the expected number of rows per group; affects the speed only.
    whole: only without max_m; see `grouped_rows`.
    Returns data (M, I) and MN-major scale (M, ceil(I/128)); rows outside all groups are uninitialized.
    """
    limits = _limits(activation)
    return FP8Tensor(*_swiglu_op(*a, *gate_up, groups, *limits, bias, max_m, expected_m, whole))


def grouped_gemm_swiglu_keeping(
    a: FP8Tensor, gate_up: FP8Tensor, groups: Tensor, *, activation: Activation, whole: tuple[int, int] | None = None
) -> tuple[FP8Tensor, Tensor]:
    """Compute `grouped_gemm_swiglu` for training: also return gate and up (M, 2I) in bfloat16.

    The activation is computed from gate and up as returned, and rounded to bfloat16 before it is quantized. Rows
    outside all groups are uninitialized. groups: group_offsets (E+1,). Other arguments: as for `grouped_gemm_swiglu`.
    """
    limits = _limits(activation)
    data, scale, projected = _swiglu_keeping_op(*a, *gate_up, groups, *limits, None, None, None, whole)
    return FP8Tensor(data, scale), projected


def _limits(activation: Activation) -> tuple[float | None, float | None]:
    if not activation.is_swiglu:
        raise ValueError(f"activation: expected a gated silu, got {activation}")
    return activation.limit, activation.alpha


def multiply_groups(
    a: FP8Tensor,
    b: FP8Tensor,
    groups: Tensor,
    out: Tensor,
    grouping: Grouping = Grouping(),  # noqa: B008 (immutable)
    low_rank: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> None:
    """Compute a grouped GEMM of checked operands into ``out``: (M, N), or (E * max_m, N) in the masked layout."""
    if out.numel() == 0 or b.data.shape[0] == 0:
        return
    masked = a.data.shape[:2] if a.data.dim() == 3 else None
    if masked or use_cuda(a.data):
        a = checks.activations(*a)
    if not use_cuda(a.data):
        reference.grouped_gemm_reference(a, b, groups, out, max_m=grouping.max_m, low_rank=low_rank, bias=bias)
        return
    groups = groups.contiguous()
    if a.data.shape[1] == 0:
        _zero_groups(groups, out, grouping.max_m)
        return
    epilogue, more = PlainStore(out.dtype), ()
    if low_rank is not None:
        ranks, factors = (aligned(part.contiguous()) for part in low_rank)
        epilogue, more = AddLowRank(out.dtype, rank=ranks.shape[1]), (ranks.data_ptr(), factors.data_ptr())
    if masked:  # make the operands 3-D again, so that `_masked` finds this launcher in later calls
        a = FP8Tensor(*(part.unflatten(0, masked) for part in a))
    operands = GemmOperands(*a, *checks.weights(*b), checks.bias_vector(bias), groups=groups)
    like = None if out.is_contiguous() else out
    launch.run(launch.grouped(a.data.get_device(), operands, epilogue, grouping, like), operands, out, *more)


def multiply_groups_to(
    a: FP8Tensor,
    b: FP8Tensor,
    groups: Tensor,
    pointers: tuple[int, ...],
    epilogue: PeerStore,
    grouping: Grouping,
    bias: Tensor | None = None,
) -> None:
    """Compute a grouped GEMM, and write its rows to the memory of peer GPUs. CUDA backend only.

    a: 2-D. b: contiguous. pointers: values of the epilogue's address fields.
    """
    b, bias = checks.weights(*b), checks.bias_vector(bias)
    operands = GemmOperands(*a, *b, bias, groups=groups)
    index = a.data.get_device()
    found = launch.grouped(index, operands, epilogue, grouping)
    with device_guard(index):
        found.launch(
            current_stream(index),
            (a.data.data_ptr(), a.scale.data_ptr(), b.data.data_ptr()),
            (b.scale.data_ptr(), 0 if bias is None else bias.data_ptr(), *pointers),
            groups.data_ptr(),
        )


def _zero_groups(groups: Tensor, out: Tensor, max_m: int | None) -> None:
    """Set the rows of all groups in ``out`` to zero, the result for K = 0, without reading the groups on the host."""
    rows = torch.arange(out.shape[0], device=out.device)
    if max_m is None:
        starts, ends = groups.unbind(1) if groups.dim() == 2 else (groups[:-1], groups[1:])
        starts, ends = starts.clamp(0, len(rows)), ends.clamp(0, len(rows))
        inside = ((rows[:, None] >= starts) & (rows[:, None] < ends)).any(1)
    else:
        inside = rows % max_m < groups.clamp(0, max_m)[rows // max_m]
    out.masked_fill_(inside[:, None], 0)


def _check_grouped_out(name: str, out: Tensor, operands: tuple[Tensor, ...], groups: str) -> None:
    check_tensor("out", out)
    autograd.check_out(name, (*NAMES, groups, "out"), (*operands, out))


def _grouped_gemm(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor) -> Tensor:
    operands = GemmOperands(*a, *b, groups=group_offsets)
    found = launch.find(launch.grouped, operands, _PLAIN[torch.bfloat16], Grouping(), None)
    if found is not None:
        return launch.run_new(found, operands)
    out = _grouped_gemm_fake(a, b, group_offsets)
    multiply_groups(a, b, group_offsets, out)
    return out


def _grouped_gemm_fake(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor) -> Tensor:
    return a.data.new_empty(checks.contiguous(a, b, group_offsets), dtype=torch.bfloat16)


class _GroupedOutOperands(NamedTuple):
    a: FP8Tensor
    b: FP8Tensor
    group_offsets: Tensor
    out: Written
    whole: tuple[int, int] | None
    ranks: Tensor | None
    factors: Tensor | None
    bias: Tensor | None


def _grouped_gemm_out(call: _GroupedOutOperands) -> None:
    a, b, group_offsets, out, whole, ranks, factors, bias = call
    operands, grouping, found = GemmOperands(*a, *b, bias, groups=group_offsets), Grouping(whole=whole), None
    if ranks is None and factors is None and out.is_contiguous() and out.dtype in _PLAIN:
        found = launch.find(launch.grouped, operands, _PLAIN[out.dtype], grouping, None)
    if found is None:
        _grouped_gemm_out_fake(call)
    else:
        checks.result(out, found.shape, a.data.device)
    checks.own_memory(out, a, b, group_offsets=group_offsets, bias=bias)
    if found is None:
        multiply_groups(a, b, group_offsets, out, grouping, None if ranks is None else (ranks, factors), bias)
    else:
        launch.run(found, operands, out)


def _grouped_gemm_out_fake(call: _GroupedOutOperands) -> None:
    checks.result(call.out, checks.contiguous(call.a, call.b, call.group_offsets), call.a.data.device)
    checks.part(call.whole, call.a.data.shape[0], call.b.data.shape[0])
    checks.group_bias(call.bias, call.a.data, call.b.data)
    if call.ranks is not None or call.factors is not None:
        checks.low_rank(call.ranks, call.factors, call.a.data, call.b.data)


def _masked(a: FP8Tensor, b: FP8Tensor, masked_m: Tensor, expected_m: int | None) -> Tensor:
    if a.data.dim() == 3:
        operands, grouping = GemmOperands(*a, *b, groups=masked_m), Grouping(expected_m, a.data.shape[1])
        found = launch.find(launch.grouped, operands, _PLAIN[torch.bfloat16], grouping, None)
        if found is not None:
            return launch.run_new(found, operands).unflatten(0, a.data.shape[:2])
    out = _masked_fake(a, b, masked_m, expected_m)
    _multiply_masked(a, b, masked_m, expected_m, out)
    return out


def _masked_fake(a: FP8Tensor, b: FP8Tensor, masked_m: Tensor, expected_m: int | None) -> Tensor:
    return a.data.new_empty(checks.masked(a, b, masked_m), dtype=torch.bfloat16)


def _masked_out(a: FP8Tensor, b: FP8Tensor, masked_m: Tensor, expected_m: int | None, out: Written) -> None:
    _masked_out_fake(a, b, masked_m, expected_m, out)
    checks.own_memory(out, a, b, masked_m=masked_m)
    _multiply_masked(a, b, masked_m, expected_m, out)


def _masked_out_fake(a: FP8Tensor, b: FP8Tensor, masked_m: Tensor, expected_m: int | None, out: Tensor) -> None:
    checks.result(out, checks.masked(a, b, masked_m), a.data.device)


def _multiply_masked(a: FP8Tensor, b: FP8Tensor, masked_m: Tensor, expected_m: int | None, out: Tensor) -> None:
    rows = out.view(-1, out.shape[-1]) if out.numel() else out
    multiply_groups(a, b, masked_m, rows, Grouping(expected_m, max_m=out.shape[1]))


class _SwigluOperands(NamedTuple):
    a: FP8Tensor
    b: FP8Tensor
    groups: Tensor
    limit: float | None
    alpha: float | None
    bias: Tensor | None
    max_m: int | None
    expected_m: int | None
    whole: tuple[int, int] | None


def _check_swiglu(call: _SwigluOperands) -> None:
    checks.swiglu(call.a, call.b, call.groups, call.max_m)
    checks.part(call.whole, call.a.data.shape[0], call.b.data.shape[0])
    checks.group_bias(call.bias, call.a.data, call.b.data)


def _swiglu_cuda(call: _SwigluOperands, projected: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `grouped_gemm_swiglu`; with `projected`, keep gate and up there: `grouped_gemm_swiglu_keeping`."""
    a, b, groups, limit, alpha, bias, max_m, expected_m, whole = call
    data, scale = _empty_swiglu(call)
    kept = (0, 0) if projected is None else (projected.data_ptr(), projected.stride(0))
    if data.numel() and b.data.shape[0]:
        rows = checks.activations(*a)
        bias, groups = checks.bias_vector(bias), groups.contiguous()
        operands = GemmOperands(*rows, *checks.weights(*b, 2), bias, groups=groups)
        epilogue = SwigluQuantize(Activation(limit, alpha), projected is not None)
        grouping = Grouping(expected_m, max_m, whole)
        found = launch.grouped(a.data.get_device(), operands, epilogue, grouping)
        launch.run(found, operands, data, scale.data_ptr(), scale.stride(1), *kept)
    return data, scale


def _swiglu_reference(call: _SwigluOperands, projected: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, activation = _empty_swiglu(call), Activation(call.limit, call.alpha)
    if out.data.numel() and call.b.data.shape[0]:
        options = {"max_m": call.max_m, "bias": call.bias, "projected": projected}
        reference.grouped_gemm_swiglu_reference(call.a, call.b, call.groups, activation, out, **options)
    return out


def _empty_swiglu(call: _SwigluOperands) -> FP8Tensor:
    return empty_quantized(call.a.data, call.a.data.shape[0], call.b.data.shape[1] // 2)


def _keeping(compute: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[_SwigluOperands], tuple[Tensor, ...]]:
    def call(operands: _SwigluOperands) -> tuple[Tensor, ...]:
        projected = _empty_projected(operands)
        return *compute(operands, projected), projected

    return call


def _empty_projected(call: _SwigluOperands) -> Tensor:
    return call.a.data.new_empty(call.a.data.shape[0], call.b.data.shape[1], dtype=torch.bfloat16)


_grouped_gemm_op = define("grouped_gemm -> Tensor", _grouped_gemm, _grouped_gemm_fake, forward_only=True)
_grouped_gemm_out_op = define("grouped_gemm_out -> ()", _grouped_gemm_out, _grouped_gemm_out_fake, forward_only=True)
_masked_op = define("grouped_gemm_masked -> Tensor", _masked, _masked_fake, forward_only=True)
_masked_out_op = define("grouped_gemm_masked_out -> ()", _masked_out, _masked_out_fake, forward_only=True)
_swiglu_op = operator(
    "grouped_gemm_swiglu -> (Tensor, Tensor)",
    check=_check_swiglu,
    cuda=_swiglu_cuda,
    reference=_swiglu_reference,
    fake=_empty_swiglu,
    forward_only=True,
)
_swiglu_keeping_op = operator(
    "grouped_gemm_swiglu_keeping -> (Tensor, Tensor, Tensor)",
    check=_check_swiglu,
    cuda=_keeping(_swiglu_cuda),
    reference=_keeping(_swiglu_reference),
    fake=_keeping(lambda call, projected: _empty_swiglu(call)),
    forward_only=True,
)


# ---- groups along K ----


@overload
def grouped_gemm_k(
    a: Pair, b: Pair, group_offsets: Tensor, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor: ...


@overload
def grouped_gemm_k(
    a: Pair, b: Pair, group_offsets: Tensor, *, out: Sequence[Tensor], accumulate: bool = False
) -> tuple[Tensor, ...]: ...


def grouped_gemm_k(
    a: Pair, b: Pair, group_offsets: Tensor, *, out: Tensor | Sequence[Tensor] | None = None, accumulate: bool = False
) -> Tensor | tuple[Tensor, ...]:
    """Return ``dequantize(a)[:, columns of e] @ dequantize(b)[:, columns of e].T`` for every group e of columns.

    For a weight gradient, a is the transposed gradient of the layer's output and b the layer's transposed input, so
    that columns are tokens.

    a: FP8Tensor or (data, scale): data (M, K) float8_e4m3fn, scale (M, K/128) float32, MN-major as `quantize_128x1`
        writes it. K, the columns of all groups together, must be a multiple of 128.
    b: FP8Tensor or (data, scale): data (N, K), scale (N, K/128), as for a; or (ceil(N/128), K/128), MN-major, one for
        each block of 128x128, which is faster. N must be a multiple of 8.
    group_offsets: (E+1,) int32, on the device of the operands: group e has the columns
        ``group_offsets[e]:group_offsets[e+1]``. Offsets must be multiples of 128 (pad each group with zeros), and are
        clamped to [0, K].
    out: (E, M, N) float32 or bfloat16 (sums are rounded once), contiguous, in memory that no operand uses. Or a
        sequence of tensors (E, M_i, N) for consecutive rows of ``a``, such as gate and up.
    accumulate: add to ``out``, which must be float32; the matrix of a group without columns is left as it is.
    Returns ``out`` (a sequence as a tuple), or a new (E, M, N) float32 tensor. Without accumulate, groups without
    columns give zeros. Equal inputs give bitwise equal results.

    On the CUDA backend the host does not read or wait for the group sizes, so a call can be captured in a CUDA graph.
    A group that does not begin and end at multiples of 128 gives NaN on the CUDA backend, ValueError on the reference
    backend. Operands in another layout are copied first. Not differentiable: a backward through the result raises
    RuntimeError.
    Method: DeepSeek-V3, arXiv:2412.19437, section 3.3.2, with one scale per row and 128 columns of a.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, ``accumulate``
    without ``out``, or an ``out`` that does not fit or overlaps an operand.
    """
    operands = (*fp8_operand("a", a), *fp8_operand("b", b))
    check_tensor("group_offsets", group_offsets)
    if out is None:
        if accumulate:
            raise ValueError("accumulate: expected out, the sums to add to, got None")
        return autograd.run(_along_k_op, "fp8moe.grouped_gemm_k", *operands, group_offsets)
    if not isinstance(out, Tensor) and isinstance(out, Sequence):
        parts = _rows_of_outs(FP8Tensor(*operands[:2]), out)
        for part, target in zip(parts, out, strict=True):
            _along_k_out_fake(part, FP8Tensor(*operands[2:]), group_offsets, target, accumulate)
        for part, target in zip(parts, out, strict=True):
            grouped_gemm_k(part, b, group_offsets, out=target, accumulate=accumulate)
        return tuple(out)
    check_tensor("out", out)
    autograd.check_out("fp8moe.grouped_gemm_k", (*NAMES, "group_offsets", "out"), (*operands, group_offsets, out))
    _along_k_out_op(*operands, group_offsets, out, accumulate)
    return out


def _rows_of_outs(a: FP8Tensor, outs: Sequence[Tensor]) -> list[FP8Tensor]:
    """Split the operand ``a`` (M, K) by rows into parts (M_i, K), one for each result (E, M_i, N)."""
    for target in outs:
        check_tensor("out", target)
    sizes = [target.shape[1] if target.dim() == 3 else -1 for target in outs]
    if a.data.dim() != 2 or a.scale.dim() != 2 or min(sizes, default=-1) < 0 or sum(sizes) != len(a.data):
        shapes = [tuple(target.shape) for target in outs]
        raise ValueError(f"out: expected (E, M_i, N) with the rows of a {tuple(a.data.shape)} together, got {shapes}")
    return [FP8Tensor(*part) for part in zip(a.data.split(sizes), a.scale.split(sizes), strict=True)]


def weight_gradient(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, master: Tensor, projections: int = 1) -> Tensor:
    """Compute the gradient of a master weight, rounded once from float32 to its dtype.

    a, b, group_offsets: as for `grouped_gemm_k`, (P * N', K) and (H', K).
    master: (E, P * N, H), or (N, H) for one group, P being `projections`. N' and H' are N and H with padding.
    Returns a tensor like the master. If the master has an attribute ``grad_sum``, a float32 tensor of its shape, the
    gradient is added to that, in every backward of the call, also in one that asks only for other gradients; the result
    has no values.
    """
    total = getattr(master, "grad_sum", None)
    rows, width = master.shape[-2:]
    sizes = group_offsets.shape[0] - 1, a.data.shape[0], b.data.shape[0]
    whole = sizes[1:] == (rows, width)
    if total is not None and whole and total.is_contiguous() and total.data_ptr() % 16 == 0:
        grouped_gemm_k(a, b, group_offsets, out=total.view(sizes), accumulate=True)
        return master.new_empty(()).expand(master.shape)
    dtype = torch.bfloat16 if total is None and master.dtype is torch.bfloat16 else torch.float32
    out = grouped_gemm_k(a, b, group_offsets, out=torch.empty(sizes, dtype=dtype, device=a.data.device))
    if not whole:
        out = out.unflatten(1, (projections, -1))[:, :, : rows // projections, :width].flatten(1, 2).contiguous()
    out = out.view(master.shape)
    if total is None:
        return out.to(master.dtype)
    total.add_(out)
    return master.new_empty(()).expand(master.shape)


def _multiply_along_k(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Tensor, accumulate: bool) -> None:
    if not use_cuda(a.data):
        reference.grouped_gemm_k_reference(a, b, group_offsets, out, accumulate)
    elif out.numel() and a.data.shape[1]:
        a, b = (FP8Tensor(row_major(data), mn_major(scale, of_more_rows=True)) for data, scale in (a, b))
        launch.run_along_k(a, b, group_offsets.contiguous(), out, accumulate)
    elif not accumulate:
        out.zero_()


def _along_k(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor) -> Tensor:
    out = _along_k_fake(a, b, group_offsets)
    _multiply_along_k(a, b, group_offsets, out, False)
    return out


def _along_k_fake(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor) -> Tensor:
    return a.data.new_empty(checks.along_k(a, b, group_offsets), dtype=torch.float32)


def _along_k_out(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Written, accumulate: bool) -> None:
    _along_k_out_fake(a, b, group_offsets, out, accumulate)
    checks.own_memory(out, a, b, group_offsets=group_offsets)
    _multiply_along_k(a, b, group_offsets, out, accumulate)


def _along_k_out_fake(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Tensor, accumulate: bool) -> None:
    dtypes = (torch.float32,) if accumulate else (torch.float32, torch.bfloat16)
    check_out(out, dtypes, checks.along_k(a, b, group_offsets), a.data.device, "a.data")


_along_k_op = define("grouped_gemm_k -> Tensor", _along_k, _along_k_fake, forward_only=True)
_along_k_out_op = define("grouped_gemm_k_out -> ()", _along_k_out, _along_k_out_fake, forward_only=True)
