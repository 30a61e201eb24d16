"""DeepGEMM's functions on the drop-in, on a GPU: float64, other layouts, graphs, no waiting, CPU time, transformers."""

import statistics
import sys
import time
from functools import partial

import pytest
import torch

import deep_gemm
from benchmarks import host
from benchmarks.operands import rounded_error
from fp8moe import gemm, grouped_gemm, grouped_gemm_masked, mqa_logits
from fp8moe.kernels.gemm import layouts
from fp8moe.kernels.gemm.reference import group_ranges, join_groups
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.runtime import config
from tests import deep_gemm_cases, gemm_cases
from tests.deep_gemm_cases import by_group
from tests.errors import relative_error
from tests.gemm_cases import exact
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
TOLERANCE = 3e-4  # beyond what rounding the exact result costs
DTYPES = (torch.bfloat16, torch.float32)
SIZES = {
    "few": [3, 0, 7, 8, 0, 9, 2, 5],
    "odd": [31, 33, 65, 127, 129, 200],
    "many": [700, 0, 1, 513, 128, 256],
    "all absent": [0, 0, 0],
    "experts": [i % 7 for i in range(256)],
}
WEIGHTS = ((24, 48), (136, 144), (576, 576), (2112, 128))
activations = partial(gemm_cases.activations, spread=4, device=DEVICE)
weights = partial(gemm_cases.weights, device=DEVICE)
int32 = partial(gemm_cases.int32, device=DEVICE)
by_rows = partial(deep_gemm_cases.by_rows, device=DEVICE)
by_ends = partial(deep_gemm_cases.by_ends, device=DEVICE)
flat_groups = partial(deep_gemm_cases.flat_groups, device=DEVICE)
along_k = partial(deep_gemm_cases.along_k, device=DEVICE)


def nans(*shape, dtype=torch.bfloat16):
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def check(d, a, b, groups):
    """That rows of groups are products, and that all others are left alone."""
    outside = torch.ones(len(d), dtype=torch.bool, device=DEVICE)
    for group, rows in enumerate(groups):
        if rows.start < rows.stop:
            outside[rows] = False
            x, w = FP8Tensor(a[0][rows], a[1][rows]), FP8Tensor(b[0][group], b[1][group])
            error = rounded_error(d[rows], exact(x, w))
            assert error <= TOLERANCE, (group, rows, error)
    assert d[outside].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 24, 48), (70, 136, 272), (300, 576, 7168)])
def test_dense(m, n, k, dtype):
    a = activations(m, k)
    b = FP8Tensor(*(part[0] for part in weights(1, n, k)))
    d, c = nans(m, n, dtype=dtype), torch.randn(m, n, device=DEVICE).mul_(100).to(dtype)
    deep_gemm.fp8_gemm_nt((a.data, a.scale.contiguous()), b, d)
    assert rounded_error(d, exact(a, b)) <= TOLERANCE and torch.equal(d, gemm(a, b, out_dtype=dtype))
    expected = exact(a, b) + c.double()
    deep_gemm.fp8_gemm_nt(a, b, d, c=c)
    assert rounded_error(d, expected) <= TOLERANCE
    deep_gemm.fp8_gemm_nt(a, b, c, c=c)
    assert torch.equal(c, d)


def test_packed_scales():
    a = quantize_1x128(torch.randn(70, 1040, device=DEVICE), scale_format="ue8m0")
    b = FP8Tensor(*(part[0] for part in weights(1, 136, 1040)))
    words = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(a.scale)
    d = nans(70, 136)
    deep_gemm.fp8_gemm_nt((a.data, words), b, d)
    assert torch.equal(d, gemm(a, b))


def test_both_by_rows():
    (a, b), d = (quantize_1x128(torch.randn(rows, 1024, device=DEVICE)) for rows in (200, 136)), nans(200, 136).float()
    expected = dequantize(a, dtype=torch.float64) @ dequantize(b, dtype=torch.float64).T
    deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))
    assert relative_error(d, expected) <= TOLERANCE
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, d)
    assert relative_error(d, 2 * expected) <= TOLERANCE


