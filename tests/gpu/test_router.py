"""The kernels of a router: logits and weights within float32's rounding of float64, choices that are the best ones."""

import itertools
import math

import pytest
import torch

from fp8moe.kernels.decoder_ops.router import (
    ChosenExperts,
    Form,
    by_kernel,
    logits_launcher,
    route_launcher,
    router_logits,
    sorted_launcher,
)
from fp8moe.kernels.experts import sort_by_expert
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import device_guard
from tests.backends import on_reference
from tests.errors import error_in_its_dtype
from tests.gpu.checks import captured, marked, same_bits
from tests.kernels.test_router import test_sorted_with_the_choice  # noqa: F401
from tests.router_cases import FORMS, SOFTMAX, arguments, exact_route, route

pytestmark = pytest.mark.gpu

# tokens, experts, H
SIZES = (
    *((1, 128, 2048), (1, 256, 7168), (2, 60, 2048), (3, 8, 4096), (5, 133, 576), (8, 128, 2048), (9, 160, 5120)),
    *((17, 300, 1000), (18, 256, 7168), (33, 64, 130), (64, 128, 2048), (64, 1024, 1024), (64, 7, 7), (7, 2000, 512)),
    *((65, 128, 2048), (300, 64, 131), (1, 1, 1), (4, 5, 16392)),
)
SORTED_FORMS = tuple(form for form in FORMS if form[0] <= 512)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def limit(dtype: torch.dtype) -> float:
    """Of errors in their dtype: float32 sums, and values next to a tie that round to the other side."""
    return 5e-6 if dtype is torch.float32 else 1e-3


# ---- logits ----


def write_logits(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The result of the kernel, in memory marked before and with nothing written behind it."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    vector = not (x.data_ptr() | weight.data_ptr() | hidden * x.itemsize) % 16
    index = x.get_device()
    with device_guard(index), marked(tokens * experts * out_dtype.itemsize) as (out,):
        logits_launcher(index, tokens, experts, hidden, (x.dtype, out_dtype), vector)(x, weight, bias, out)
    return out.view(out_dtype).view(tokens, experts)


@pytest.mark.parametrize("tokens,experts,hidden", SIZES)
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATING, FLOATING)), ids=str)
def test_logits(tokens, experts, hidden, dtypes):
    dtype, out_dtype = dtypes
    x, weight = random(tokens, hidden, dtype=dtype), random(experts, hidden, dtype=dtype, seed=1)
    for bias in (None, random(experts, dtype=dtype, seed=2)):
        expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        assert error_in_its_dtype(router_logits(x, weight, bias=bias, dtype=out_dtype), expected) < limit(out_dtype)
        if by_kernel(tokens, hidden * dtype.itemsize):
            assert error_in_its_dtype(write_logits(x, weight, out_dtype, bias), expected) < limit(out_dtype)


@pytest.mark.parametrize("experts", [128, 300])
def test_an_expert_or_a_token_touches_no_other(experts):
    x, weight = random(13, 2048, dtype=torch.bfloat16), random(experts, 2048, dtype=torch.bfloat16, seed=1)
    clean = write_logits(x, weight, torch.float32)
    x[3, 100], x[12, 2047] = math.nan, math.inf
    weight[experts - 1, 0], weight[7, 2000] = math.nan, -math.inf
    logits = write_logits(x, weight, torch.float32)
    touched = torch.zeros_like(logits, dtype=torch.bool)
    touched[[3, 12]], touched[:, [7, experts - 1]] = True, True
    assert not logits[touched].isfinite().any()
    assert torch.equal(logits[~touched], clean[~touched])


def test_logits_of_strided_operands():
    wide, weight = random(9, 2, 2100, dtype=torch.bfloat16), random(130, 2100, dtype=torch.bfloat16, seed=1)
    for columns in (slice(0, 2048), slice(1, 2049), slice(8, 2056), slice(0, 2000, 2)):
        x, w = wide[:, 1, columns], weight[:, columns]
        expected = x.double() @ w.double().t()
        assert error_in_its_dtype(router_logits(x, w, dtype=torch.float32), expected) < limit(torch.float32)


@pytest.mark.parametrize("tokens,experts,hidden", [(0, 8, 16), (3, 0, 16), (3, 8, 0)])
def test_empty_logits(tokens, experts, hidden):
    x, weight = random(tokens, hidden, dtype=torch.bfloat16), random(experts, hidden, dtype=torch.bfloat16)
    assert torch.equal(router_logits(x, weight, dtype=torch.float32), torch.zeros(tokens, experts, device="cuda"))


