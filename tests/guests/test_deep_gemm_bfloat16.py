"""DeepGEMM's dense bfloat16 functions on the drop-in."""

import pytest
import torch

import deep_gemm
from fp8moe.runtime import config
from fp8moe.runtime.fixed_rows import ROWS
from tests.errors import relative_error

LAYOUTS = ("nt", "nn", "tn", "tt")


def matrices(*shapes):
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16() for shape in shapes]


@pytest.mark.parametrize("name", ["bf16_gemm", "cublaslt_gemm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16(name, layout, dtype):
    a, b = matrices((72, 128), (136, 128))
    expected = a.double() @ b.double().T
    operands = (a.t().contiguous() if layout[0] == "t" else a, b.t().contiguous() if layout[1] == "n" else b)
    function = getattr(deep_gemm, f"{name}_{layout}")
    d = torch.full((72, 136), float("nan"), dtype=dtype)
    function(*operands, d)
    assert relative_error(d, expected) < (1e-5 if dtype is torch.float32 else 3e-3)
    c = torch.randn(72, 136).to(dtype)
    function(*operands, d, c)
    assert relative_error(d, expected + c.double()) < (1e-5 if dtype is torch.float32 else 3e-3)
    inside = c.clone()
    function(*operands, inside, inside)
    assert torch.equal(inside, d)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cublaslt_of_fp8(layout, dtype, invariant, request):
    if invariant:
        request.getfixturevalue("deterministic")
    a, b = (x.to(torch.float8_e4m3fn) for x in matrices((72, 128), (144, 128)))
    expected, d = a.double() @ b.double().T, torch.full((72, 144), float("nan"), dtype=dtype)
    operands = (a.t() if layout[0] == "t" else a, b.t() if layout[1] == "n" else b)
    function, tolerance = getattr(deep_gemm, f"cublaslt_gemm_{layout}"), 1e-5 if dtype is torch.float32 else 3e-3
    function(*operands, d)
    assert relative_error(d, expected) < tolerance
    function(*operands, d, d)
    assert relative_error(d, 2 * expected) < 2 * tolerance
    wide = torch.full((72, 200), float("nan"), dtype=dtype)
    function(*operands, wide[:, :144])
    assert relative_error(wide[:, :144], expected) < tolerance and wide[:, 144:].isnan().all()


def test_cublaslt_of_fp8_wrong_arguments():
    a, b = (x.to(torch.float8_e4m3fn) for x in matrices((72, 128), (144, 128)))
    d = torch.zeros(72, 144)
    with pytest.raises(NotImplementedError, match="a, b: expected K-major"):
        deep_gemm.cublaslt_gemm_nt(a, b.t().contiguous().t(), d)
    with pytest.raises(ValueError, match="b: expected N and K"):
        deep_gemm.cublaslt_gemm_nt(a, b[:136], d[:, :136])
    with pytest.raises(TypeError, match="b: expected float8_e4m3fn"):
        deep_gemm.cublaslt_gemm_nt(a, b.bfloat16(), d)


def test_bfloat16_wrong_arguments():
    a, b = matrices((72, 128), (136, 128))
    d = torch.zeros(72, 136, dtype=torch.bfloat16)
    for arguments, error, match in (
        ((a.float(), b, d), TypeError, "a: expected bfloat16"),
        ((a, b[:, :64], d), ValueError, "b: expected K = 128"),
        ((a, b, d.half()), TypeError, "d: expected bfloat16 or float32"),
        ((a, b, d[:8]), ValueError, "d: expected shape"),
        ((a, b, d, d.float()), TypeError, "c: expected bfloat16"),
    ):
        with pytest.raises(error, match=match):
            deep_gemm.bf16_gemm_nt(*arguments)


@pytest.fixture
def deterministic():
    before = config.settings
    deep_gemm.use_deterministic_algorithms(True)
    yield
    config.settings = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [0, 1, ROWS, 2 * ROWS + 3])
def test_deterministic(deterministic, monkeypatch, m, dtype):
    """64 rows at a time, so that a row's bits are its own."""
    a, b = matrices((m, 128), (136, 128))
    seen = []
    multiply = torch.baddbmm
    monkeypatch.setattr(
        torch, "baddbmm", lambda c, a, *args, **kw: seen.append(a.shape[1]) or multiply(c, a, *args, **kw)
    )
    d, c = torch.full((m, 136), float("nan"), dtype=dtype), torch.randn(m, 136).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-3
    deep_gemm.bf16_gemm_nt(a, b, d)
    assert not m or relative_error(d, a.double() @ b.double().T) < tolerance
    deep_gemm.bf16_gemm_nt(a, b, d, c)
    assert not m or relative_error(d, c.double() + a.double() @ b.double().T) < tolerance
    assert set(seen) <= {ROWS} or not m


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_deep_gemm_is_pytorch_s_mm(dtype):
    """As in SGLang's deterministic inference, which lets bf16_gemm_nn compute mm, mm.out, mm.dtype and addmm."""

    def mm(a, b, bias=None, out_dtype=None):
        out = torch.empty(len(a), b.shape[1], dtype=out_dtype or a.dtype)
        deep_gemm.bf16_gemm_nn(a, b, out)
        return out if bias is None else out.add_(bias)

    a, b = matrices((72, 128), (128, 136))
    expected = a.double() @ b.double()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm", mm, "CPU")
        library.impl("mm.out", lambda a, b, *, out: out.copy_(mm(a, b)), "CPU")
        library.impl("mm.dtype", lambda a, b, out_dtype: mm(a, b, out_dtype=out_dtype), "CPU")
        library.impl("addmm", lambda bias, a, b: mm(a, b, bias), "CPU")
        found = a @ b if dtype is torch.bfloat16 else torch.mm(a, b, out_dtype=dtype)
    assert found.dtype is dtype and relative_error(found, expected) < (1e-5 if dtype is torch.float32 else 3e-3)