@pytest.mark.parametrize("alignment", [128, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_contiguous(n, k, sizes, reverse, alignment):
    sizes = SIZES[sizes]
    order = list(range(len(sizes)))[:: -1 if reverse else 1]
    layout, groups = by_rows(sizes, order, alignment=alignment, behind=300)
    a, b = activations(len(layout), k), weights(len(sizes), n, k)
    for dtype in DTYPES:
        d = nans(len(layout), n, dtype=dtype)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
        check(d, a, b, groups)


@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (7168, 2048)])
def test_benchmark_shapes(n, k):
    layout, groups = by_rows(SIZES["many"], behind=700)
    a, b, d = activations(len(layout), k), weights(6, n, k), nans(len(layout), n)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    check(d, a, b, groups)


@pytest.mark.parametrize("sizes", SIZES)
def test_psum(sizes):
    layout, groups = by_ends(SIZES[sizes])
    m = int(layout[-1]) + 50
    a, b, d = activations(m, 272), weights(len(groups), 136, 272), nans(m, 136)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=True)
    check(d, a, b, groups)


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_zero_padding(sizes, psum):
    layout, groups = by_ends(SIZES[sizes]) if psum else by_rows(SIZES[sizes], behind=50)
    m = int(layout[-1]) + 50 if psum else len(layout)
    a, b, d = activations(m, 272), weights(len(groups), 136, 272), nans(m, 136)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=psum, ensure_zero_padding=True)
    outside = torch.ones(m, dtype=torch.bool, device=DEVICE)
    for rows in groups:
        outside[rows] = False
    assert not d[outside].any()
    d[outside] = NAN
    check(d, a, b, groups)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [(128, 64, 128), (64, 8, 0), (0, 3, 8)])
def test_skip_head_mid(splits, dtype):
    left, mid, right = splits
    a, b = activations(70, 512), FP8Tensor(*(part[0] for part in weights(1, 16 * (left + right), 512)))
    d = nans(70, 16 * sum(splits), dtype=dtype)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits)
    heads = d.view(70, 16, -1)
    found = torch.cat([heads[..., :left], heads[..., left + mid :]], -1).reshape(70, -1)
    assert rounded_error(found, exact(a, b)) <= TOLERANCE and heads[..., left : left + mid].isnan().all()


def test_contiguous_is_the_native_function():
    sizes = [512, 1024, 768, 2048]
    layout, _ = by_rows(sizes)
    a, b, d = activations(len(layout), 1024), weights(4, 512, 1024), nans(len(layout), 512)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    assert relative_error(d, grouped_gemm(a, b, gemm_cases.offsets(sizes, device=DEVICE))) < 1e-4


@pytest.mark.parametrize("rows", [0, 1, 7, 1000, 5000, 100_000])
@pytest.mark.parametrize("groups", [1, 33, 256])
def test_ranges(groups, rows):
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.randint(0, 2 * rows // groups + 2, (groups,), generator=generator).tolist()
    order = torch.randperm(groups, generator=generator).tolist()
    layout, _ = by_rows(sizes, order, alignment=8, behind=rows % 5)
    found, expected = layouts.group_ranges(layout, groups, None), group_ranges(layout, groups, None)
    for (first, end), pair in zip(found.tolist(), expected.tolist(), strict=True):
        assert [first, end] == pair or (end <= first and pair == [0, 0])
    ends, _ = by_ends(sizes)
    assert layouts.group_ranges(ends, groups, 128).tolist() == group_ranges(ends, groups, 128).tolist()


@pytest.mark.parametrize("layout", [[2**31 - 1, -(2**31), 5, -5] * 50, [0, 1] * 100, [1, 0] * 100, [-1] * 200])
def test_bad_layouts_stay_in_bounds(layout):
    a, b = activations(200, 272), weights(2, 136, 272)
    parent = nans(400, 136)
    for psum in (False, True):
        groups = int32(layout[:2] if psum else layout)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, parent[100:300], groups, use_psum_layout=psum)
        assert parent[:100].isnan().all() and parent[300:].isnan().all()


@pytest.mark.parametrize("max_m", [8, 200])
def test_masked(max_m):
    masked_m = [max_m, 0, max_m // 2, 1]
    a, b, d = activations(4, max_m, 272), weights(4, 136, 272), nans(4, max_m, 136)
    scale = deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)
    deep_gemm.fp8_m_grouped_gemm_nt_masked((a.data, scale), b, d, int32(masked_m), 5)
    expected = nans(4, max_m, 136)
    grouped_gemm_masked(a, b, int32(masked_m), expected_m=5, out=expected)
    assert torch.equal(d.nan_to_num(7e7), expected.nan_to_num(7e7))