def test_many_tokens_use_float32_sums():
    x = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.full((64, 4096), 1 + 2**-7, dtype=torch.bfloat16, device="cuda")
    assert (router_logits(x, weight, dtype=torch.float32) == 4096 + 32).all()


# ---- route ----


def compiled(top_k: int, form: dict) -> Form:
    groups = form.get("num_groups", 1), form.get("top_groups", 1)
    return Form(top_k, form["score"] == "sigmoid", form.get("bias") is not None, *groups, form["normalize"])


def write(launcher, logits, top_k, form, out_dtype, types) -> list[torch.Tensor]:
    """What the kernel writes, to memory marked before: index and weights, and where it sorts groups and rows."""
    (tokens, experts), device = logits.shape, logits.get_device()
    counts = tokens * top_k, tokens * top_k, experts + 1, tokens * top_k
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, types, strict=False)]
    with device_guard(device), marked(*sizes) as parts:
        dtypes = logits.dtype, out_dtype
        launch = launcher(device, tokens, experts, compiled(top_k, form), form.get("scale", 1.0), dtypes)
        launch(logits, form.get("bias"), *parts)
    typed = (part.view(dtype) for part, dtype in zip(parts, types, strict=True))
    return [part if i == 2 else part.view(tokens, top_k) for i, part in enumerate(typed)]


def write_route(logits, top_k, form, out_dtype) -> list[torch.Tensor]:
    return write(route_launcher, logits, top_k, form, out_dtype, (torch.int64, out_dtype))


def assert_valid(index: torch.Tensor, experts: int) -> None:
    """In range and distinct."""
    ordered = index.sort(-1).values
    assert (ordered >= 0).all() and (ordered < experts).all() and (ordered.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("experts,top_k,form", FORMS, ids=str)
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATING, FLOATING)), ids=str)
def test_route(experts, top_k, form, dtypes):
    dtype, out_dtype = dtypes
    form = arguments(experts, form, "cuda")
    for tokens in (1, 5, 1000):
        logits = (2 * random(tokens, experts, seed=tokens)).to(dtype)
        index, weights = write_route(logits, top_k, form, out_dtype)
        assert_valid(index, experts)
        exact, missed = exact_route(logits, index, **form)
        assert missed.max() < 1e-6
        assert error_in_its_dtype(weights, exact) < limit(out_dtype)
        expected = on_reference(route, logits, top_k, **form, dtype=out_dtype)
        if form["bias"] is None and form.get("num_groups", 1) == 1:
            assert torch.equal(index, expected.index)  # both choose by the same bits, the logits
        else:
            assert (index == expected.index).all(-1).float().mean() >= 0.99


@pytest.mark.parametrize("experts,top_k,form", FORMS, ids=str)
def test_ties(experts, top_k, form):
    """Few values of logits and bias, so that the arithmetic is that of the reference or does not matter."""
    form = arguments(experts, form, "cuda")
    if form["bias"] is not None:
        form["bias"] = form["bias"].sign() * 4.0
    logits = torch.zeros(50, experts, device="cuda")
    logits[1:20] = random(19, experts).sign() * 8.0
    logits[20:40, ::3] = -0.0
    logits[40:] = -math.inf
    logits[40:, :1] = 0.0
    index, _ = write_route(logits, top_k, form, torch.float32)
    expected = on_reference(route, logits, top_k, **form, dtype=torch.float32)
    assert torch.equal(index, expected.index)


