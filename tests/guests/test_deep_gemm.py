"""DeepGEMM's dense functions, layouts, casts, settings and test helpers on the drop-in, against float64 on the CPU."""

import inspect
import os
from contextlib import nullcontext

import pytest
import torch

import deep_gemm
from fp8moe.kernels.gemm.api import gemm
from fp8moe.quant.formats import FP8Tensor, empty_mn_major
from fp8moe.quant.quantize import dequantize, quantize_1x128, quantize_128x1, quantize_128x128
from fp8moe.runtime import config, launch
from fp8moe.runtime.launch import planned
from tests.deep_gemm_cases import packed
from tests.errors import error_in_its_dtype, relative_error
from tests.gemm_cases import exact, operands

TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 1.5e-3}
LAYOUTS = ("nn", "tn", "tt")


@pytest.fixture(autouse=True)
def values():
    """The settings that there were before."""
    before = config.settings, vars(deep_gemm.settings._values).copy()
    yield
    config.settings = before[0]
    vars(deep_gemm.settings._values).update(before[1])


def bits(x):
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def product(a, b):
    return dequantize(a, dtype=torch.float64) @ dequantize(b, dtype=torch.float64).T


# ---- FP8 ----


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["fp8_gemm_nt", "fp8_fp4_gemm_nt", "gemm_fp8_fp8_bf16_nt"])
def test_dense(name, dtype):
    a, b = operands(70, 136, 272)
    d = torch.full((70, 136), float("nan"), dtype=dtype)
    assert getattr(deep_gemm, name)(a, b, d) is None
    assert error_in_its_dtype(d, exact(a, b)) < TOLERANCE[dtype]
    assert torch.equal(d, gemm(a, b, out_dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inside", [False, True])
def test_dense_adds_c(dtype, inside):
    a, b = operands(70, 136, 272)
    c = torch.randn(70, 136).mul_(100).to(dtype)
    expected, d = c.double() + exact(a, b), c if inside else torch.full_like(c, float("nan"))
    deep_gemm.fp8_gemm_nt(a, b, d, c=c)
    assert error_in_its_dtype(d, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["contiguous", "mn major", "wide", "transposed copy"])
def test_scales_of_any_strides(layout):
    a, b = operands(70, 136, 272)
    scale = {
        "contiguous": a.scale.contiguous(),
        "mn major": deep_gemm.get_mn_major_tma_aligned_tensor(a.scale),
        "wide": torch.cat([a.scale, a.scale], dim=1)[:, :3],
        "transposed copy": a.scale.t().contiguous().t(),
    }[layout]
    d = torch.empty(70, 136, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((a.data, scale), (b.data, b.scale.t().contiguous().t()), d)
    assert torch.equal(d, gemm(a, b))


@pytest.mark.parametrize("k", [128, 640, 1040])
def test_packed_scales(k):
    a, b = operands(70, 136, k, scale_format="ue8m0")
    d = torch.empty(70, 136)
    deep_gemm.fp8_gemm_nt((a.data, packed(a.scale)), (b.data, packed(b.scale)), d)
    assert torch.equal(d, gemm(a, b, out_dtype=torch.float32))
    deep_gemm.fp8_gemm_nt(a, (b.data, b.scale.to(torch.float8_e8m0fnu)), d.zero_())
    assert torch.equal(d, gemm(a, b, out_dtype=torch.float32))


def rows(m, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.rand(m, 1, generator=generator).mul(6).exp()
    return quantize_1x128(x)


def test_both_by_rows():
    a, b = rows(70, 384), rows(136, 384, seed=1)
    d = torch.full((70, 136), float("nan"))
    deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))
    assert relative_error(d, product(a, b)) < 3e-4
    rounded = torch.empty(70, 136, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, b, rounded, recipe=[1, 1, 128])
    assert torch.equal(rounded, d.bfloat16())


def test_blocks_of_each_operand():
    """As some callers give them in place of a recipe, None where they do not know better."""
    a, b, d = rows(70, 384), rows(136, 384, seed=1), torch.empty(70, 136)
    deep_gemm.fp8_gemm_nt(a, b, d, recipe=None, recipe_a=(1, 128), recipe_b=(1, 128))
    assert relative_error(d, product(a, b)) < 3e-4
    a, b = operands(70, 136, 384)
    expected = gemm(a, b, out_dtype=torch.float32)
    for blocks in ({"recipe_a": (1, 128), "recipe_b": (128, 128)}, {"recipe_a": None, "recipe_b": [128, 128]}):
        deep_gemm.fp8_gemm_nt(a, b, d.zero_(), **blocks)
        assert torch.equal(d, expected)


@pytest.mark.parametrize("inside", [False, True])
def test_both_by_rows_adds_c(inside):
    a, b, c = rows(70, 384), rows(136, 384, seed=1), torch.randn(70, 136)
    expected, d = c.double() + product(a, b), c if inside else torch.full_like(c, float("nan"))
    deep_gemm.fp8_gemm_nt(a, b, d, c, recipe=(1, 1, 128))
    assert relative_error(d, expected) < 3e-4


def test_weight_gradient_adds_to_out():
    a, b, out = rows(70, 384), rows(136, 384, seed=1), torch.randn(70, 136)
    expected = out.double() + product(a, b)
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, out)
    assert relative_error(out, expected) < 3e-4


@pytest.mark.parametrize("prefix", ["fp8_gemm_", "fp8_fp4_gemm_"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_views_of_k_major_data_only(prefix, layout):
    a, b = operands(64, 128, 256)
    function, d = getattr(deep_gemm, prefix + layout), torch.empty(64, 128, dtype=torch.bfloat16)
    views = [
        FP8Tensor(x.data.t(), x.scale.t()) if letter == other else x
        for x, letter, other in ((a, layout[0], "t"), (b, layout[1], "n"))
    ]
    function(*views, d)
    assert torch.equal(d, gemm(a, b))
    copies = [(x.data.contiguous(), x.scale) for x in views]
    with pytest.raises(NotImplementedError, match="K-major"):
        function(*copies, d)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [(16, 8, 8), (8, 24, 0), (0, 3, 34), (136, 0, 0)])
def test_skip_head_mid(splits, dtype):
    left, mid, right = splits
    heads, n = 4, 4 * (left + right)
    a, b = operands(70, n, 272)
    d = torch.full((70, heads * sum(splits)), float("nan"), dtype=dtype)
    assert deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits) is None
    wanted = d.view(70, heads, -1)
    found = torch.cat([wanted[..., :left], wanted[..., left + mid :]], -1)
    assert error_in_its_dtype(found.reshape(70, n), exact(a, b)) < TOLERANCE[dtype]
    assert wanted[..., left : left + mid].isnan().all()


def test_skip_head_mid_wrong_arguments():
    a, b = operands(8, 16, 128)
    for splits, columns, match in (
        ((5, 8, 5), 24, "head_splits: expected"),
        ((16, -8, 16), 24, "head_splits: expected"),
        ((0, 8, 0), 24, "head_splits: expected"),
        ((8, 8), 24, "head_splits: expected"),
        ((8, 4, 8), 16, "d: expected shape"),
    ):
        with pytest.raises(ValueError, match=match):
            deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, torch.zeros(8, columns), splits)


