"""DeepGEMM's grouped GEMMs on the drop-in, against float64 on the CPU."""

import itertools

import pytest
import torch

import deep_gemm
from fp8moe.kernels.gemm.api import grouped_gemm
from fp8moe.kernels.gemm.layouts import grouped_gemm_k_by_sizes, join_spec, ranges_spec
from fp8moe.kernels.gemm.reference import group_ranges
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from tests.deep_gemm_cases import along_k, by_ends, by_group, by_rows, flat_groups, packed
from tests.errors import error_in_its_dtype, relative_error
from tests.gemm_cases import activations, int32, offsets, weights
from tests.ptxas import compile_report

TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 1.5e-3}
CONTIGUOUS = (
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
)
MASKED = (
    "m_grouped_fp8_gemm_nt_masked",
    "fp8_m_grouped_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
)
SIZES = (70, 0, 130, 5)


@pytest.fixture
def alignment():
    """Sets the alignment for a test."""
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    yield deep_gemm.set_mk_alignment_for_contiguous_layout
    deep_gemm.set_mk_alignment_for_contiguous_layout(before)


def nans(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), dtype=dtype)


def check(d, a, b, groups):
    """That rows of groups are products, and that all others are left alone."""
    a, b = dequantize(a, dtype=torch.float64), dequantize(b, dtype=torch.float64)
    outside = torch.ones(len(d), dtype=torch.bool)
    for group, rows in enumerate(groups):
        if rows.start < rows.stop:
            assert error_in_its_dtype(d[rows], a[rows] @ b[group].T) < TOLERANCE[d.dtype]
            outside[rows] = False
    assert d[outside].isnan().all()


# ---- rows of groups ----


@pytest.mark.parametrize("order", [None, (2, 0, 3, 1), (3, 2)])
@pytest.mark.parametrize("name", CONTIGUOUS)
def test_contiguous(name, order):
    sizes = [size if order is None or group in order else 0 for group, size in enumerate(SIZES)]
    layout, groups = by_rows(sizes, order, behind=77)
    a, b, d = activations(len(layout), 272), weights(4, 136, 272), nans(len(layout), 136)
    assert getattr(deep_gemm, name)(a, b, d, layout) is None
    check(d, a, b, groups)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_contiguous_equals_the_native_function(dtype):
    layout, _ = by_rows(SIZES, alignment=1)
    a, b, d = activations(205, 272), weights(4, 136, 272), nans(205, 136, dtype=dtype)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    assert torch.equal(d, grouped_gemm(a, b, offsets(SIZES), out=nans(205, 136, dtype=dtype)))


def test_rows_of_no_group_among_those_of_one():
    layout, b = int32([-1, 1, 1, -1, 1, 7, 0, -1]), weights(2, 24, 144)
    a, d = activations(8, 144), nans(8, 24)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    check(d, a, b, [slice(6, 7), slice(1, 5)])


def test_groups_in_several_places_are_refused():
    a, b = activations(6, 144), weights(2, 24, 144)
    with pytest.raises(ValueError, match="grouped_layout: expected the rows of a group together, got group 0"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, nans(6, 24), int32([0, 0, 1, 1, 0, -1]))


@pytest.mark.parametrize("align", [128, 64, 8])
def test_psum(align, alignment):
    alignment(align)
    layout, groups = by_ends(SIZES, alignment=align)
    m = int(layout[-1]) + 9
    a, b, d = activations(m, 272), weights(4, 136, 272), nans(m, 136)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=True, expected_m_for_psum_layout=60)
    check(d, a, b, groups)


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_zero_padding(bf16, psum):
    layout, groups = by_ends(SIZES) if psum else by_rows(SIZES, (2, 0, 3, 1), behind=9)
    m = int(layout[-1]) + 9 if psum else len(layout)
    a, b, d = activations(m, 272), weights(4, 136, 272), nans(m, 136)
    x, w = dequantize(a, dtype=torch.float64), dequantize(b, dtype=torch.float64)
    options = {"use_psum_layout": psum, "ensure_zero_padding": True}
    if bf16:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x.bfloat16(), w.bfloat16(), d, layout, **options)
    else:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, **options)
    expected = torch.zeros(m, 136, dtype=torch.float64)
    for group, rows in enumerate(groups):
        expected[rows] = x[rows] @ w[group].T
    assert relative_error(d, expected) < (4e-3 if bf16 else 3e-3)
    assert torch.equal(d.any(1), expected.any(1))