@pytest.mark.parametrize("experts,top_k,form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", FLOATING)
def test_nan_and_infinity_stay_in_their_tokens(experts, top_k, form, dtype):
    logits, form = random(40, experts, dtype=dtype), arguments(experts, form, "cuda")
    clean = write_route(logits, top_k, form, torch.float32)
    nan = torch.tensor(0x7FC00001, dtype=torch.int32, device="cuda").view(torch.float32).to(dtype)
    logits[1, experts // 2], logits[2], logits[3, -1], logits[4], logits[5, 0] = nan, nan, math.inf, -math.inf, -nan
    logits[6, : experts // 2] = nan
    index, weights = write_route(logits, top_k, form, torch.float32)
    assert_valid(index, experts)
    for token in (1, 2, 5):
        assert weights[token, 0].isnan()
    expected = on_reference(route, logits, top_k, **form, dtype=torch.float32)
    odd = slice(1, 7)
    assert torch.equal(weights[odd].isnan(), expected.weights[odd].isnan())
    assert torch.equal(index[[2, 4]], expected.index[[2, 4]])
    assert torch.equal(index[7:], clean[0][7:]) and torch.equal(weights[7:], clean[1][7:])
    assert torch.equal(weights[0], clean[1][0])


def assert_sorted(logits, top_k, form, out_dtype) -> ChosenExperts:
    """The bits of the two kernels."""
    types = torch.int64, out_dtype, torch.int32, torch.int32
    got = ChosenExperts(*write(sorted_launcher, logits, top_k, form, out_dtype, types))
    index, weights = write_route(logits, top_k, form, out_dtype)
    assert same_bits(got, (index, weights, *sort_by_expert(index, logits.shape[1])))
    return got


@pytest.mark.parametrize("experts,top_k,form", SORTED_FORMS, ids=str)
@pytest.mark.parametrize("dtype,out_dtype", list(zip(FLOATING, (*FLOATING[1:], FLOATING[0]), strict=True)), ids=str)
def test_route_sorted(experts, top_k, form, dtype, out_dtype):
    form = arguments(experts, form, "cuda")
    for tokens in (1, 2, 7, 8, 9, 15, 16):
        assert_sorted((2 * random(tokens, experts, seed=tokens)).to(dtype), top_k, form, out_dtype)


@pytest.mark.parametrize(
    "experts,top_k", [*zip((8, 128, 160, 256, 511, 512, 8), range(1, 8), strict=True), (8, 8), (160, 8), (512, 8)]
)
def test_route_sorted_of_each_top_k(experts, top_k):
    for tokens in (1, 11, 16):
        assert_sorted(random(tokens, experts, seed=tokens), top_k, SOFTMAX, torch.float32)


@pytest.mark.parametrize("experts,top_k,form", SORTED_FORMS, ids=str)
def test_route_sorted_of_ties_and_bad_values(experts, top_k, form):
    form = arguments(experts, form, "cuda")
    for tokens in (3, 11, 16):
        logits = random(tokens, experts).sign() * 8.0
        assert_sorted(logits, top_k, form, torch.float32)
        assert_sorted(torch.zeros_like(logits), top_k, form, torch.float32)  # all tokens to the same experts
        logits = random(tokens, experts)
        clean = assert_sorted(logits, top_k, form, torch.float32)
        logits[1, experts // 2], logits[2, : (experts + 1) // 2] = math.nan, math.inf
        got = assert_sorted(logits, top_k, form, torch.float32)
        assert_valid(got.index, experts)
        assert torch.equal(got.index[3:], clean.index[3:]) and torch.equal(got.weights[3:], clean.weights[3:])


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_cuda_graph_with_changed_input(tokens, sort):
    """Logits and their choice in a chain: each starts early and must wait for the one before."""
    x, weight = random(tokens, 2048, dtype=torch.bfloat16), random(128, 2048, dtype=torch.bfloat16, seed=1)

    def routed():
        logits = router_logits(x * 0.5, weight, dtype=torch.bfloat16)
        return logits, *route(logits, 8, **SOFTMAX, dtype=torch.bfloat16, sort=sort)

    graph, (logits, index, weights, *order) = captured(routed)
    for seed in range(3):
        x.copy_(random(tokens, 2048, seed=10 + seed))
        weight.copy_(random(128, 2048, seed=20 + seed))
        graph.replay()
        assert error_in_its_dtype(logits, 0.5 * x.double() @ weight.double().t()) < 1e-3
        expected = on_reference(route, logits, 8, **SOFTMAX, dtype=torch.bfloat16)
        assert torch.equal(index, expected.index)
        assert error_in_its_dtype(weights, expected.weights.double()) < 1e-3
        if sort and tokens <= 16:
            assert all(map(torch.equal, order, sort_by_expert(index, 128)))


def test_past_two_to_the_31_elements():
    experts, some = 1024, 100
    tokens = (1 << 31) // experts + 2 * some
    logits = torch.empty(tokens, experts, dtype=torch.bfloat16, device="cuda").normal_()
    routing = route(logits, 32, **SOFTMAX, dtype=torch.float32)
    for part in (slice(0, some), slice(tokens - some, tokens)):
        expected = route(logits[part], 32, **SOFTMAX, dtype=torch.float32)
        assert torch.equal(routing.index[part], expected.index)
        assert torch.equal(routing.weights[part], expected.weights)
