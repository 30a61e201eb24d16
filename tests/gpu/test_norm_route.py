"""RMSNorm, a router's logits and its choice in one kernel: the bits of the three kernels, and nothing else written."""

import itertools
import math

import pytest
import torch

from fp8moe import batch_invariant
from fp8moe.kernels.decoder_ops.norm_route import by_one_kernel, launcher, norm_route
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.decoder_ops.router import ChosenExperts, RouteOperands, RoutingRule, route, router_logits
from fp8moe.kernels.experts import sort_by_expert
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import device_guard
from tests import random_values
from tests.gpu.checks import MARK, captured, marked, quantized_rows, same_bits, same_every_time, sizes_of_rows
from tests.router_cases import DEEPSEEK, FORMS, SOFTMAX, arguments

pytestmark = pytest.mark.gpu

EPS = 1e-6
# experts, H
SIZES = (
    *((8, 4096), (128, 2048), (160, 5120), (60, 2880), (133, 576), (512, 136), (512, 2048), (256, 2560), (3, 64)),
    *((64, 7168), (7, 7), (64, 131), (300, 1001), (128, 8192), (64, 16384), (256, 4096)),
)
TOKENS = (1, 2, 3, 4)
RULE = RoutingRule(2, "softmax", True)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return random_values.random(*shape, dtype=dtype, device="cuda", spread=1.0, seed=seed)