@pytest.mark.parametrize("blocks", [[9], [1] * 7, [3, 0, 1, 5], [0, 0, 40], [0, 0], [i % 3 for i in range(200)]])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (136, 104), (1000, 520)])
@pytest.mark.parametrize("form", ["nt", "tn"])
def test_along_k(m, n, blocks, form):
    ks = [128 * count for count in blocks]
    (a, a_values), (b, b_values) = flat_groups(m, ks), flat_groups(n, ks, seed=1)
    total = torch.randn(len(ks), m, n, device=DEVICE)
    expected, sizes = by_group(a_values, b_values, ks), int32(ks)
    function = deep_gemm.k_grouped_fp8_gemm_nt_contiguous
    if form == "tn":
        function = deep_gemm.k_grouped_fp8_gemm_tn_contiguous
        one, other, _ = join_groups(a[0], b[0], sizes, m, n, sum(ks))
        a, b = (one.t(), a[1].t()), (other.t(), b[1].t())
    d = nans(len(ks), m, n, dtype=torch.float32)
    function(a, b, d, ks, sizes)
    assert relative_error(d, expected) <= TOLERANCE
    expected += total.double()
    function(a, b, total, ks, sizes, total)
    assert relative_error(total, expected) <= TOLERANCE


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", ["nt", "tn"])
def test_along_k_by_ends(form, sizes):
    sizes = SIZES[sizes]
    (a, x), (b, y) = along_k(136, sizes, form), along_k(104, sizes, form, seed=1)
    d, ends = nans(len(sizes), 136, 104, dtype=torch.float32), by_ends(sizes)[0]
    getattr(deep_gemm, f"k_grouped_fp8_gemm_{form}_contiguous")(a, b, d, None, ends, use_psum_layout=True)
    expected = torch.stack([one @ other.T for one, other in zip(x, y, strict=True)])
    assert torch.equal(d, expected.float()) if not any(sizes) else relative_error(d, expected) <= TOLERANCE


def test_joined_groups():
    sizes = [384, 0, 128, 1280]
    (a, _), (b, _) = flat_groups(70, sizes), flat_groups(9, sizes, seed=1)
    shape = 70, 9, sum(sizes)
    found = [nans(rows, shape[2]).to(torch.float8_e4m3fn) for rows in shape[:2]] + [int32([-1] * 5)]
    layouts.join_launcher(0, 4, *shape)(a[0], b[0], int32(sizes), *found)
    for one, other in zip(found, join_groups(a[0], b[0], int32(sizes), *shape), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("sizes", [[100, 412], [-128, 640], [2**31 - 1] * 2, [1024, 1024], [0, 0]])
def test_bad_sizes_stay_in_bounds(sizes):
    (a, _), (b, _) = flat_groups(16, [512]), flat_groups(8, [512])
    parent = nans(6, 16, 8, dtype=torch.float32)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, parent[2:4], None, int32(sizes))
    torch.cuda.synchronize()
    assert parent[:2].isnan().all() and parent[4:].isnan().all()


# ---- bfloat16 ----


def test_bfloat16():
    a, b = torch.randn(200, 512, device=DEVICE).bfloat16(), torch.randn(136, 512, device=DEVICE).bfloat16()
    for dtype in DTYPES:
        d = nans(200, 136, dtype=dtype)
        expected, tolerance = a.double() @ b.double().T, 1e-5 if dtype is torch.float32 else 3e-3
        deep_gemm.bf16_gemm_nt(a, b, d)
        assert relative_error(d, expected) < tolerance
        c = torch.randn(200, 136, device=DEVICE).to(dtype)
        deep_gemm.bf16_gemm_nt(a, b, d, c)
        assert relative_error(d, expected + c.double()) < tolerance
        batches = nans(4, 50, 136, dtype=dtype)
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a.view(4, 50, 512), b.expand(4, -1, -1), batches, int32([50] * 4), 50)
        assert relative_error(batches.view(200, 136), expected) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_cublaslt_of_fp8(dtype):
    a, b = (torch.randn(rows, 512, device=DEVICE).to(torch.float8_e4m3fn) for rows in (200, 144))
    expected, d = a.double() @ b.double().T, nans(200, 144, dtype=dtype)
    # The tensor cores keep about 14 bits of a sum.
    deep_gemm.cublaslt_gemm_nt(a, b, d)
    assert relative_error(d, expected) < 3e-3
    deep_gemm.cublaslt_gemm_nt(a, b, d, d)
    assert relative_error(d, 2 * expected) < 5e-3