def test_contiguous_scales_as_callers_bring_them():
    layout, groups = by_rows(SIZES)
    a, b = activations(len(layout), 256), weights(4, 136, 256)
    expected = nans(len(layout), 136)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, expected, layout)
    for scale in (a.scale.contiguous(), deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)):
        d = nans(len(layout), 136)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a.data, scale), b, d, layout, recipe=(1, 128, 128))
        assert torch.equal(d.nan_to_num(), expected.nan_to_num())
    x = quantize_1x128(torch.randn(len(layout), 640), scale_format="ue8m0")
    w = weights(4, 136, 640)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x.data, packed(x.scale)), w, d := nans(len(layout), 136), layout)
    check(d, x, w, groups)


def test_contiguous_nn_takes_views():
    layout, groups = by_rows(SIZES)
    a, b, d = activations(len(layout), 256), weights(4, 136, 256), nans(len(layout), 136)
    view = b.data.mT, b.scale.mT
    deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous(a, view, d, layout)
    check(d, a, b, groups)
    with pytest.raises(NotImplementedError, match="b: expected K-major"):
        deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, (view[0].contiguous(), view[1]), d, layout)


@pytest.mark.parametrize(("experts", "m"), [(2, 0), (0, 5)])
def test_contiguous_empty(experts, m):
    a = torch.empty(m, 128, dtype=torch.float8_e4m3fn), torch.empty(m, 1)
    b = torch.empty(experts, 24, 128, dtype=torch.float8_e4m3fn), torch.empty(experts, 1, 1)
    d = nans(m, 24)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, torch.full((m,), -1, dtype=torch.int32))
    assert d.isnan().all()


def test_ranges():
    layout = int32([3, 3, -1, 0, 0, 9, -7, 2])
    assert group_ranges(layout, 4, None).tolist() == [[3, 5], [0, 0], [7, 8], [0, 2]]
    assert group_ranges(int32([3, 3, 9]), 3, 4).tolist() == [[0, 3], [4, 3], [4, 9]]
    assert group_ranges(int32([]), 2, None).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"grouped_layout": int32([0] * 9)}, ValueError, r"grouped_layout: expected shape \(8,\)"),
        ({"grouped_layout": torch.zeros(8)}, TypeError, "grouped_layout: expected int32"),
        ({"grouped_layout": [0] * 8}, TypeError, "grouped_layout: expected a torch.Tensor"),
        ({"grouped_layout": int32([0] * 8), "use_psum_layout": True}, ValueError, r"grouped_layout: .* \(2,\)"),
        ({"d": nans(8, 16)}, ValueError, "d: expected shape"),
        ({"recipe": (1, 1, 128)}, NotImplementedError, "recipe: expected"),
        (
            {"use_psum_layout": True, "expected_m_for_psum_layout": -1},
            ValueError,
            "expected_m_for_psum_layout: expected",
        ),
    ],
)
def test_contiguous_wrong_arguments(change, error, match):
    right = {"a": activations(8, 144), "b": weights(2, 24, 144), "d": nans(8, 24), "grouped_layout": int32([0] * 8)}
    if change.get("use_psum_layout") and "grouped_layout" not in change:
        right["grouped_layout"] = int32([3, 8])
    with pytest.raises(error, match=match):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(**right | change)


# ---- masked ----


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MASKED)
def test_masked(name, dtype):
    masked_m, max_m = [3, 0, 40, 17], 40
    a, b, d = activations(4, max_m, 272), weights(4, 136, 272), nans(4, max_m, 136, dtype=dtype)
    scale = deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)
    getattr(deep_gemm, name)((a.data, scale), b, d, int32(masked_m), 15)
    x = dequantize(a, dtype=torch.float64)
    for group, rows in enumerate(masked_m):
        expected = x[group, :rows] @ dequantize(FP8Tensor(b.data[group], b.scale[group]), dtype=torch.float64).T
        assert error_in_its_dtype(d[group, :rows], expected) < TOLERANCE[dtype]
        assert d[group, rows:].isnan().all()


# ---- groups along K ----