def operands(tokens: int, experts: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """x, residual, norm_weight, weight and bias."""
    shapes = (tokens, hidden), (tokens, hidden), (hidden,), (experts, hidden), (experts,)
    return [random(*shape, dtype=dtype, seed=5 * seed + i) for i, shape in enumerate(shapes)]


def write(given, rule=RULE, choice_bias=None, dtypes=(torch.float32, torch.float32), quantized=True, eps=EPS):
    """What the kernel writes, to memory marked before; nothing behind it, nor between the scales."""
    x, _, _, weight, _ = given
    (tokens, hidden), experts, index = x.shape, len(weight), x.get_device()
    types = torch.int64, dtypes[1], torch.int32, torch.int32
    counts = tokens * rule.top_k, tokens * rule.top_k, experts + 1, tokens * rule.top_k
    chosen_sizes = (count * dtype.itemsize for count, dtype in zip(counts, types, strict=True))
    sizes = x.nbytes, x.nbytes, *sizes_of_rows(tokens, hidden), *chosen_sizes
    form = RouteOperands(x, rule, choice_bias, dtypes[1]).form()
    with device_guard(index), marked(*sizes) as (total, values, data, scale, *chosen):
        launch = launcher(index, tokens, experts, hidden, form, (eps, rule.scale), (x.dtype, *dtypes))
        launch(*given, choice_bias, total, values, *((data, scale) if quantized else (None, None)), *chosen)
    codes = quantized_rows(data, scale, tokens, hidden) if quantized else None
    assert quantized or ((data == MARK).all() and (scale == MARK).all())
    rows = [part.view(x.dtype).view(tokens, hidden) for part in (total, values)]
    typed = [part.view(dtype) for part, dtype in zip(chosen, types, strict=True)]
    shaped = [part if i == 2 else part.view(tokens, rule.top_k) for i, part in enumerate(typed)]
    return Normed(*rows, codes), ChosenExperts(*shaped)


def logits_of(given, logits_dtype=torch.float32, eps=EPS, quantized=True):
    x, residual, norm_weight, weight, bias = given
    normed = rms_norm(x, norm_weight, eps, residual=residual, quantized=quantized)
    return normed, router_logits(normed.values, weight, bias=bias, dtype=logits_dtype)


def by_three(given, rule=RULE, choice_bias=None, dtypes=(torch.float32, torch.float32), quantized=True, eps=EPS):
    normed, logits = logits_of(given, dtypes[0], eps, quantized)
    chosen = route(logits, rule, bias=choice_bias, dtype=dtypes[1])
    return normed, chosen._replace(**sort_by_expert(chosen.index, len(given[3]))._asdict())


@pytest.mark.parametrize(
    "experts,hidden,dtypes",
    [
        *((*sizes, (torch.bfloat16, torch.float32, torch.bfloat16)) for sizes in SIZES),
        *((*sizes, (dtype, dtype, torch.float32)) for dtype in FLOATING for sizes in SIZES[1::3]),
    ],
    ids=str,
)
def test_has_the_bits_of_three_kernels(experts, hidden, dtypes):
    dtype, *others = dtypes
    for tokens in TOKENS:
        if not by_one_kernel(tokens, experts, hidden * dtype.itemsize):
            assert dtype is torch.float32  # the weight is too large
            continue
        given = operands(tokens, experts, hidden, dtype, seed=tokens)
        for quantized in (False, True):
            given[4] = given[4] if quantized else None
            how = {"dtypes": others, "quantized": quantized}
            assert same_bits(write(given, **how), by_three(given, **how))


@pytest.mark.parametrize("experts,top_k,form", [form for form in FORMS if form[0] <= 512], ids=str)
def test_every_rule(experts, top_k, form):
    form = arguments(experts, form, "cuda")
    choice_bias = form.pop("bias")
    for tokens in (1, 3, 4):
        given = operands(tokens, experts, 512, torch.bfloat16, seed=tokens)
        rule = RoutingRule(top_k, **form)
        assert same_bits(write(given, rule, choice_bias), by_three(given, rule, choice_bias))


@pytest.mark.parametrize("experts,hidden", [(128, 2048), (60, 131)])
def test_ties(experts, hidden):
    """All tokens to the same experts, and experts with equal rows of the weight: the lowest are chosen."""
    for tokens in (1, 3, 4):
        given = operands(tokens, experts, hidden, torch.bfloat16)
        given[0], given[1] = (part[:1].expand(tokens, -1).contiguous() for part in given[:2])
        given[3], given[4] = given[3][:1].expand(experts, -1).contiguous(), None
        _, chosen = got = write(given, RoutingRule(8, **SOFTMAX))
        assert same_bits(got, by_three(given, RoutingRule(8, **SOFTMAX)))
        assert (chosen.index == torch.arange(8, device="cuda")).all()
        assert (chosen.groups[9:] == 8 * tokens).all() and (chosen.groups[:9].diff() == tokens).all()


@pytest.mark.parametrize("hidden", [131, 2048, 2880, 7168])
@pytest.mark.parametrize("dtype", FLOATING)
def test_nan_and_infinity_stay_in_their_tokens(hidden, dtype):
    tokens = 3  # the kernel takes more than are given to it
    given = operands(tokens, 64, hidden, dtype)
    clean, clean_chosen = write(given)
    for value, token, place in itertools.product((math.nan, math.inf, -math.inf), range(tokens), (0, 1)):
        odd = [part.clone() for part in given]
        odd[place][token, hidden - 1] = value
        normed, chosen = write(odd)
        others = [t for t in range(tokens) if t != token]
        assert torch.equal(normed.values[others], clean.values[others])
        assert torch.equal(chosen.index[others], clean_chosen.index[others])
        assert torch.equal(chosen.weights[others], clean_chosen.weights[others])
        expected, expected_chosen = by_three(odd)
        assert torch.equal(normed.values.isnan(), expected.values.isnan())
        assert torch.equal(chosen.weights.isnan(), expected_chosen.weights.isnan())
        assert torch.equal(chosen.index, expected_chosen.index) and torch.equal(chosen.rows, expected_chosen.rows)
        assert same_bits(normed.quantized.data, expected.quantized.data)


@pytest.mark.parametrize("hidden", [1000, 1001, 2880])
def test_squares_that_vanish(hidden):
    """Without eps the factor is infinite: what is past the end of a row must not turn into NaN."""
    x = torch.full((1, hidden), 1e-30, device="cuda")
    given = [x, torch.zeros_like(x), torch.ones(hidden, device="cuda"), torch.ones(64, hidden, device="cuda"), None]
    normed, chosen = got = write(given, eps=0.0)
    assert normed.values.isinf().all() and chosen.index.tolist() == [[0, 1]]
    assert same_bits(got, by_three(given, eps=0.0))


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_repeats_have_equal_bits(tokens):
    given = operands(tokens, 128, 2048, torch.bfloat16)
    assert same_bits(same_every_time(lambda: write(given)), by_three(given))


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 70])
def test_operator_on_strided_operands(tokens):
    wide, weight = random(2, tokens, 2 * 2048, dtype=torch.bfloat16), random(130, 2100, dtype=torch.bfloat16, seed=1)
    norm_weight = random(2 * 2048, dtype=torch.bfloat16, seed=2)
    for columns in (slice(0, 2048), slice(1, 2049), slice(8, 2056), slice(0, 4096, 2)):
        x, residual = wide[:, :, columns]
        given = [x, residual, norm_weight[columns], weight[:, :2048], None]
        options = {"residual": residual, "quantized": True, "logits_dtype": torch.float32, "dtype": torch.float32}
        normed, chosen = norm_route(x, given[2], EPS, given[3], RULE, **options)
        plain = [part if part is None else part.contiguous() for part in given]
        expected, expected_chosen = by_three(plain)
        assert same_bits(normed, expected)
        if tokens <= 16:  # of more the GEMM sums as the layout has it
            assert same_bits(chosen, expected_chosen)
        else:
            assert chosen.groups is None and chosen.rows is None


