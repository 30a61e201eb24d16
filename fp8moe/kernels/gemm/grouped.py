"""Grouped FP8 GEMMs, one weight matrix per expert: ``grouped_gemm``, ``grouped_gemm_masked`` and their operators.

The operator ``fp8moe::grouped_gemm_swiglu`` is the first GEMM of an experts layer with its activation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm import checks, grouped_plan
from fp8moe.kernels.gemm.reference import grouped_gemm_reference, grouped_gemm_swiglu_reference
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor, align, ceil_div
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, check_own_memory, check_tensor
from fp8moe.runtime.operator import define


def grouped_gemm(
    a: FP8Tensor | tuple[Tensor, Tensor],
    b: FP8Tensor | tuple[Tensor, Tensor],
    group_offsets: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``dequantize(a)[rows of e] @ dequantize(b)[e].T`` for every expert e, whose rows lie one group after the other.

    a: activations, FP8Tensor or (data, scale): data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major as
        `quantize_1x128` writes it. M may be 0, K a multiple of 16.
    b: weights, FP8Tensor or (data, scale): data (E, N, K) float8_e4m3fn, scale (E, ceil(N/128), ceil(K/128)) float32,
        contiguous. N a multiple of 8.
    group_offsets: (E+1,) int32, on the device of the operands: expert e has rows ``group_offsets[e]`` up to
        ``group_offsets[e+1]``, any number of them, at any row. Both ends are clamped to [0, M], and a group whose end
        comes before its start is empty.
    out: (M, N) bfloat16 or float32, row-major with rows at multiples of 16 bytes, in memory that no operand uses.
    Returns ``out``, or a new (M, N) bfloat16 tensor. Rows of no group are never written: they keep what ``out`` held,
    and are uninitialized in a new tensor. Equal inputs give equal bits.

    On the CUDA backend the host neither knows nor waits for the group sizes, so that a call can be captured in a CUDA
    graph. Operands in another layout (weights that are not contiguous, rows or base address not at multiples of 16
    bytes, row-major activation scales) are copied first there. There is no backward: calling it raises RuntimeError.
    Method: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, or an ``out``
    that does not fit or overlaps an operand.
    """
    operands = (*fp8_operand("a", a), *fp8_operand("b", b))
    check_tensor("group_offsets", group_offsets)
    if out is None:
        return autograd.run(_grouped_gemm_op, "fp8moe.grouped_gemm", *operands, group_offsets)
    _check_out("fp8moe.grouped_gemm", out, (*operands, group_offsets), "group_offsets")
    _grouped_gemm_out_op(*operands, group_offsets, out)
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
) -> Tensor:
    """`grouped_gemm` with a result of `dtype`, bfloat16 or float32, inside of operators.

    whole: rows and groups of a GEMM of which this is a part, in whose order K is summed; None: this is all of it.
    others_zero: rows of no group are zeros, not uninitialized.
    low_rank: ranks (M, r) and factors (E, N, r) in bfloat16, r a multiple of 16: ``ranks[rows of e] @ factors[e].T`` is
        added to the sums in float32.
    """
    new = torch.zeros if others_zero else torch.empty
    out = new((a.data.shape[0], b.data.shape[1]), dtype=dtype, device=a.data.device)
    _grouped_gemm_out_op(*a, *b, group_offsets, out, whole, *(low_rank or ()))
    return out