def test_nothing_is_recorded_for_gradients():
    a, b = operands(8, 16, 128)
    d = torch.empty(8, 16, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, (b.data, torch.nn.Parameter(b.scale)), d)
    assert not d.requires_grad and torch.equal(d, gemm(a, b))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"a": lambda a: (a.data.view(torch.int8), a.scale)}, NotImplementedError, "a: expected float8_e4m3fn.*FP4"),
        ({"b": lambda b: (b.data.view(torch.uint8), b.scale)}, NotImplementedError, "b: expected float8_e4m3fn.*FP4"),
        ({"a": lambda a: a.data}, TypeError, "a: expected an FP8Tensor or a"),
        ({"a": lambda a: (a.data, a.scale[:, :1])}, ValueError, "a.scale: expected shape"),
        ({"a": lambda a: (a.data, a.scale.int())}, ValueError, "a.scale: expected 1 int32"),
        ({"d": lambda d: d[:, :-8]}, ValueError, "d: expected shape"),
        ({"d": lambda d: d.half()}, TypeError, "d: expected bfloat16 or float32"),
        ({"c": lambda _: torch.zeros(8, 16)}, TypeError, "c: expected bfloat16"),
        ({"recipe": lambda _: (1, 1, 32)}, NotImplementedError, "recipe: expected"),
        ({"recipe_a": lambda _: (1, 32), "recipe_b": lambda _: (1, 32)}, NotImplementedError, "recipe: expected"),
        ({"recipe_a": lambda _: (1, 128), "recipe_b": lambda _: (1, 32)}, NotImplementedError, "recipe_a, recipe_b: "),
        ({"recipe": lambda _: (1, 1, 128), "d": lambda d: d[0]}, ValueError, "d: expected shape"),
        ({"recipe": lambda _: (1, 1, 128)}, ValueError, "b.scale: expected shape"),
    ],
)
def test_wrong_arguments(change, error, match):
    a, b = operands(8, 16, 384)
    arguments = {"a": a, "b": b, "d": torch.full((8, 16), 7.0, dtype=torch.bfloat16), "c": None, "recipe": None}
    d = arguments["d"]
    arguments |= {name: make(arguments.get(name)) for name, make in change.items()}
    with pytest.raises(error, match=match):
        deep_gemm.fp8_gemm_nt(**arguments)
    assert (d == 7).all()
    assert issubclass(NotImplementedError, RuntimeError)  # which DeepGEMM raises