def test_deterministic_bfloat16():
    before = config.settings
    try:
        deep_gemm.use_deterministic_algorithms(True)
        a, b = torch.randn(300, 4096, device=DEVICE).bfloat16(), torch.randn(136, 4096, device=DEVICE).bfloat16()
        whole, one = nans(300, 136), nans(1, 136)
        deep_gemm.bf16_gemm_nt(a, b, whole)
        deep_gemm.bf16_gemm_nt(a[7:8], b, one)
    finally:
        config.settings = before
    assert torch.equal(one, whole[7:8])


@pytest.mark.parametrize("psum", [False, True])
def test_bfloat16_contiguous(psum):
    layout, groups = by_ends(SIZES["odd"]) if psum else by_rows(SIZES["odd"], [5, 3, 4, 0, 2, 1], behind=9)
    m = int(layout[-1]) + 50 if psum else len(layout)
    a, b = torch.randn(m, 64, device=DEVICE).bfloat16(), torch.randn(6, 72, 64, device=DEVICE).bfloat16()
    d = nans(m, 72)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=psum)
    for group, rows in enumerate(groups):
        assert relative_error(d[rows], a[rows].double() @ b[group].double().T) < 3e-3


# ---- index scores ----


@pytest.mark.parametrize("keys", [1000, 1024])
def test_index_scores(keys):
    q = torch.randn(40, 32, 128, device=DEVICE).to(torch.float8_e4m3fn)
    kv = torch.randn(keys, 128, device=DEVICE).to(torch.float8_e4m3fn), torch.rand(keys, device=DEVICE)
    heads, starts = torch.randn(40, 32, device=DEVICE), int32(list(range(0, 800, 20)))
    ends = starts + 200
    whole = mqa_logits(q, kv, heads, starts, ends)
    out = deep_gemm.fp8_mqa_logits(q, kv, heads, starts, ends)
    assert torch.equal(out, whole) and out.stride() == (1024, 1)
    shifted = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, heads, starts, ends, 200)  # as vLLM 0.33
    assert shifted.stride() == (256, 1)
    for row, start in enumerate(starts.tolist()):
        assert torch.equal(shifted[row], whole[row, start : start + 200])
    rounded = deep_gemm.fp8_mqa_logits(q, kv, heads, starts, ends, logits_dtype=torch.bfloat16)
    assert torch.equal(rounded, whole.bfloat16()) and rounded.stride() == (1024, 1)


# ---- torchao ----


def test_torchaos_experts_in_blocks(monkeypatch):
    """Which multiply by deep_gemm where it is there."""
    blockwise = pytest.importorskip("torchao.prototype.moe_training.blockwise_fp8.grouped_mm")
    from torchao.prototype.blockwise_fp8_training import deepgemm_grouped_kernels as found

    with monkeypatch.context() as patch:
        for name, module in [("deep_gemm", deep_gemm), ("deep_gemm.utils", deep_gemm.utils)]:
            patch.setitem(sys.modules, name, module)
        found._clear_deepgemm_capability_cache()
        assert found._get_deepgemm_capabilities().k_grouped_gemm is deep_gemm.k_grouped_fp8_gemm_nt_contiguous
        offsets, (a, b) = (
            int32([128, 128, 512]),
            (torch.randn(*shape, device=DEVICE) for shape in ((512, 256), (3, 384, 256))),
        )
        a, b = (x.bfloat16().requires_grad_() for x in (a, b))
        out = blockwise._to_fp8_blockwise_then_scaled_grouped_mm(
            a, b.mT, offsets, pad_token_groups_for_grouped_mm=False
        )
        grad = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (a, b), grad)
        groups = (slice(0, 128), slice(128, 128), slice(128, 512))
        for group, rows in enumerate(groups):
            x, w, d = (value.detach().double() for value in (a[rows], b[group], grad[rows]))
            if not len(x):
                assert not gradients[1][group].any()
                continue
            assert relative_error(gradients[1][group], d.T @ x) < 0.06
            assert relative_error(out[rows], x @ w.T) < 0.06 and relative_error(gradients[0][rows], d @ w) < 0.06
    found._clear_deepgemm_capability_cache()


# ---- graphs, waiting, CPU time ----