def grouped_gemm_masked(
    a: FP8Tensor | tuple[Tensor, Tensor],
    b: FP8Tensor | tuple[Tensor, Tensor],
    masked_m: Tensor,
    *,
    expected_m: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``dequantize(a)[e, :masked_m[e]] @ dequantize(b)[e].T`` for every expert e: a fixed place for max_m rows each.

    a: activations, FP8Tensor or (data, scale): data (E, max_m, K) float8_e4m3fn, scale (E, max_m, ceil(K/128)) float32
        as `quantize_1x128` writes it, one MN-major buffer over all E * max_m rows. K a multiple of 16.
    b: weights, as for `grouped_gemm`: data (E, N, K), N a multiple of 8.
    masked_m: (E,) int32, on the device of the operands: the rows in use of each expert, clamped to [0, max_m].
    expected_m: about how many rows an expert has in use; only the speed depends on it.
    out: (E, max_m, N) bfloat16 or float32, with all its rows equally far apart, at multiples of 16 bytes, in memory
        that no operand uses.
    Returns ``out``, or a new (E, max_m, N) bfloat16 tensor. Rows not in use are never written, see `grouped_gemm`,
    which also says how operands in other layouts and gradients are treated.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, a negative
    ``expected_m``, or an ``out`` that does not fit or overlaps an operand.
    """
    operands = (*fp8_operand("a", a), *fp8_operand("b", b))
    check_tensor("masked_m", masked_m)
    checks.expected_rows(expected_m)
    if out is None:
        return autograd.run(_masked_op, "fp8moe.grouped_gemm_masked", *operands, masked_m, expected_m)
    _check_out("fp8moe.grouped_gemm_masked", out, (*operands, masked_m), "masked_m")
    _masked_out_op(*operands, masked_m, expected_m, out)
    return out


def grouped_gemm_swiglu(
    a: FP8Tensor,
    gate_up: FP8Tensor,
    groups: Tensor,
    *,
    activation: Activation,
    max_m: int | None = None,
    expected_m: int | None = None,
    whole: tuple[int, int] | None = None,
) -> FP8Tensor:
    """The gate and up projections of every expert's rows, `activation` in float32, and the result quantized 1x128.

    a: data (M, H) float8_e4m3fn, H a multiple of 16, with scale (M, ceil(H/128)) float32, MN-major.
    gate_up: data (E, 2I, H), gate rows then up rows, I a multiple of 16, with scale (E, 2 * ceil(I/128), ceil(H/128)):
        the blocks of the gate rows, then those of the up rows.
    groups: group_offsets (E+1,) int32, or with max_m, where M = E * max_m, masked_m (E,) int32.
    activation: a SwiGLU; ValueError for another.
    expected_m: with max_m, about how many rows a group has; only the speed depends on it. whole: without it, see
        `grouped_rows`.
    Returns data (M, I) and MN-major scale (M, ceil(I/128)); rows of no group are uninitialized.
    """
    if not activation.is_swiglu:
        raise ValueError(f"activation: expected a gated silu, got {activation}")
    limits = activation.limit, activation.alpha
    return FP8Tensor(*_swiglu_op(*a, *gate_up, groups, *limits, max_m, expected_m, whole))


def compute(
    a: FP8Tensor,
    b: FP8Tensor,
    groups: Tensor,
    out: Tensor,
    max_m: int | None = None,
    expected_m: int | None = None,
    whole: Sequence[int] | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the products of checked operands to ``out`` on the backend that takes them; all rows in two dimensions."""
    if out.numel() == 0 or b[0].shape[0] == 0:
        return
    if use_cuda(a[0]):
        a, b = checks.activations(*a), FP8Tensor(aligned(b[0]), b[1].contiguous())
        options = {"max_m": max_m, "expected_m": expected_m, "whole": whole and tuple(whole)}
        if low_rank is not None:
            low_rank = tuple(aligned(part.contiguous()) for part in low_rank)
        grouped_plan.grouped_gemm(a, b, groups.contiguous(), out, low_rank=low_rank, **options)
    else:
        grouped_gemm_reference(a, b, groups, out, max_m=max_m, low_rank=low_rank)


def _check_out(name: str, out: Tensor, operands: tuple[Tensor, ...], groups: str) -> None:
    check_tensor("out", out)
    autograd.check_out(name, (*_NAMES, groups, "out"), (*operands, out))


def _check_memory(out: Tensor, groups: str, *operands: Tensor) -> None:
    check_own_memory(out, dict(zip((*_NAMES, groups), operands, strict=True)))


def _grouped_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_offsets: Tensor) -> Tensor:
    out = _grouped_gemm_fake(a, a_scale, b, b_scale, group_offsets)
    compute(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), group_offsets, out)
    return out


def _grouped_gemm_fake(*operands: Tensor) -> Tensor:
    return torch.empty(checks.contiguous(*operands), dtype=torch.bfloat16, device=operands[0].device)


def _grouped_gemm_out(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    group_offsets: Tensor,
    out: Tensor,
    whole: Sequence[int] | None = None,
    ranks: Tensor | None = None,
    factors: Tensor | None = None,
) -> None:
    _grouped_gemm_out_fake(a, a_scale, b, b_scale, group_offsets, out, whole, ranks, factors)
    _check_memory(out, "group_offsets", a, a_scale, b, b_scale, group_offsets)
    low_rank = None if ranks is None else (ranks, factors)
    compute(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), group_offsets, out, whole=whole, low_rank=low_rank)


