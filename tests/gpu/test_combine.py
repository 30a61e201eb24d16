"""The combining kernel returns the bits of the reference: same products, same order, float32 throughout."""

import itertools

import pytest
import torch

from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.experts import reference
from fp8moe.kernels.experts.combine import Dtypes, combine, joins_norm, launcher, norm_launcher
from fp8moe.runtime.checks import FLOATING
from tests.errors import relative_error
from tests.gpu.checks import MARK, captured, marked, quantized_rows, same_bits, same_every_time, sizes_of_rows

pytestmark = pytest.mark.gpu

Y_DTYPES = (torch.bfloat16, torch.float32)
SIZES = ((1, 7168, 8), (1, 8, 1), (2, 128, 3), (7, 264, 6), (33, 576, 9), (65, 1048, 33), (130, 48, 64), (515, 2056, 8))
INDEX_DTYPES = (torch.int32, torch.int64)
EXPERTS = 40


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def random_rows(tokens: int, top_k: int, num_rows: int, seed: int = 0) -> torch.Tensor:
    """Rows of which some are outside of [0, num_rows), and a token without any."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bounds = -num_rows // 4 - 1, num_rows + num_rows // 4 + 1
    rows = torch.randint(*bounds, (tokens, top_k), dtype=torch.int32, generator=generator, device="cuda")
    rows[tokens // 2 : tokens // 2 + 1] = -1
    return rows


def write(y, rows, weights, out_dtype, sparse=False):
    """The result (tokens, H) of the kernel, in memory marked before and with nothing written behind it."""
    (num_rows, hidden), (tokens, top_k) = y.shape, rows.shape
    dtypes = Dtypes(y.dtype, weights.dtype, out_dtype)
    launch = launcher(y.get_device(), tokens, hidden, top_k, num_rows, dtypes, sparse=sparse)
    with marked(tokens * hidden * out_dtype.itemsize) as (out,):
        launch(y, rows, weights, None, None, None, out)
    return out.view(out_dtype).view(tokens, hidden)


def write_placed(y, index, weights, bound, out_dtype, residual=None):
    """The result of the kernel that takes experts in place of rows, in memory marked before, with nothing behind it."""
    (tokens, top_k), hidden = index.shape, y.shape[1]
    dtypes = Dtypes(y.dtype, weights.dtype, out_dtype, index.dtype)
    launch = launcher(y.get_device(), tokens, hidden, top_k, bound, dtypes, pdl=True)
    with marked(tokens * hidden * out_dtype.itemsize) as (out,):
        launch(y, index, weights, residual, None, None, out)
    return out.view(out_dtype).view(tokens, hidden)


def random_experts(tokens: int, top_k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of more than a few tokens some outside of [0, EXPERTS), and one token without any."""
    generator = torch.Generator("cuda").manual_seed(seed)
    index = torch.randint(EXPERTS, (tokens, top_k), generator=generator, device="cuda")
    if tokens > 2:
        limits = torch.iinfo(dtype)
        index[torch.rand(index.shape, generator=generator, device="cuda") < 0.2] = -1
        index[::3, 0], index[1::3, 0] = limits.max, EXPERTS
        index[tokens // 2] = limits.min
        if dtype is torch.int64:
            index[0, -1] = 2**32 + 1  # expert 1 to who takes the lower half only
    return index.to(dtype)


def random_placed(tokens, hidden, top_k, dtypes, seed=0):
    """y, index and weights of these dtypes, NaN where an assignment has no expert."""
    y_dtype, index_dtype, weight_dtype = dtypes
    y = random(tokens * top_k, hidden, dtype=y_dtype, seed=seed)
    index = random_experts(tokens, top_k, index_dtype, seed)
    there = (index >= 0) & (index < EXPERTS)
    y[~there.flatten()] = float("nan")
    weights = random(tokens, top_k, dtype=weight_dtype, seed=seed + 1)
    weights[~there] = float("nan")
    return y, index, weights


def expected_placed(y, index, weights, out_dtype, residual=None):
    order = torch.arange(index.numel(), dtype=torch.int32, device="cuda").view(index.shape)
    rows = torch.where((index >= 0) & (index < EXPERTS), order, -1)
    return reference.combine(y, rows, weights, out_dtype, residual)


def assert_matches(y, rows, weights, out_dtype):
    out = write(y, rows, weights, out_dtype)
    assert torch.equal(*(values.view(torch.uint8) for values in (write(y, rows, weights, out_dtype, sparse=True), out)))
    expected = reference.combine(y, rows, weights, out_dtype)
    assert out.dtype == expected.dtype and torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("tokens,hidden,top_k", SIZES)
@pytest.mark.parametrize("dtypes", list(itertools.product(Y_DTYPES, FLOATING, FLOATING)), ids=str)
def test_sizes(tokens, hidden, top_k, dtypes):
    y_dtype, weight_dtype, out_dtype = dtypes
    for num_rows in (1, tokens * top_k):
        y, weights = random(num_rows, hidden, dtype=y_dtype), random(tokens, top_k, dtype=weight_dtype, seed=1)
        assert_matches(y, random_rows(tokens, top_k, num_rows), weights, out_dtype)


@pytest.mark.parametrize("y_dtype", Y_DTYPES)
def test_more_tokens_than_warps(y_dtype):
    for tokens, hidden, top_k in ((3000, 7168, 8), (9000, 1040, 40)):
        y, weights = random(tokens * top_k, hidden, dtype=y_dtype), random(tokens, top_k, seed=1)
        rows = random_rows(tokens, top_k, len(y))
        for out_dtype in FLOATING:
            assert_matches(y, rows, weights, out_dtype)
        residual = random(tokens, hidden, dtype=torch.bfloat16, seed=2)
        got = combine(y, rows, weights, torch.bfloat16, residual=residual)
        assert torch.equal(got, reference.combine(y, rows, weights, torch.bfloat16, residual))


def test_equals_the_reference_on_the_cpu():
    y, weights, rows = random(300, 1000, dtype=torch.bfloat16), random(40, 8), random_rows(40, 8, 300)
    for out_dtype in FLOATING:
        got = combine(y, rows, weights, out_dtype)
        assert torch.equal(got.cpu(), combine(y.cpu(), rows.cpu(), weights.cpu(), out_dtype))


@pytest.mark.parametrize("y_dtype", Y_DTYPES)
def test_unused_values_do_not_leak(y_dtype):
    y, weights = random(500, 520, dtype=y_dtype), random(100, 8)
    rows = random_rows(100, 8, 500)
    used = torch.zeros(500, dtype=torch.bool, device="cuda")
    used[rows[(rows >= 0) & (rows < 500)].long()] = True
    assert not used.all()
    y[~used] = float("nan")
    weights[(rows < 0) | (rows >= 500)] = float("nan")
    out = write(y, rows, weights, torch.float32)
    assert out.isfinite().all()
    assert_matches(y, rows, weights, torch.float32)
    y[int(rows[rows >= 0].clamp(max=499)[0])] = float("nan")
    y[7, 3] = float("inf")
    assert_matches(y, rows, weights, torch.bfloat16)


@pytest.mark.parametrize("out_dtype", FLOATING)
def test_residual(out_dtype):
    for tokens, hidden, top_k in SIZES:
        y, weights = random(tokens * top_k, hidden, dtype=torch.bfloat16), random(tokens, top_k, seed=1)
        rows, residual = random_rows(tokens, top_k, len(y)), random(tokens, hidden, dtype=out_dtype, seed=2)
        got = combine(y, rows, weights, out_dtype, residual=residual)
        assert torch.equal(got, reference.combine(y, rows, weights, out_dtype, residual))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("top_k", [3, 40])
def test_sums_of_some_tokens(top_k, sparse):
    """The residual has sums of some tokens only, and so does the result."""
    tokens, hidden, num_rows = 9000, 1040, 4000
    y, weights = random(num_rows, hidden, dtype=torch.bfloat16), random(tokens, top_k, seed=1)
    rows, residual = random_rows(tokens, top_k, num_rows), random(tokens, hidden, seed=2)
    rows[torch.rand(tokens, device="cuda") < 0.7, : top_k - 1] = -1
    rows[torch.rand(tokens, device="cuda") < 0.7, top_k - 1] = -1
    known = torch.rand(tokens, device="cuda") < 0.4
    residual[~known] = float("nan")
    out = torch.full((tokens, 4 * hidden), MARK, dtype=torch.uint8, device="cuda")
    now = torch.full((tokens,), MARK, dtype=torch.uint8, device="cuda")
    dtypes = Dtypes(y.dtype, weights.dtype, torch.float32)
    launch = launcher(y.get_device(), tokens, hidden, top_k, num_rows, dtypes, sparse=sparse)
    launch(y, rows, weights, residual, known, now, out)
    there = reference.valid_rows(rows, num_rows).any(1) | known
    assert there.any() and not there.all() and torch.equal(now, there.to(torch.uint8))
    expected = reference.combine(y, rows, weights, torch.float32, torch.where(known[:, None], residual, 0))
    assert torch.equal(out.view(torch.float32)[there], expected[there]) and (out[~there] == MARK).all()


def test_rows_out_of_range():
    limits = torch.iinfo(torch.int32)
    rows = torch.tensor([[limits.min, limits.max, 5], [-1, 4, 3], [6, 2, -5]], dtype=torch.int32, device="cuda")
    assert_matches(random(5, 256), rows, random(3, 3), torch.bfloat16)
    assert_matches(random(0, 256), rows, random(3, 3), torch.bfloat16)


def test_results_beyond_the_range_of_the_output():
    y = torch.tensor([[7e4, -7e4, 65519.0, 65520.0, 1e-8, 3e38, -3e38, 6e-8]], device="cuda")
    rows = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    for out_dtype in FLOATING:
        for weight in (0.5, 1.0):
            assert_matches(y, rows, torch.full((1, 2), weight, device="cuda"), out_dtype)


@pytest.mark.parametrize("tokens,hidden,top_k,num_rows", [(0, 128, 8, 0), (3, 0, 2, 6), (3, 32, 0, 4), (3, 32, 2, 0)])
def test_empty(tokens, hidden, top_k, num_rows):
    rows = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    torch.full((3 * 32 * 4,), MARK, dtype=torch.uint8, device="cuda")
    out = combine(random(num_rows, hidden), rows, random(tokens, top_k), torch.float32)
    assert torch.equal(out, torch.zeros(tokens, hidden, device="cuda"))


# Rows in the order of assignments.


@pytest.mark.parametrize("tokens,hidden,top_k", SIZES)
@pytest.mark.parametrize("dtypes", list(itertools.product(Y_DTYPES, INDEX_DTYPES, FLOATING)), ids=str)
def test_rows_of_assignments(tokens, hidden, top_k, dtypes):
    for out_dtype in FLOATING:
        operands = random_placed(tokens, hidden, top_k, dtypes)
        for residual in (None, random(tokens, hidden, dtype=out_dtype, seed=2)):
            out = write_placed(*operands, EXPERTS, out_dtype, residual)
            assert out.isfinite().all() and torch.equal(out, expected_placed(*operands, out_dtype, residual))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("y_dtype", Y_DTYPES)
def test_rows_of_assignments_of_many_tokens(y_dtype, index_dtype):
    for tokens, hidden, top_k in ((3000, 7168, 8), (9000, 1040, 40)):
        operands = random_placed(tokens, hidden, top_k, (y_dtype, index_dtype, torch.float32))
        residual = random(tokens, hidden, dtype=torch.bfloat16, seed=2)
        out = write_placed(*operands, EXPERTS, torch.bfloat16, residual)
        assert torch.equal(out, expected_placed(*operands, torch.bfloat16, residual))


@pytest.mark.parametrize("y_dtype", Y_DTYPES)
def test_only_used_values_of_assignments_leak(y_dtype):
    y, index, weights = random_placed(33, 576, 9, (y_dtype, torch.int64, torch.float32))
    index[5, 4], weights[5, 4] = EXPERTS - 1, 1.0
    y[5 * 9 + 4] = 0
    y[5 * 9 + 4, 17] = float("nan")
    out = write_placed(y, index, weights, EXPERTS, torch.float32)
    assert out.isnan().nonzero().tolist() == [[5, 17]]


def test_same_bits_of_assignments_every_time():
    operands = random_placed(700, 1040, 8, (torch.bfloat16, torch.int64, torch.float32))
    same_every_time(lambda: write_placed(*operands, EXPERTS, torch.bfloat16))


def test_cuda_graph_of_assignments_with_changed_input():
    """Right behind a kernel that writes what is added up."""
    dtypes = torch.bfloat16, torch.int64, torch.float32
    new = random_placed(77, 1040, 8, dtypes)
    operands = [torch.empty_like(value) for value in new]
    out = torch.empty(77, 1040, dtype=torch.bfloat16, device="cuda")
    form = Dtypes(torch.bfloat16, torch.float32, out.dtype, torch.int64)
    launch = launcher(out.get_device(), 77, 1040, 8, EXPERTS, form, pdl=True)

    def run():
        for value, source in zip(operands, new, strict=True):
            value.copy_(source)
        launch(*operands, None, None, None, out)

    graph, _ = captured(run)
    for seed in range(1, 4):
        for value, source in zip(new, random_placed(77, 1040, 8, dtypes, seed), strict=True):
            value.copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected_placed(*new, torch.bfloat16))


