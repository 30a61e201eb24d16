"""The part of an experts layer that one rank's experts compute, on the CUDA backend."""

from functools import partial

import pytest
import torch

from fp8moe.kernels.experts import sort_by_expert
from fp8moe.quant.quantize import quantize_1x128
from tests import experts_cases
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, in_order, part
from tests.gpu.checks import captured, memory_of
from tests.gpu.test_experts import DTYPES, TOLERANCE, exact, make
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
SUMS = 1e-4  # of float32 sums in another order, few of which quantize to the next FP8 value
FEW = 3e-2  # of the same, where one of few values may quantize to the next FP8 value
GEMMS = 3e-3  # of row sums rounded to bfloat16, of GEMMs that may split K in another way
route = partial(experts_cases.route, device=DEVICE)


def random(tokens, hidden=272, dtype=torch.bfloat16):
    return torch.randn(tokens, hidden, device=DEVICE).to(dtype)


def local(index, start, end):
    """The same assignments without those to other ranks' experts."""
    return torch.where((index >= start) & (index < end), index, -1)


def tokens_of(own):
    return int((own >= 0).any(1).sum())


def check(layer, x, index, weights, start, end, **options):
    out = part(layer, x, index, weights, start, end, **options)
    assert out.shape == x.shape and out.dtype == torch.float32 and out.is_contiguous()
    own = local(index, start, end)
    none = (own < 0).all(1)
    assert not out[none].any()
    if not none.all():
        assert relative_error(out, exact(layer, x, own, weights)) <= (TOLERANCE if tokens_of(own) >= 64 else FEW)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shares(variant, dtype):
    layer = make(**VARIANTS[variant])
    row_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    for tokens in (1, 5, 64, 300):
        x, (index, weights) = random(tokens, dtype=dtype), route(tokens, 8, 3)
        arguments = (layer, x, index, weights)
        parts = [check(*arguments, start, start + 2, row_dtype=row_dtype) for start in (0, 2, 4, 6)]
        whole = part(*arguments, 0, 8, row_dtype=row_dtype)
        assert relative_error(in_order(parts), whole) <= (GEMMS if tokens >= 64 else FEW)
        # One rank with all experts has the layer's bits.
        assert torch.equal(whole.to(dtype), layer(x, index, weights))


@pytest.mark.parametrize("sizes", [(272, 96), (144, 320), (131, 77), (1, 1), (2048, 768)])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_sizes(sizes, variant):
    layer = make(4, *sizes, **VARIANTS[variant])
    for tokens in (0, 1, 9, 130):
        check(layer, random(tokens, sizes[0]), *route(tokens, 4, 2), 1, 3)


@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_benchmark_shape(tokens):
    layer = make(16, 7168, 2048)
    x, (index, weights) = random(tokens, 7168), route(tokens, 16, 8)
    parts = [check(layer, x, index, weights, start, start + 4) for start in range(0, 16, 4)]
    equal = in_order(parts).bfloat16() == layer(x, index, weights)
    assert equal.double().mean() >= 0.999


