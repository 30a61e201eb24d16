"""The transposing quantizer: reference backend, layouts, errors, operator, and the compiled kernels."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.quant import transpose
from fp8moe.quant.formats import padded_rows
from fp8moe.quant.quantize import quantize_1x128, quantize_128x128
from fp8moe.quant.transpose import quantize_columns, quantize_with_transpose
from fp8moe.runtime.checks import FLOATING
from tests.errors import refused
from tests.ptxas import without_spills
from tests.random_values import random
from tests.scales import is_mn_major

NOTHING = torch.iinfo(torch.int32).min


def offsets_of(sizes: list[int], first: int = 0) -> torch.Tensor:
    return torch.tensor([first, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = torch.uint8 if a.dtype == torch.float8_e4m3fn else torch.int32
    return a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def assert_columns(t, rows: torch.Tensor, groups: list[tuple[int, int]]) -> None:
    """`columns` hold the transposes of the groups' rows, one after the other, padded with zeros."""
    begin = 0
    for e, (start, end) in enumerate(groups):
        assert t.offsets[e] == begin
        size = -(-(end - start) // 128) * 128
        padded = rows.new_zeros(size, rows.shape[1])
        padded[: end - start] = rows[start:end]
        data, scale = quantize_1x128(padded.t())
        assert same_bits(t.columns.data[:, begin : begin + size], data)
        assert same_bits(t.columns.scale[:, begin // 128 : (begin + size) // 128], scale)
        begin += size
    assert t.offsets[-1] == begin and t.offsets.dtype == torch.int32 and len(t.offsets) == len(groups) + 1


# ---- numbers ----


@given(
    sizes=st.lists(st.sampled_from((0, 1, 5, 127, 128, 129, 200)), min_size=1, max_size=6),
    first=st.integers(0, 3),
    after=st.integers(0, 3),
    features=st.sampled_from((1, 7, 128, 200, 256)),
    dtype=st.sampled_from(FLOATING),
    seed=st.integers(0, 1000),
)
def test_rows_and_columns_of_groups(sizes, first, after, features, dtype, seed):
    offsets = offsets_of(sizes, first)
    count = int(offsets[-1]) + after
    x = random(count, features, dtype=dtype, seed=seed)
    t = quantize_with_transpose(x, offsets)
    data, scale = quantize_1x128(x)
    inside = slice(first, int(offsets[-1]))
    assert same_bits(t.rows.data[inside], data[inside]) and same_bits(t.rows.scale[inside], scale[inside])
    bounds = offsets.tolist()
    assert_columns(t, x, list(zip(bounds, bounds[1:], strict=False)))


@given(
    sizes=st.lists(st.sampled_from((0, 1, 5, 127, 128, 129, 200)), min_size=1, max_size=6),
    features=st.sampled_from((1, 7, 128, 200, 256)),
    dtype=st.sampled_from(FLOATING),
    bad=st.sampled_from((0.0, math.nan, math.inf, -math.inf)),
)
def test_columns_in_blocks_of_finite_values(sizes, features, dtype, bad):
    """Of each group, the bits of quantize_128x128; what is not finite is NaN, and changes nothing else."""
    offsets = offsets_of(sizes)
    x = random(int(offsets[-1]), features, dtype=dtype)
    t = quantize_with_transpose(x, offsets, blocks=True)
    assert t.columns.data.is_contiguous() and is_mn_major(t.columns.scale)
    begin = 0
    for start, end in itertools.pairwise(offsets.tolist()):
        size = -(-(end - start) // 128) * 128
        data, scale = quantize_128x128(F.pad(x[start:end], (0, 0, 0, size - (end - start))).t())
        assert same_bits(t.columns.data[:, begin : begin + size], data)
        assert same_bits(t.columns.scale[:, begin // 128 : (begin + size) // 128], scale)
        begin += size
    if len(x):
        clean, x[-1, 0] = x.clone(), bad
        clean[-1, 0] = 0
        t, expected = (quantize_with_transpose(value, offsets, blocks=True) for value in (x, clean))
        last = max(group for group, size in enumerate(sizes) if size)
        place = int(t.offsets[last]) + sizes[last] - 1
        assert t.columns.data[0, place].isnan() == (bad != 0)
        t.columns.data[0, place] = 0
        assert torch.equal(t.columns.data.float(), expected.columns.data.float())
        assert same_bits(t.columns.scale, expected.columns.scale)
        assert same_bits(t.rows.data, quantize_1x128(x).data)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_block_without_finite_values(value):
    t = quantize_with_transpose(torch.full((130, 8), value), blocks=True)
    assert t.columns.data[:, :130].isnan().all() and not t.columns.data[:, 130:].float().any()
    assert t.columns.scale.isfinite().all()


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 300])
def test_one_group_without_offsets(rows):
    x = random(rows, 96, dtype=torch.bfloat16)
    t, expected = quantize_with_transpose(x), quantize_with_transpose(x, offsets_of([rows]))
    for got, want in zip((*t.rows, *t.columns), (*expected.rows, *expected.columns), strict=True):
        assert same_bits(got, want)
    assert_columns(t, x, [(0, rows)])


def test_tokens_are_gathered_and_others_are_zero():
    x = random(20, 200, dtype=torch.bfloat16)
    tokens = torch.tensor([3, 3, -1, 19, 20, NOTHING, 2**31 - 1, 0], dtype=torch.int32)
    gathered = torch.stack([x[t] if 0 <= t < 20 else torch.zeros_like(x[0]) for t in tokens.tolist()])
    t, expected = quantize_with_transpose(x, tokens=tokens), quantize_with_transpose(gathered)
    for got, want in zip((*t.rows, *t.columns), (*expected.rows, *expected.columns), strict=True):
        assert same_bits(got, want)
    # No token to pick from.
    t = quantize_with_transpose(x[:0], tokens=tokens)
    assert not t.rows.data.float().any() and not t.columns.data.float().any() and t.offsets.tolist() == [0, 128]


@pytest.mark.parametrize(
    "offsets,groups",
    [
        ((-5, 30, 80), [(0, 30), (30, 80)]),
        ((0, 40, 9999), [(0, 40), (40, 100)]),
        ((50, 20, 40), [(50, 50), (20, 40)]),
        ((500, 600, 700), [(100, 100), (100, 100)]),
        ((NOTHING, 2**31 - 1, NOTHING), [(0, 100), (100, 100)]),
    ],
)
def test_offsets_are_clamped(offsets, groups):
    x = random(100, 64, dtype=torch.bfloat16)
    t = quantize_with_transpose(x, torch.tensor(offsets, dtype=torch.int32))
    assert_columns(t, x, groups)


def test_groups_that_overlap_end_at_the_last_column():
    x = random(300, 64)
    offsets = torch.tensor([0, 300, 0, 300, 0, 300], dtype=torch.int32)  # 3 * 384 columns, of which there are 896
    t = quantize_with_transpose(x, offsets)
    assert t.columns.data.shape == (64, padded_rows(300, 5)) == (64, 896)
    assert t.offsets.tolist() == [0, 384, 384, 768, 768, 896]
    assert same_bits(t.columns.data[:, 768:], quantize_1x128(x[:128].t()).data)


@given(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=40), unused=st.integers(0, 3))
def test_padded_rows_is_enough(sizes, unused):
    rows = sum(sizes) + unused
    bound = padded_rows(rows, len(sizes))
    assert bound % 128 == 0 and bound >= sum(-(-size // 128) * 128 for size in sizes)
    assert bound <= rows + 127 * min(rows, len(sizes))


# ---- layouts ----


@pytest.mark.parametrize("rows,features,groups", [(300, 200, 4), (1, 1, 1), (5, 130, 9), (0, 64, 3), (7, 0, 2)])
def test_layout(rows, features, groups):
    t = quantize_with_transpose(random(rows, features), offsets_of([rows] + [0] * (groups - 1)))
    columns = padded_rows(rows, groups)
    assert t.rows.data.shape == (rows, features) and t.rows.data.is_contiguous()
    assert t.rows.scale.shape == (rows, -(-features // 128)) and is_mn_major(t.rows.scale)
    assert t.columns.data.shape == (features, columns) and t.columns.data.is_contiguous()
    assert t.columns.scale.shape == (features, columns // 128) and is_mn_major(t.columns.scale)
    assert t.offsets.tolist() == [0] + [-(-rows // 128) * 128] * groups


def test_result_is_detached():
    t = quantize_with_transpose(random(4, 128).requires_grad_())
    assert not any(part.requires_grad for part in (*t.rows, *t.columns, t.offsets))


# ---- errors ----


def test_errors():
    x, offsets = torch.zeros(4, 32), offsets_of([1, 3])
    tokens = torch.zeros(6, dtype=torch.int32)
    refused(ValueError, r"^x: expected shape \(M, F\), got \(1, 4, 32\)", quantize_with_transpose, x[None])
    with pytest.raises(ValueError, match=r"^group_offsets: expected shape \(E \+ 1,\) with E >= 1, got \(1,\)"):
        quantize_with_transpose(x, offsets[:1])
    with pytest.raises(ValueError, match=r"^tokens: expected shape \(R,\), got \(1, 6\)"):
        quantize_with_transpose(x, tokens=tokens[None])
    refused(ValueError, r"fewer than 2\*\*31 rows", quantize_with_transpose, torch.empty(2**31 - 100, 1, device="meta"))


def test_columns_alone():
    x = random(9, 200)
    offsets, tokens = offsets_of([3, 0, 130], 2), (torch.arange(140, dtype=torch.int32) * 5) % 11 - 1
    for groups, index in ((None, None), (offsets_of([3, 0, 4], 2), None), (offsets, tokens)):
        expected = quantize_with_transpose(x, groups, tokens=index, blocks=True)
        columns, ends = quantize_columns(x.requires_grad_(), groups, tokens=index)
        assert torch.equal(ends, expected.offsets) and not columns.data.requires_grad
        for got, want in zip(columns, expected.columns, strict=True):
            assert same_bits(got, want) and got.stride() == want.stride()
    refused(TypeError, "^x: expected a torch.Tensor", quantize_columns, None)
    refused(TypeError, "^group_offsets: expected a torch.Tensor", quantize_columns, x, 3)
    refused(TypeError, "^tokens: expected int32", lambda: quantize_columns(x, tokens=torch.zeros(3)))


# ---- kernels ----


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("by_rows", "blocks"), [(True, False), (True, True), (False, True)])
def test_every_variant_compiles_without_spills(dtype, vector, by_rows, blocks):
    spec = transpose.kernel_spec(dtype, vector, by_rows, blocks)
    report = without_spills(spec)
    assert report.static_smem <= 8 << 10
    # An SM of 65536 registers and 227 KB then holds 4 blocks of 256 threads, each of which takes 1 KB more.
    resident = 4 if vector and dtype != torch.float32 else 2
    assert report.registers <= 256 // resident
    assert resident * (report.static_smem + dict(spec.defines)["SHARED_BYTES"] + 1024) <= 227 << 10