@pytest.mark.parametrize("form", ["nt", "scale (K/128, M)", "tn"])
@pytest.mark.parametrize("c", [None, "d", "apart"])
def test_along_k(form, c):
    ks, m, n = [128, 0, 384, 256], 70, 136
    a, a_values = flat_groups(m, ks)
    b, b_values = flat_groups(n, ks, seed=1)
    expected, d = by_group(a_values, b_values, ks), nans(4, m, n, dtype=torch.float32)
    function, addend = deep_gemm.k_grouped_fp8_gemm_nt_contiguous, None
    if form == "scale (K/128, M)":
        a, b = ((data, scale.t()) for data, scale in (a, b))
    if form == "tn":
        function = deep_gemm.k_grouped_fp8_gemm_tn_contiguous
        a, b = (columns(flat, rows, ks) for flat, rows in ((a, m), (b, n)))
    if c is not None:
        addend = torch.randn(4, m, n)
        expected += addend.double()
        d = addend if c == "d" else d
    assert function(a, b, d, ks, int32(ks), addend) is None
    assert relative_error(d, expected) < 3e-4
    assert c is not None or not d[1].any()


def columns(flat, rows, ks):
    """Flat groups as one matrix (K, rows) that lies K-major, with scale (K/128, rows)."""
    data, scale = flat
    parts = data.view(torch.uint8).split([rows * k for k in ks])
    matrix = torch.cat([part.view(rows, -1) if part.numel() else part.view(rows, 0) for part in parts], dim=1)
    return matrix.view(torch.float8_e4m3fn).t(), scale.t()


@pytest.mark.parametrize("form", ["nt", "tn"])
@pytest.mark.parametrize("c", [False, True])
def test_along_k_by_ends(form, c):
    """Groups of any size, filled up with zeros."""
    sizes, m, n = [100, 0, 384, 5, 200], 70, 136
    layout, d = by_ends(sizes)[0], nans(5, m, n, dtype=torch.float32)
    (a, x), (b, y) = along_k(m, sizes, form), along_k(n, sizes, form, seed=1)
    expected = torch.stack([one @ other.T for one, other in zip(x, y, strict=True)])
    addend = torch.randn(5, m, n) if c else None
    function = getattr(deep_gemm, f"k_grouped_fp8_gemm_{form}_contiguous")
    assert function(a, b, d, [] if c else None, layout, addend, use_psum_layout=True) is None
    assert relative_error(d, expected + (addend.double() if c else 0)) < 3e-4


def test_along_k_by_ends_wants_whole_blocks(alignment):
    alignment(64)
    (a, _), (b, _) = flat_groups(8, [128]), flat_groups(16, [128])
    with pytest.raises(NotImplementedError, match="use_psum_layout: expected an alignment of 128"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
            a, b, torch.zeros(1, 8, 16), None, int32([128]), use_psum_layout=True
        )


def test_along_k_of_casts():
    ks = [128, 256]
    x, y = torch.randn(384, 72), torch.randn(384, 40)
    d = torch.zeros(2, 72, 40)
    operands = deep_gemm.per_channel_cast_to_fp8(x), deep_gemm.per_channel_cast_to_fp8(y)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(*operands, d, ks, int32(ks), d)
    assert relative_error(d, by_group(x.double().T, y.double().T, ks)) < 0.06


def test_square_scales_are_told_apart_by_strides():
    """As many rows as blocks of K."""
    ks, rows = [256, 768], 8
    (a, scale), values = flat_groups(rows, ks)
    expected = by_group(values, values, ks)
    for one, other in itertools.product((scale.t().contiguous().t(), scale.t().contiguous()), repeat=2):
        d = torch.empty(2, rows, rows)
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous((a, one), (a, other), d, ks, int32(ks))
        assert relative_error(d, expected) < 3e-4


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ks": [128, 128]}, ValueError, "ks: expected 2 multiples of 128.*K = 384"),
        ({"ks": [128, 128, 128]}, ValueError, "ks: expected 2 multiples of 128"),
        ({"ks": None, "ks_tensor": int32([256, 256])}, ValueError, "ks_tensor: expected groups that fill at most"),
        ({"ks_tensor": torch.tensor([128, 256])}, TypeError, "ks_tensor: expected int32"),
        ({"d": nans(8, 16, dtype=torch.float32)}, ValueError, r"d: expected shape \(E, M, N\)"),
        ({"d": nans(3, 8, 16, dtype=torch.float32)}, ValueError, "d: expected shape"),
        ({"d": nans(2, 9, 16, dtype=torch.float32)}, ValueError, r"a\.data: expected shape"),
        ({"recipe": (1, 128, 128)}, NotImplementedError, "recipe: expected"),
    ],
)
@pytest.mark.parametrize("c", [False, True])
def test_along_k_wrong_arguments(change, error, match, c):
    ks = [128, 256]
    (a, _), (b, _) = flat_groups(8, ks), flat_groups(16, ks)
    right = {"a": a, "b": b, "d": nans(2, 8, 16, dtype=torch.float32), "ks": ks, "ks_tensor": int32(ks)}
    arguments = right | change
    if c:
        arguments["c"] = torch.zeros_like(arguments["d"])
    with pytest.raises(error, match=match):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments)
    assert arguments["d"].isnan().all()