@pytest.mark.parametrize("hidden", [272, 131])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize("tokens", [0, 1, 33, 600])
def test_tokens_that_are_quantized_already(tokens, variant, hidden):
    layer = make(hidden_size=hidden, **VARIANTS[variant])
    x, (index, weights) = random(tokens, hidden), route(tokens, 8, 2)
    quantized = quantize_1x128(x)
    expected = part(layer, x, index, weights, 2, 6)
    for scale in (quantized.scale, quantized.scale.contiguous()):
        for _ in range(2):  # with a new plan and with a kept one
            assert torch.equal(part(layer, (quantized.data, scale), index, weights, 2, 6), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize("hidden", [272, 131])
def test_passes_over_windows_of_rows_add_up(dtype, variant, hidden):
    layer = make(hidden_size=hidden, **VARIANTS[variant])
    x, (index, weights) = random(200, hidden, dtype), route(200, 8, 3)
    index[:120, 0] = 3  # one expert has more rows than there is room for
    whole = check(layer, x, index, weights, 2, 5, row_dtype=dtype)
    used = int(sort_by_expert(index, 3, first_expert=2).groups[-1])
    for num_rows in (50, 97, used - 1, used):
        total = None
        for first_row in range(0, used, num_rows):
            window = {"first_row": first_row, "num_rows": num_rows}
            total = part(layer, x, index, weights, 2, 5, row_dtype=dtype, **window, partial=total)
        assert relative_error(total, whole) <= (SUMS if dtype is torch.float32 else GEMMS)
        total = known = None
        for first_row in reversed(range(0, used + num_rows, num_rows)):
            window = {"first_row": first_row, "num_rows": num_rows}
            now = torch.empty(200, dtype=torch.bool, device=DEVICE) if first_row else None
            sums = {"partial": total, "partial_known": known, "known": now}
            total, known = part(layer, x, index, weights, 2, 5, row_dtype=dtype, **window, **sums), now
            if first_row:
                rows = sort_by_expert(index, 3, first_expert=2).rows
                assert torch.equal(now, (rows >= first_row).any(1)) or hidden % 16 or variant != "plain"
                total[~now] = NAN
        assert relative_error(total, whole) <= (SUMS if dtype is torch.float32 else GEMMS)
    before = torch.randn(200, hidden, device=DEVICE)
    beyond = {"first_row": used, "num_rows": 64}
    assert torch.equal(part(layer, x, index, weights, 2, 5, **beyond, partial=before), before)


def test_no_token_of_this_rank():
    layer = make()
    x, (index, weights) = random(9), route(9, 8, 2)
    for value in (-1, 1, 6, 8, 2**31 - 1, -(2**31), 2**40, -(2**40)):
        assert not part(layer, x, torch.full_like(index, value), weights, 2, 6).any()


@pytest.mark.parametrize("quantized", [False, True])
def test_bad_value_touches_its_token_only(quantized):
    layer = make()
    x, (index, weights) = random(40), route(40, 8, 2)
    index[7] = torch.tensor([3, 0])

    def run(x):
        return part(layer, quantize_1x128(x) if quantized else x, index, weights, 2, 6)

    clean = run(x)
    for bad in (NAN, float("inf")):
        dirty = x.clone()
        dirty[7, -1] = bad
        out = run(dirty)
        assert not out[7].isfinite().any()
        out[7] = clean[7]
        assert torch.equal(out, clean)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_graph_replays_with_other_routing(tokens, quantized):
    layer = make(16, 576, 208)
    x, (index, weights) = random(tokens, 576), route(tokens, 16, 4)
    num_rows = max(tokens, 4)

    def passes():
        """All that could be needed, in windows."""
        tokens_of_all = quantize_1x128(x) if quantized else x
        total = None
        for first_row in range(0, index.numel(), num_rows):
            window = {"first_row": first_row, "num_rows": num_rows}
            total = part(layer, tokens_of_all, index, weights, 4, 10, **window, partial=total)
        return total

    graph, out = captured(passes)
    for seed in range(1, 6):
        x.normal_()
        for static, new in zip((index, weights), route(tokens, 16, 4, seed), strict=True):
            static.copy_(new)
        if seed == 3:
            index.fill_(5)  # all to one expert
            index[:, 1:] = -1
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, passes())
        own = local(index, 4, 10)
        if (own >= 0).any():
            assert relative_error(out, exact(layer, x, own, weights)) <= TOLERANCE


def test_nothing_waits_for_the_gpu():
    layers = [make(), make(**VARIANTS["gelu"])]
    x, routing = random(9), route(9, 8, 2)
    quantized = quantize_1x128(x)
    calls = [(layer, value, *routing, 2, 6) for layer in layers for value in (x, quantized)]
    for call in calls:
        part(*call, num_rows=12)
    with no_waiting():
        for call in calls:
            part(*call, num_rows=12)


@pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float32])
def test_memory_of_a_call(row_dtype):
    """As `GroupedExperts` documents it, for the rows that there is to be room for."""
    tokens, experts, top_k, hidden, size, rows = 2048, 8, 8, 2048, 1024, 2600
    layer = make(experts, hidden, size)
    arguments = (layer, quantize_1x128(random(tokens, hidden)), *route(tokens, experts, top_k), 2, 3)
    options = {"num_rows": rows, "row_dtype": row_dtype}
    out, peak, _ = memory_of(lambda: part(*arguments, **options))
    documented = rows * ((1 + row_dtype.itemsize) * hidden + size + (hidden + size) // 32) + 4 * tokens * top_k
    # The allocator rounds up, to a megabyte where it splits a large block.
    assert peak <= out.nbytes + documented + (4 << 20)