def test_past_two_to_the_31_elements():
    tokens, hidden, top_k = 37_500, 7168, 8
    num_rows = tokens * top_k
    assert num_rows * hidden > 1 << 31
    y = torch.empty(num_rows, hidden, dtype=torch.bfloat16, device="cuda").normal_()
    rows = torch.randperm(num_rows, device="cuda").int().view(tokens, top_k)
    weights = random(tokens, top_k)
    out = combine(y, rows, weights, torch.bfloat16)
    for some in (slice(0, 100), slice(tokens // 2, tokens // 2 + 100), slice(tokens - 100, tokens)):
        assert torch.equal(out[some], reference.combine(y, rows[some], weights[some], torch.bfloat16))
    del out, y
    y = torch.ones(1, 8, dtype=torch.bfloat16, device="cuda")
    tokens = (1 << 28) + 1
    out = combine(y, torch.zeros(tokens, 1, dtype=torch.int32, device="cuda"), y[:, :1].expand(tokens, 1), y.dtype)
    assert out.numel() > 1 << 31 and (out == 1).all()


# ---- with the norm of the result ----

NORM_SIZES = (
    *((1, 2048, 8), (8, 2048, 8), (3, 7168, 8), (64, 2048, 8), (1, 16, 1), (2, 144, 3), (7, 576, 6), (33, 1048, 33)),
    *((5, 2880, 4), (9, 4096, 2), (2, 5120, 7), (1, 8192, 5), (2, 72, 64)),
)


def write_normed(y, rows, weights, residual, norm_weight, quantized, eps=1e-6):
    """What the kernel writes to memory marked before: the sums, and their norm as values or as data and scale."""
    (num_rows, hidden), (tokens, top_k) = y.shape, rows.shape
    dtypes = Dtypes(y.dtype, weights.dtype, y.dtype)
    launch = norm_launcher(y.get_device(), tokens, hidden, top_k, num_rows, dtypes, eps)
    nbytes = tokens * hidden * y.itemsize
    with marked(nbytes, nbytes, *sizes_of_rows(tokens, hidden)) as (out, values, *codes):
        launch(y, rows, weights, residual, norm_weight, out, *((None, *codes) if quantized else (values, None, None)))
    assert all((part == MARK).all() for part in ((values,) if quantized else codes))
    out, values = (part.view(y.dtype).view(tokens, hidden) for part in (out, values))
    return (out, *quantized_rows(*codes, tokens, hidden)) if quantized else (out, values)


def raw(value):
    """PyTorch indexes no float8."""
    return value.view(torch.uint8) if value.itemsize == 1 else value


def by_two_kernels(y, rows, weights, residual, norm_weight, quantized, eps=1e-6):
    out = combine(y, rows, weights, y.dtype, residual=residual)
    normed = rms_norm(out, norm_weight, eps, values=not quantized, quantized=quantized)
    return (out, *normed.quantized) if quantized else (out, normed.values)


def normed_operands(tokens, hidden, top_k, dtype, weight_dtype=torch.float32, seed=0):
    """y, rows, weights, residual and the norm's weight."""
    num_rows = tokens * top_k
    y, rows = random(num_rows, hidden, dtype=dtype, seed=seed), random_rows(tokens, top_k, num_rows, seed=seed)
    weights = random(tokens, top_k, dtype=weight_dtype, seed=seed + 1)
    residual, norm_weight = (
        random(tokens, hidden, dtype=dtype, seed=seed + 2),
        random(hidden, dtype=dtype, seed=seed + 3),
    )
    return y, rows, weights, residual, norm_weight


@pytest.mark.parametrize("tokens,hidden,top_k", NORM_SIZES)
@pytest.mark.parametrize("dtype,weight_dtype", list(zip((*Y_DTYPES, *Y_DTYPES), (*FLOATING, FLOATING[2]), strict=True)))
def test_norm_has_the_bits_of_two_kernels(tokens, hidden, top_k, dtype, weight_dtype):
    if not joins_norm(tokens, hidden, Dtypes(dtype, weight_dtype, dtype)):
        assert hidden * dtype.itemsize > 32 << 10
        return
    for seed in range(3):
        y, rows, weights, residual, norm_weight = normed_operands(tokens, hidden, top_k, dtype, weight_dtype, seed)
        for added, quantized in itertools.product((None, residual), (False, True)):
            got = write_normed(y, rows, weights, added, norm_weight, quantized)
            expected = by_two_kernels(y, rows, weights, added, norm_weight, quantized)
            assert same_bits(got, expected)
        exact = (
            got[0].double() * (got[0].double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight.double()
        )
        values = write_normed(y, rows, weights, residual, norm_weight, False)[1]
        assert relative_error(values, exact) < (1e-6 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("hidden", [144, 2048, 7168])
@pytest.mark.parametrize("dtype", Y_DTYPES)
def test_norm_of_bad_values_stays_in_its_token(hidden, dtype):
    y, _, weights, residual, norm_weight = normed_operands(9, hidden, 8, dtype)
    rows = torch.randperm(72, generator=torch.Generator("cuda").manual_seed(0), device="cuda").int().view(9, 8)
    rows[4] = -1  # no row: the residual alone
    clean = write_normed(y, rows, weights, residual, norm_weight, True)
    unused = torch.ones(72, dtype=torch.bool, device="cuda")
    unused[rows[rows >= 0].long()] = False
    y[unused] = float("nan")
    for token, value in ((1, float("nan")), (8, float("inf"))):
        odd = y.clone()
        odd[rows[token, 3], hidden - 1] = value
        for quantized in (False, True):
            got = write_normed(odd, rows, weights, residual, norm_weight, quantized)
            expected = by_two_kernels(odd, rows, weights, residual, norm_weight, quantized)
            assert not got[0][token].isfinite().all()
            for one, two in zip(got, expected, strict=True):
                assert torch.equal(one.float().isnan(), two.float().isnan())
        others = [t for t in range(9) if t != token]
        assert all(same_bits(one[others], two[others]) for one, two in zip(map(raw, got), map(raw, clean), strict=True))


def test_norm_has_the_same_bits_every_time_and_in_any_batch():
    y, rows, weights, residual, norm_weight = normed_operands(64, 2048, 8, torch.bfloat16)
    first = same_every_time(lambda: write_normed(y, rows, weights, residual, norm_weight, True))
    for token in (0, 7, 63):
        some = slice(token, token + 1)
        alone = write_normed(y, rows[some], weights[some], residual[some], norm_weight, True)
        assert all(same_bits(one, two[some]) for one, two in zip(map(raw, alone), map(raw, first), strict=True))