def calls(m=1024, groups=4, n=512, k=1024):
    """Each function on operands of its own: its results, its calls, and the tensor that says what its groups are."""
    a, b, masked = activations(m, k), weights(groups, n, k), activations(groups, 64, k)
    one = FP8Tensor(b.data[0], b.scale[0])
    half = FP8Tensor(one.data[: n // 2], one.scale[: n // 256])
    layout, ends = by_rows([m // groups - 5] * groups)[0], by_ends([m // groups - 5] * groups)[0]
    (x, _), (y, _) = flat_groups(136, [256] * groups), flat_groups(72, [256] * groups)
    d, places, along = nans(m, n), nans(groups, 64, n), torch.zeros(groups, 136, 72, device=DEVICE)
    sizes, masked_m = int32([256] * groups), int32([64, 0, 7, 1])
    along_ends = by_ends([256] * (groups - 1) + [250])[0]
    bf16 = torch.randn(m, 64, device=DEVICE).bfloat16(), torch.randn(groups, 72, 64, device=DEVICE).bfloat16()
    rounded = nans(m, 72)
    q = torch.randn(8, 32, 128, device=DEVICE).to(torch.float8_e4m3fn)
    kv = torch.randn(256, 128, device=DEVICE).to(torch.float8_e4m3fn), torch.rand(256, device=DEVICE)
    heads, starts, stops = torch.randn(8, 32, device=DEVICE), int32([0] * 8), int32([256] * 8)
    cache, table = torch.zeros(8, 64, 1, 132, dtype=torch.uint8, device=DEVICE), int32([[0, 1]] * 8)
    lengths = int32([100] * 8)
    scores = torch.zeros(8, 256, device=DEVICE)

    def paged():
        meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
        pages = q.view(8, 1, 32, 128), cache, heads, lengths, table, meta, 128
        scores[:, :128].copy_(deep_gemm.fp8_paged_mqa_logits(*pages, clean_logits=True))

    return (
        (d, lambda: deep_gemm.fp8_gemm_nt(a, one, d)),
        (d, lambda: deep_gemm.fp8_gemm_nt((a.data, a.scale.contiguous()), one, d)),
        (d, lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)),
        (d, lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ends, use_psum_layout=True)),
        (places, lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(masked, b, places, masked_m, 16)),
        (along, lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(x, y, along, [256] * groups, sizes)),
        (along, lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(x, y, along, [], along_ends, use_psum_layout=True)),
        (d, lambda: deep_gemm.fp8_gemm_nt_skip_head_mid(a, half, d, (64, 128, 64))),
        (rounded, lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(*bf16, rounded, layout)),
        (scores, lambda: scores.copy_(deep_gemm.fp8_mqa_logits(q, kv, heads, starts, stops))),
        (scores, lambda: scores.copy_(deep_gemm.fp8_mqa_logits(q, kv, heads, starts, stops, False, 256))),
        (scores, paged),
    )


def test_nothing_waits_for_the_gpu():
    functions = calls()
    for _, call in functions:
        call()
    with no_waiting():
        for _, call in functions:
            call()


def test_graphs():
    for result, call in calls():
        result.zero_()
        call()
        expected = result.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)


def microseconds(*calls):
    """CPU time of each call, the median of some hundred in turn, whose launches find room in the queue."""
    times = [[] for _ in calls]
    for i in range(400):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        if i % 50 == 49:
            torch.cuda.synchronize()
    return [1e6 * statistics.median(found) for found in times]


def test_cpu_time():
    for name, pair in host.drop_in_calls().items():
        native_time, time_here = microseconds(*pair)
        loaded = max(1.0, native_time / 40)  # an idle CPU takes 30 us
        assert time_here < native_time + 10 * loaded, (name, native_time, time_here)


def test_bench_kineto_finds_the_kernel():
    a, b, d = activations(64, 1024), weights(1, 512, 1024), nans(64, 512)
    one = FP8Tensor(b.data[0], b.scale[0])
    assert 0 < deep_gemm.bench_kineto(lambda: deep_gemm.fp8_gemm_nt(a, one, d), "gemm", num_tests=5) < 1e-3
    assert deep_gemm.testing.get_arch_major() == 9


def test_num_sms():
    a, b = activations(4096, 1024), weights(1, 512, 1024)
    one, d, before = FP8Tensor(b.data[0], b.scale[0]), nans(4096, 512), config.settings
    assert deep_gemm.get_num_sms() == torch.cuda.get_device_properties(0).multi_processor_count
    try:
        deep_gemm.set_num_sms(16)
        assert deep_gemm.get_num_sms() == 16
        deep_gemm.fp8_gemm_nt(a, one, d)
    finally:
        config.settings = before
    assert rounded_error(d, exact(a, one)) <= TOLERANCE