def test_along_k_takes_each_form_by_its_name():
    """Of sizes that either form could have."""
    (flat, scale), _ = flat_groups(256, [256])
    d, ks = nans(1, 256, 256, dtype=torch.float32), ([256], int32([256]))
    with pytest.raises(ValueError, match=r"a\.data: expected shape \(rows \* K\)"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous((flat.view(256, 256), scale), (flat, scale), d, *ks)
    with pytest.raises(ValueError, match=r"a\.data: expected shape \(K, columns\)"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous((flat, scale), (flat, scale), d, *ks)
    (flat, scale), _ = flat_groups(8, [1024])
    by_columns, d = FP8Tensor(*columns((flat, scale), 8, [1024])), d[:, :8, :8].contiguous()
    with pytest.raises(ValueError, match=r"b\.data: expected as many dimensions as a\.data"):
        grouped_gemm_k_by_sizes(by_columns, FP8Tensor(flat, scale), int32([1024]), d)
    assert d.isnan().all()


# ---- bfloat16 ----


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", [None, (2, 0, 3, 1)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bfloat16_contiguous(order, transposed, dtype):
    layout, groups = by_rows(SIZES, order, behind=5)
    a, b = torch.randn(len(layout), 64).bfloat16(), torch.randn(4, 72, 64).bfloat16()
    d = nans(len(layout), 72, dtype=dtype)
    if transposed:
        deep_gemm.m_grouped_bf16_gemm_nn_contiguous(a, b.mT.contiguous(), d, layout)
    else:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
    check_bfloat16(d, a, b, groups)


def check_bfloat16(d, a, b, groups):
    outside = torch.ones(len(d), dtype=torch.bool)
    for group, rows in enumerate(groups):
        if rows.start < rows.stop:
            assert relative_error(d[rows], a[rows].double() @ b[group].double().T) < 3e-3
            outside[rows] = False
    assert d[outside].isnan().all()


@pytest.mark.parametrize("align", [128, 16])
def test_bfloat16_psum(align, alignment):
    alignment(align)
    layout, groups = by_ends(SIZES, alignment=align)
    m = int(layout[-1]) + 9
    a, b, d = torch.randn(m, 64).bfloat16(), torch.randn(4, 72, 64).bfloat16(), nans(m, 72)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=True)
    check_bfloat16(d, a, b, groups)


def test_bfloat16_group_in_several_places():
    a, b, d = torch.randn(6, 64).bfloat16(), torch.randn(2, 72, 64).bfloat16(), nans(6, 72)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, int32([0, 1, 1, 0, -1, 1]))
    for row, group in enumerate([0, 1, 1, 0, None, 1]):
        if group is not None:
            assert relative_error(d[row], b[group].double() @ a[row].double()) < 3e-3
    assert d[4].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bfloat16_masked(dtype):
    a, b, d = torch.randn(3, 20, 64).bfloat16(), torch.randn(3, 72, 64).bfloat16(), nans(3, 20, 72, dtype=dtype)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, int32([20, 0, 7]), 9)
    for group, rows in enumerate((20, 0, 7)):
        error = relative_error(d[group, :rows], a[group, :rows].double() @ b[group].double().T)
        assert rows == 0 or error < (1e-5 if dtype is torch.float32 else 3e-3)


def test_compiled():
    layout, groups = by_rows(SIZES)
    a, b = activations(len(layout), 144), weights(4, 24, 144)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(layout):
        d = torch.full((len(layout), 24), float("nan"), dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
        return d

    check(call(layout), a, b, groups)


@pytest.mark.parametrize("spec", [ranges_spec(1), ranges_spec(256), join_spec(1), join_spec(256)])
def test_kernels_compile_without_spills(spec):
    report = compile_report(spec)
    assert report.spill_stores == report.spill_loads == report.stack == 0