# ---- layouts ----


@pytest.mark.parametrize("shape", [(70, 3), (72, 1), (1, 5), (3, 70, 5), (1, 70, 5), (2, 0, 3)])
@pytest.mark.parametrize("name", ["get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor"])
def test_mn_major(name, shape):
    function, sf = getattr(deep_gemm, name), torch.randn(shape)
    aligned = function(sf)
    assert torch.equal(aligned, sf)
    assert aligned.stride() == empty_mn_major(shape, device="cpu").stride()
    assert function(aligned) is aligned


def test_mn_major_of_a_part_is_a_copy():
    whole = empty_mn_major((2, 70, 5), device="cpu").normal_()
    assert deep_gemm.get_mn_major_tma_aligned_tensor(whole[0]).data_ptr() == whole.data_ptr()
    part = whole[:, :, :3]
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(part)
    assert aligned is not part and aligned.stride() == (216, 1, 72) and torch.equal(aligned, part)


def test_packed_layout():
    sf = quantize_1x128(torch.randn(70, 1100), scale_format="ue8m0").scale
    words = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    assert words.dtype is torch.int32 and words.stride() == (1, 72) and torch.equal(words, packed(sf))
    between = sf * 1.5
    rounded = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(between)
    assert torch.equal(rounded, packed(deep_gemm.utils.ceil_to_ue8m0(between)))


def test_required_layout():
    transform = deep_gemm.transform_sf_into_required_layout
    activations, weights = torch.randn(70, 3), torch.randn(4, 2, 3)
    aligned = transform(activations, 70, 300, (1, 128, 128), is_sfa=True)
    assert torch.equal(aligned, activations) and aligned.stride() == (1, 72)
    assert transform(aligned, 70, 300, (1, 128), is_sfa=True) is aligned
    assert transform(weights, 200, 300, (1, 128, 128), 4) is weights
    assert transform(sf=weights, mn=200, k=300, recipe=(128, 128), num_groups=4, disable_ue8m0_cast=True) is weights
    masked = transform(torch.randn(4, 70, 3), 70, 300, (1, 128, 128), 4, True)
    assert masked.stride() == (216, 1, 72) and transform(masked, 70, 300, (1, 128, 128), 4, True) is masked
    words = torch.ones(70, 1, dtype=torch.int32)
    assert torch.equal(transform(words, 70, 300, (1, 1, 128), is_sfa=True), words)
    with pytest.raises(ValueError, match=r"sf: expected shape \(70, 3\)"):
        transform(activations[:, :2], 70, 300, (1, 128, 128), is_sfa=True)
    with pytest.raises(NotImplementedError, match="recipe: expected blocks"):
        transform(activations, 70, 300, (1, 32), is_sfa=True)