@pytest.mark.parametrize("tokens,hidden", [(0, 16), (3, 0)])
def test_empty(tokens, hidden):
    given = x, residual, norm_weight, weight, bias = operands(tokens, 8, hidden, torch.bfloat16)
    options = {"residual": residual, "bias": bias, "logits_dtype": torch.float32, "dtype": torch.float32}
    normed, chosen = norm_route(x, norm_weight, EPS, weight, RULE, **options)
    assert normed.sum.shape == normed.values.shape == x.shape
    assert same_bits(chosen, by_three(given, quantized=False)[1])


def test_a_token_has_its_bits_in_any_batch_where_that_is_asked_for():
    x, residual, norm_weight, weight, _ = operands(90, 128, 2048, torch.bfloat16)
    rule, dtypes = RoutingRule(8, **DEEPSEEK), {"logits_dtype": torch.float32, "dtype": torch.float32}
    with batch_invariant():
        normed, chosen = norm_route(x, norm_weight, EPS, weight, rule, residual=residual, **dtypes)
        for tokens in (1, 2, 4, 5, 16, 64):
            few = slice(tokens)
            some, of_them = norm_route(x[few], norm_weight, EPS, weight, rule, residual=residual[few], **dtypes)
            assert torch.equal(some.values, normed.values[few])
            assert torch.equal(of_them.index, chosen.index[few]) and torch.equal(of_them.weights, chosen.weights[few])


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_cuda_graph_with_changed_input(tokens):
    """Two in a chain: the second starts early and must wait for the first, whose results it reads."""
    given = x, residual, norm_weight, weight, bias = operands(tokens, 128, 2048, torch.bfloat16)
    dtypes = {"logits_dtype": torch.float32, "dtype": torch.float32}

    def chain(call):
        normed, first = call(x, residual)
        return *call(normed.values, normed.sum), first

    def by_one(x, residual):
        options = {"residual": residual, "bias": bias, "quantized": True, **dtypes}
        return norm_route(x, norm_weight, EPS, weight, RULE, **options)

    graph, results = captured(lambda: chain(by_one))
    for seed in range(3):
        for old, new in zip(given, operands(tokens, 128, 2048, x.dtype, seed=10 + seed), strict=True):
            old.copy_(new)
        graph.replay()
        expected = chain(lambda x, residual: by_three([x, residual, norm_weight, weight, bias]))
        assert same_bits(results, expected)
