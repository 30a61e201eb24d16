"""DeepGEMM's bfloat16 and cuBLASLt GEMMs, computed by PyTorch, for programs that use them beside the FP8 GEMMs."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from deep_gemm.gemm import check_addend
from deep_gemm.settings import get_mk_alignment_for_contiguous_layout
from fp8moe.kernels.gemm.checks import RESULTS
from fp8moe.quant.checks import check_vector
from fp8moe.runtime import config
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.checks import check_dtype, check_like, check_tensor
from fp8moe.runtime.fixed_rows import by_fixed_rows

__all__ = [
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "cublaslt_gemm_nn",
    "cublaslt_gemm_nt",
    "cublaslt_gemm_tn",
    "cublaslt_gemm_tt",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
]

_FP8 = torch.float8_e4m3fn


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """Write ``c + a @ b.T``, or ``a @ b.T`` without c, to d.

    a: (M, K) bfloat16. b: (N, K) bfloat16. d: (M, N) bfloat16 or float32. c: like d. Any strides. compiled_dims: no
    effect. After `use_deterministic_algorithms(True)` the bits of a row do not depend on other rows.
    """
    _dense(_matrix("a", a, 2), _matrix("b", b, 2), d, c)


def bf16_gemm_nn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """Compute `bf16_gemm_nt` with b (K, N)."""
    bf16_gemm_nt(a, b.mT, d, c)


def bf16_gemm_tn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "mn") -> None:
    """Compute `bf16_gemm_nt` with a (K, M) and b (K, N)."""
    bf16_gemm_nt(a.mT, b.mT, d, c)


def bf16_gemm_tt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "mn") -> None:
    """Compute `bf16_gemm_nt` with a (K, M)."""
    bf16_gemm_nt(a.mT, b, d, c)


def cublaslt_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """Compute `bf16_gemm_nt`, which PyTorch runs on cuBLASLt; a and b may also be float8_e4m3fn, without scales.

    FP8 operands must be K-major, with K and N multiples of 16.
    """
    if not isinstance(a, Tensor) or a.dtype is not _FP8:
        bf16_gemm_nt(a, b, d, c)
        return
    a, b = _matrix("a", a, 2, _FP8), _matrix("b", b, 2, _FP8)
    (n, k), rows = b.shape, (a.stride(1), b.stride(1))
    if n % 16 or k % 16:
        raise ValueError(f"b: expected N and K that are multiples of 16 of FP8 operands, got shape {(n, k)}")
    if k > 1 and rows != (1, 1):
        raise NotImplementedError(f"a, b: expected K-major data, all that Hopper multiplies in FP8, got strides {rows}")
    _dense(a, b, d, c)


def cublaslt_gemm_nn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """Compute `cublaslt_gemm_nt` with b (K, N)."""
    cublaslt_gemm_nt(a, b.mT, d, c)


def cublaslt_gemm_tn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "mn") -> None:
    """Compute `cublaslt_gemm_nt` with a (K, M) and b (K, N)."""
    cublaslt_gemm_nt(a.mT, b.mT, d, c)


def cublaslt_gemm_tt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "mn") -> None:
    """Compute `cublaslt_gemm_nt` with a (K, M)."""
    cublaslt_gemm_nt(a.mT, b, d, c)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
    ensure_zero_padding: bool = False,
) -> None:
    """Write ``a[i] @ b[group of i].T`` to d[i] for every row i that has a group; other rows of d are left alone.

    a: (M, K) bfloat16. b: (E, N, K) bfloat16. d: (M, N) bfloat16 or float32; results are rounded to bfloat16 in either
    case. grouped_layout: as for `m_grouped_fp8_gemm_nt_contiguous`, but the rows of a group need not be adjacent.
    ensure_zero_padding: set rows of d without a group to zero.
    """
    a, b = _matrix("a", a, 2), _matrix("b", b, 3)
    check_tensor("grouped_layout", grouped_layout)
    _check_product(d, (a.shape[0], b.shape[1]), a, b)
    groups = _group_of_rows(grouped_layout, a.shape[0], b.shape[0], use_psum_layout)
    # Sort rows by group; rows without a group come last.
    key, order = groups.sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(b.shape[0], device=a.device), right=True)
    product = grouped_mm(a[order], b.mT, offs=ends.int()).to(d.dtype)
    d[order] = torch.where((key < b.shape[0])[:, None], product, 0 if ensure_zero_padding else d[order])


def m_grouped_bf16_gemm_nn_contiguous(
    a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor, *args, **options
) -> None:
    """Compute `m_grouped_bf16_gemm_nt_contiguous` with b (E, K, N)."""
    m_grouped_bf16_gemm_nt_contiguous(a, b.mT, d, grouped_layout, *args, **options)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    """Write ``a[e] @ b[e].T`` to d[e] for every group e.

    a: (E, max_m, K) bfloat16. b: (E, N, K) bfloat16. d: (E, max_m, N) bfloat16 or float32. masked_m: int32 (E,), the
    number of valid rows per group; other rows of d are undefined (and computed too). expected_m: no effect.
    """
    a, b = _matrix("a", a, 3), _matrix("b", b, 3)
    check_vector("masked_m", masked_m, torch.int32, a.shape[0], a.device)
    _check_product(d, (*a.shape[:2], b.shape[1]), a, b)
    _multiply(a, b, d)


def _matrix(name: str, value: Tensor, dimensions: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    check_tensor(name, value)
    check_dtype(name, value, dtype)
    if value.dim() != dimensions:
        raise ValueError(f"{name}: expected {dimensions} dimensions, got shape {tuple(value.shape)}")
    return detached(value)


def _dense(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None) -> None:
    """Write ``c + a @ b.T`` to d, for matrices a and b of one dtype; batch-invariantly if `batch_invariant` is on."""
    check_addend(c, d)
    _check_product(d, (a.shape[0], b.shape[0]), a, b)
    multiply = _multiply_fp8 if a.dtype is _FP8 else _multiply
    if not config.settings.batch_invariant:
        multiply(a, b, d, c)
        return

    def product(*rows: Tensor) -> Tensor:
        out = d.new_empty((len(rows[0]), len(b)))
        multiply(rows[0], b, out, *rows[1:])
        return out

    d.copy_(by_fixed_rows(product, a, *(() if c is None else (c,))))


def _check_product(d: Tensor, shape: tuple[int, ...], a: Tensor, b: Tensor) -> None:
    if b.shape[-1] != a.shape[-1]:
        raise ValueError(f"b: expected K = {a.shape[-1]} like a {tuple(a.shape)}, got shape {tuple(b.shape)}")
    check_tensor("d", d)
    check_like("d", d, RESULTS, shape, a.device, "a")


def _multiply(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """Write ``c + a @ b.mT`` to d, for bfloat16 matrices or batches of matrices.

    torch.mm and torch.addmm are avoided: programs that route these to DeepGEMM, as SGLang does for deterministic
    inference, would recurse endlessly.
    """
    if a.dim() == 2:
        a, b, d, c = a[None], b[None], d[None], None if c is None else c[None]
    if d.dtype is torch.float32 and a.is_cuda:
        product = torch.ops.aten.bmm.dtype(a, b.mT, torch.float32)
        torch.add(product, 0 if c is None else c, out=d)
        return
    if d.dtype is torch.float32:
        a, b = a.float(), b.float()
    torch.baddbmm(d if c is None else c, a, b.mT, beta=0 if c is None else 1, out=d)


def _multiply_fp8(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    one = torch.ones((), device=a.device)
    multiply = functools.partial(torch._scaled_mm, a.contiguous(), b.contiguous().t(), one, one)
    if c is None and d.is_contiguous():
        multiply(out_dtype=d.dtype, out=d)
    else:
        torch.add(multiply(out_dtype=torch.float32), 0 if c is None else c, out=d)


def _group_of_rows(layout: Tensor, rows: int, groups: int, psum: bool) -> Tensor:
    """Return the group of each row, (rows,) int64; the number `groups` for rows without a group."""
    if not psum:
        check_vector("grouped_layout", layout, torch.int32, rows, layout.device)
        return torch.where((layout >= 0) & (layout < groups), layout, groups).long()
    check_vector("grouped_layout", layout, torch.int32, groups, layout.device)
    alignment = get_mk_alignment_for_contiguous_layout()
    starts = pad((layout[:-1] + alignment - 1) // alignment * alignment, (1, 0))
    row = torch.arange(rows, device=layout.device)
    group = torch.searchsorted(layout.long(), row, right=True)
    begun = row >= starts[group.clamp(max=groups - 1)]
    return torch.where(begun & (group < groups), group, groups)