def test_sizes():
    assert [deep_gemm.get_tma_aligned_size(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert deep_gemm.get_tma_aligned_size(17, 1) == 32
    assert deep_gemm.ceil_div(257, 128) == 3 and deep_gemm.utils.math.align(257, 128) == 384


# ---- casts ----


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_casts(use_ue8m0):
    x, scale_format = torch.randn(256, 384), "ue8m0" if use_ue8m0 else "float32"
    for cast, expected in (
        (deep_gemm.per_token_cast_to_fp8, quantize_1x128(x, scale_format=scale_format)),
        (deep_gemm.per_block_cast_to_fp8, quantize_128x128(x, scale_format=scale_format)),
    ):
        data, scale = cast(x, use_ue8m0)
        assert torch.equal(bits(data), bits(expected.data)) and torch.equal(scale, expected.scale)
        assert relative_error(dequantize((data, scale)), x) < 0.04
    data, scale = deep_gemm.per_channel_cast_to_fp8(x, use_ue8m0)
    assert data.shape == (256, 384) and scale.shape == (2, 384)
    assert relative_error(data.double() * scale.double().repeat_interleave(128, 0), x) < 0.04
    if not use_ue8m0:
        assert torch.equal(bits(data.t()), bits(quantize_128x1(x).data))
    assert not use_ue8m0 or (scale.log2() == scale.log2().round()).all()


def test_packed_cast():
    x = torch.randn(70, 640)
    data, words = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=128, use_packed_ue8m0=True)
    expected = quantize_1x128(x, scale_format="ue8m0")
    assert torch.equal(words, packed(expected.scale)) and torch.equal(bits(data), bits(expected.data))
    with pytest.raises(NotImplementedError, match="gran_k: expected 128"):
        deep_gemm.per_token_cast_to_fp8(x, True, 32)


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_cast_by_dimensions(use_ue8m0):
    x = torch.randn(70, 64) * torch.arange(1, 71)[:, None]
    data, scale = deep_gemm.utils.per_custom_dims_cast_to_fp8(x, (0,), use_ue8m0)
    expected = quantize_1x128(x, scale_format="ue8m0" if use_ue8m0 else "float32")
    assert torch.equal(bits(data), bits(expected.data)) and torch.equal(scale, expected.scale[:, 0])
    data, scale = deep_gemm.per_custom_dims_cast_to_fp8(x.view(7, 10, 64).bfloat16(), (0, -1), use_ue8m0)
    assert scale.shape == (7, 64) and relative_error(data.double() * scale[:, None], x.view(7, 10, 64)) < 0.06


# ---- settings ----


def test_num_sms_is_the_setting():
    assert deep_gemm.get_num_sms() > 0
    deep_gemm.set_num_sms(7)
    assert config.settings.num_sms == 7 and deep_gemm.get_num_sms() == 7
    for wrong, error in ((0, ValueError), (True, TypeError)):
        with pytest.raises(error, match="num_sms: expected"):
            deep_gemm.set_num_sms(wrong)


def test_plans_follow_num_sms(monkeypatch):
    monkeypatch.setattr(launch, "device_guard", lambda index: nullcontext())
    plan = planned(lambda index, shape: object())
    first = plan(0, "shape")
    assert plan.find(0, "shape") is first
    deep_gemm.set_num_sms(7)
    assert plan.find(0, "shape") is None
    second = plan(0, "shape")
    assert second is not first and plan.find(0, "shape") is second


def test_other_settings_are_kept():
    kept = {"tc_util": 80, "pdl": True, "compile_mode": 1, "mk_alignment_for_contiguous_layout": 64}
    for name, value in kept.items():
        getattr(deep_gemm, f"set_{name}")(value)
        assert getattr(deep_gemm, f"get_{name}")() == value
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 64
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout() == 128
    with pytest.raises(ValueError, match="tc_util: expected 0 to 100"):
        deep_gemm.set_tc_util(101)
    with pytest.raises(ValueError, match="alignment: expected at least 1"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(0)


def test_settings_without_effect_are_taken():
    deep_gemm.set_ignore_compile_dims(True)
    for multiple_of in ((16, 64), ((16, 64),), (16,)):
        deep_gemm.set_block_size_multiple_of(*multiple_of)


def test_determinism_is_batch_invariance():
    for enabled in (True, False):
        deep_gemm.use_deterministic_algorithms(enabled)
        assert config.settings.batch_invariant is deep_gemm.get_deterministic_algorithms() is enabled
    with pytest.raises(TypeError, match="enabled: expected a bool"):
        deep_gemm.use_deterministic_algorithms(1)


# ---- testing ----


def test_calc_diff():
    x = torch.randn(100)
    assert deep_gemm.testing.calc_diff(x, x) == pytest.approx(0, abs=1e-12)
    assert deep_gemm.testing.calc_diff(x, -x) == pytest.approx(2)
    assert deep_gemm.testing.calc_diff(x * 0, x * 0) == 0
    y = x + 0.1
    expected = ((x - y).double().square().sum() / (x.double().square() + y.double().square()).sum()).item()
    assert deep_gemm.calc_diff(x, y) == pytest.approx(expected)


def test_bitwise_equal():
    x = torch.tensor([[0.0, float("nan")]])
    deep_gemm.testing.assert_bitwise_equal(x.t(), x.t().clone())
    for other in (-x, x.view(2), x.double()):
        with pytest.raises(AssertionError):
            deep_gemm.testing.assert_bitwise_equal(x, other)


def test_decorators_by_a_condition(monkeypatch, capsys):
    monkeypatch.setenv("FP8MOE_A_NAME", "1")
    runs, ignored, seen = True, False, []

    @deep_gemm.testing.ignore_env("FP8MOE_A_NAME", lambda: ignored)
    @deep_gemm.testing.test_filter(lambda: runs)
    def function(value):
        seen.append((value, os.environ.get("FP8MOE_A_NAME")))

    function(1)
    ignored = True
    function(2)
    runs = False
    function(3)
    assert seen == [(1, "1"), (2, None)] and os.environ["FP8MOE_A_NAME"] == "1"
    assert capsys.readouterr().out.startswith("function: ")


@pytest.mark.parametrize("name", ["cast_back_from_fp4", "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"])
def test_helpers_of_other_gpus_are_refused(name):
    with pytest.raises(NotImplementedError, match=f"{name}: .*Hopper"):
        getattr(deep_gemm.utils, name)(torch.zeros(1), torch.zeros(1))


def test_count_bytes():
    a, b = operands(8, 16, 128)
    assert deep_gemm.testing.count_bytes(a, [b, None], torch.zeros(3)) == 8 * 128 + 8 * 4 + 16 * 128 + 4 + 12


def test_bench_kineto(tmp_path):
    a, b = operands(8, 16, 128)
    d = torch.empty(8, 16, dtype=torch.bfloat16)
    calls = []
    call = lambda: calls.append(0) or deep_gemm.fp8_gemm_nt(a, b, d)  # noqa: E731
    trace = tmp_path / "trace.json"
    times = deep_gemm.testing.bench_kineto(call, ("fp8moe::gemm_out", "no such"), num_tests=3, trace_path=str(trace))
    assert len(calls) == 4 and 0 < times[0] < 10 and times[1] == 0 and trace.stat().st_size
    with pytest.raises(ValueError, match="kernel_names: expected the name of one kernel"):
        deep_gemm.bench_kineto(call, "::", num_tests=1)
    assert deep_gemm.bench_kineto(call, "::", num_tests=1, with_multiple_kernels=True) > 0


# ---- names ----

SIGNATURES = {
    "fp8_gemm_nt": "a, b, d, c=None, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False, recipe_a=None, "
    "recipe_b=None",
    "fp8_fp4_gemm_nt": "a, b, d, c=None, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False, recipe_a=None, "
    "recipe_b=None",
    "m_grouped_fp8_gemm_nt_contiguous": "a, b, d, grouped_layout, recipe=None, compiled_dims='nk', "
    "disable_ue8m0_cast=False, use_psum_layout=False, expected_m_for_psum_layout=None, recipe_a=None, recipe_b=None, "
    "ensure_zero_padding=False",
    "fp8_m_grouped_gemm_nt_masked": "a, b, d, masked_m, expected_m, recipe=None, compiled_dims='nk', "
    "disable_ue8m0_cast=False, recipe_a=None, recipe_b=None",
    "k_grouped_fp8_gemm_nt_contiguous": "a, b, d, ks, ks_tensor, c=None, recipe=(1, 1, 128), compiled_dims='mn', "
    "use_psum_layout=False",
    "fp8_gemm_nt_skip_head_mid": "a, b, d, head_splits, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False",
    "fp8_mqa_logits": "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0, "
    "logits_dtype=torch.float32, schedule_meta=None",
    "fp8_paged_mqa_logits": "q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, "
    "clean_logits=False, logits_dtype=torch.float32, indices=None",
    "get_paged_mqa_logits_metadata": "context_lens, block_size, num_sms, indices=None",
    "gemm_fp8_fp8_bf16_nt": "lhs, rhs, out",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": "lhs, rhs, out, m_indices",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": "lhs, rhs, out, masked_m, expected_m",
    "wgrad_gemm_fp8_fp8_fp32_nt": "lhs, rhs, out",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(deep_gemm, name))
    plain = [str(value.replace(annotation=inspect.Parameter.empty)) for value in signature.parameters.values()]
    assert ", ".join(plain) == SIGNATURES[name]


def test_names():
    for module in (deep_gemm, deep_gemm.utils, deep_gemm.utils.layout, deep_gemm.utils.math):
        assert all(hasattr(module, name) for name in module.__all__)
    assert deep_gemm.utils.get_mk_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_k_alignment_for_contiguous_layout() == 128
    for absent in ("fp8_fp4_mega_moe", "get_symm_buffer_for_mega_moe", "tf32_hc_prenorm_gemm", "einsum", "fp8_einsum"):
        assert getattr(deep_gemm, absent, None) is None
        with pytest.raises(AttributeError):
            getattr(deep_gemm, absent)