def _grouped_gemm_out_fake(*arguments: Tensor | Sequence[int] | None) -> None:
    *operands, out = arguments[:6]
    checks.result(out, checks.contiguous(*operands), operands[0].device)
    ranks, factors = arguments[7:] or (None, None)
    if ranks is not None or factors is not None:
        checks.low_rank(ranks, factors, operands[0], operands[2])


def _masked(*arguments: Tensor | int | None) -> Tensor:
    out = _masked_fake(*arguments)
    _compute_masked(*arguments, out)
    return out


def _masked_fake(*arguments: Tensor | int | None) -> Tensor:
    *operands, _ = arguments
    return torch.empty(checks.masked(*operands), dtype=torch.bfloat16, device=operands[0].device)


def _masked_out(*arguments: Tensor | int | None) -> None:
    *operands, _, out = arguments
    _masked_out_fake(*arguments)
    _check_memory(out, "masked_m", *operands)
    _compute_masked(*arguments)


def _masked_out_fake(*arguments: Tensor | int | None) -> None:
    *operands, _, out = arguments
    checks.result(out, checks.masked(*operands), operands[0].device)


def _compute_masked(*arguments: Tensor | int | None) -> None:
    a, a_scale, b, b_scale, masked_m, expected_m, out = arguments
    rows = out.view(-1, out.shape[-1]) if out.numel() else out
    compute(checks.activations(a, a_scale), FP8Tensor(b, b_scale), masked_m, rows, out.shape[1], expected_m)


def _swiglu(*arguments: Tensor | float | Sequence[int] | None) -> tuple[Tensor, Tensor]:
    a, a_scale, b, b_scale, groups, limit, alpha, max_m, expected_m, whole = arguments
    out, activation = FP8Tensor(*_swiglu_fake(*arguments)), Activation(limit, alpha)
    if not out.data.numel() or not b.shape[0]:
        return tuple(out)
    if use_cuda(a):
        operands = (checks.activations(a, a_scale), FP8Tensor(aligned(b), b_scale.contiguous()), groups.contiguous())
        options = {"max_m": max_m, "expected_m": expected_m, "whole": whole and tuple(whole)}
        grouped_plan.grouped_gemm_swiglu(*operands, out, activation, **options)
    else:
        operands = (FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), groups)
        grouped_gemm_swiglu_reference(*operands, activation, out, max_m=max_m)
    return tuple(out)


def _swiglu_fake(*arguments: Tensor | float | Sequence[int] | None) -> tuple[Tensor, Tensor]:
    *operands, _, _, max_m, _, _ = arguments
    a = operands[0]
    _, m, size = checks.swiglu(*operands, max_m)
    scale = a.new_empty_strided((m, ceil_div(size, 128)), (1, align(m, 4)), dtype=torch.float32)
    return a.new_empty((m, size), dtype=torch.float8_e4m3fn), scale


_NAMES = ("a.data", "a.scale", "b.data", "b.scale")
_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale"
_grouped_gemm_op = define(
    f"grouped_gemm({_OPERANDS}, Tensor group_offsets) -> Tensor", _grouped_gemm, _grouped_gemm_fake, forward_only=True
)
_grouped_gemm_out_op = define(
    f"grouped_gemm_out({_OPERANDS}, Tensor group_offsets, Tensor(a!) out, SymInt[]? whole=None, "
    "Tensor? ranks=None, Tensor? factors=None) -> ()",
    _grouped_gemm_out,
    _grouped_gemm_out_fake,
    forward_only=True,
)
_masked_op = define(
    f"grouped_gemm_masked({_OPERANDS}, Tensor masked_m, SymInt? expected_m) -> Tensor",
    _masked,
    _masked_fake,
    forward_only=True,
)
_masked_out_op = define(
    f"grouped_gemm_masked_out({_OPERANDS}, Tensor masked_m, SymInt? expected_m, Tensor(a!) out) -> ()",
    _masked_out,
    _masked_out_fake,
    forward_only=True,
)
_swiglu_op = define(
    f"grouped_gemm_swiglu({_OPERANDS}, Tensor groups, float? limit, float? alpha, SymInt? max_m, SymInt? expected_m, "
    "SymInt[]? whole) -> (Tensor, Tensor)",
    _swiglu,
    _swiglu_fake,
    forward_only=True,
)
