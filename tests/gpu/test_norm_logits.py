"""RMSNorm and a router's logits in one kernel: the bits of the two kernels, and nothing else written."""

import math

import pytest
import torch

from fp8moe import batch_invariant
from fp8moe.kernels.decoder_ops.norm_logits import by_one_kernel, launcher, norm_logits
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.decoder_ops.router import router_logits
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import device_guard
from tests import random_values
from tests.errors import error_in_its_dtype
from tests.gpu.checks import MARK, captured, marked, quantized_rows, same_bits, sizes_of_rows

pytestmark = pytest.mark.gpu

EPS = 1e-6
# experts, H
SIZES = (
    *((8, 4096), (128, 2048), (160, 5120), (256, 7168), (60, 2880), (133, 576), (512, 136), (1024, 1024), (1, 64)),
    *((7, 7), (64, 131), (300, 1001), (128, 8192), (2000, 520)),
)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return random_values.random(*shape, dtype=dtype, device="cuda", spread=1.0, seed=seed)


def operands(tokens: int, experts: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """x, residual, norm_weight, weight and bias."""
    shapes = (tokens, hidden), (tokens, hidden), (hidden,), (experts, hidden), (experts,)
    return [random(*shape, dtype=dtype, seed=5 * seed + i) for i, shape in enumerate(shapes)]


def write(given: list[torch.Tensor], out_dtype: torch.dtype, quantized: bool, eps: float = EPS):
    """What the kernel writes, to memory marked before; nothing behind it, nor between the scales."""
    x, _, _, weight, _ = given
    (tokens, hidden), experts, index = x.shape, len(weight), x.get_device()
    sizes = x.nbytes, x.nbytes, *sizes_of_rows(tokens, hidden), tokens * experts * out_dtype.itemsize
    with device_guard(index), marked(*sizes) as (total, values, data, scale, logits):
        launch = launcher(index, tokens, experts, hidden, eps, (x.dtype, out_dtype))
        launch(*given, total, values, *((data, scale) if quantized else (None, None)), logits)
    codes = quantized_rows(data, scale, tokens, hidden) if quantized else None
    assert quantized or ((data == MARK).all() and (scale == MARK).all())
    rows = [part.view(x.dtype).view(tokens, hidden) for part in (total, values)]
    return Normed(*rows, codes), logits.view(out_dtype).view(tokens, experts)


def by_two_kernels(given: list[torch.Tensor], out_dtype: torch.dtype, quantized: bool, eps: float = EPS):
    x, residual, norm_weight, weight, bias = given
    normed = rms_norm(x, norm_weight, eps, residual=residual, quantized=quantized)
    return normed, router_logits(normed.values, weight, bias=bias, dtype=out_dtype)


@pytest.mark.parametrize(
    "experts,hidden,dtype,out_dtype",
    [
        *((*sizes, torch.bfloat16, torch.float32) for sizes in SIZES),
        *((*sizes, dtype, dtype) for dtype in FLOATING for sizes in SIZES[1::3]),
    ],
    ids=str,
)
def test_has_the_bits_of_two_kernels(experts, hidden, dtype, out_dtype):
    tried = 0
    for tokens in (1, 2):
        if not by_one_kernel(tokens, experts, hidden * dtype.itemsize):
            continue
        given = operands(tokens, experts, hidden, dtype, seed=tokens)
        for quantized in (False, True):
            got = write(given, out_dtype, quantized)
            assert same_bits(got, by_two_kernels(given, out_dtype, quantized))
        normed, logits = got
        exact = normed.values.double() @ given[3].double().t() + given[4].double()
        assert error_in_its_dtype(logits, exact) < (5e-6 if out_dtype is torch.float32 else 1e-3)
        tried += 1
    assert tried or hidden * dtype.itemsize > 16 << 10


@pytest.mark.parametrize("hidden", [131, 2048, 2880, 7168])
@pytest.mark.parametrize("dtype", FLOATING)
def test_nan_and_infinity_stay_in_their_tokens(hidden, dtype):
    tokens = 2  # the kernel takes more than are given to it
    given = operands(tokens, 128, hidden, dtype)
    clean, clean_logits = write(given, torch.float32, True)
    for value in (math.nan, math.inf, -math.inf):
        for token in range(tokens):
            for place in (0, 1):
                odd = [part.clone() for part in given]
                odd[place][token, hidden - 1] = value
                got = normed, logits = write(odd, torch.float32, True)
                others = [t for t in range(tokens) if t != token]
                assert not logits[token].isfinite().any() and torch.equal(logits[others], clean_logits[others])
                assert torch.equal(normed.values[others], clean.values[others])
                expected = by_two_kernels(odd, torch.float32, True)
                assert torch.equal(normed.values.isnan(), expected[0].values.isnan())
                assert torch.equal(logits.isnan(), expected[1].isnan())
                assert same_bits(got[0].quantized.data, expected[0].quantized.data)


@pytest.mark.parametrize("hidden", [1000, 1001, 2880])
def test_squares_that_vanish(hidden):
    """Without eps the factor is infinite: what is past the end of a row must not turn into NaN."""
    x = torch.full((1, hidden), 1e-30, device="cuda")
    given = [x, torch.zeros_like(x), torch.ones(hidden, device="cuda"), torch.ones(128, hidden, device="cuda"), None]
    normed, logits = write(given, torch.float32, True, eps=0.0)
    assert normed.values.isinf().all() and logits.isinf().all()
    assert same_bits((normed, logits), by_two_kernels(given, torch.float32, True, eps=0.0))


@pytest.mark.parametrize("tokens", [1, 2, 3, 70])
def test_operator_on_strided_operands(tokens):
    wide, weight = random(2, tokens, 2 * 2048, dtype=torch.bfloat16), random(130, 2100, dtype=torch.bfloat16, seed=1)
    norm_weight = random(2 * 2048, dtype=torch.bfloat16, seed=2)
    for columns in (slice(0, 2048), slice(1, 2049), slice(8, 2056), slice(0, 4096, 2)):
        x, residual = wide[:, :, columns]
        given = [x, residual, norm_weight[columns], weight[:, :2048], None]
        options = {"residual": residual, "quantized": True, "dtype": torch.float32}
        got = norm_logits(x, given[2], EPS, given[3], **options)
        if tokens <= 8:  # of more the GEMM sums as the layout has it
            assert same_bits(
                got,
                by_two_kernels([part if part is None else part.contiguous() for part in given], torch.float32, True),
            )
        with batch_invariant():
            got = norm_logits(x, given[2], EPS, given[3], **options)
            assert same_bits(got, by_two_kernels(given, torch.float32, True))


@pytest.mark.parametrize("tokens,experts,hidden", [(0, 8, 16), (3, 0, 16), (3, 8, 0)])
def test_empty(tokens, experts, hidden):
    x, residual, norm_weight, weight, bias = operands(tokens, experts, hidden, torch.bfloat16)
    normed, logits = norm_logits(x, norm_weight, EPS, weight, residual=residual, bias=bias, dtype=torch.float32)
    assert normed.sum.shape == normed.values.shape == x.shape
    assert torch.equal(logits, bias.float().expand(tokens, experts))


def test_a_token_has_its_bits_in_any_batch_where_that_is_asked_for():
    x, residual, norm_weight, weight, _ = operands(90, 128, 2048, torch.bfloat16)
    with batch_invariant():
        _, logits = norm_logits(x, norm_weight, EPS, weight, residual=residual, dtype=torch.float32)
        for tokens in (1, 2, 8, 9, 64):
            _, some = norm_logits(x[:tokens], norm_weight, EPS, weight, residual=residual[:tokens], dtype=torch.float32)
            assert torch.equal(some, logits[:tokens])


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_cuda_graph_with_changed_input(tokens):
    """Two in a chain: the second starts early and must wait for the first."""
    x, residual, norm_weight, weight, bias = operands(tokens, 128, 2048, torch.bfloat16)

    def chain(call):
        normed, first = call(x, residual)
        return *call(normed.values, normed.sum), first

    def by_one(x, residual):
        options = {"residual": residual, "bias": bias, "quantized": True, "dtype": torch.float32}
        return norm_logits(x, norm_weight, EPS, weight, **options)

    graph, (normed, logits, first) = captured(lambda: chain(by_one))
    for seed in range(3):
        for old, new in zip(
            (x, residual, norm_weight, weight, bias), operands(tokens, 128, 2048, x.dtype, seed=10 + seed), strict=True
        ):
            old.copy_(new)
        graph.replay()
        by_two = chain(
            lambda x, residual: by_two_kernels([x, residual, norm_weight, weight, bias], torch.float32, True)
        )
        assert same_bits((normed, logits), by_two[:2])
        assert torch.equal(first, by_two[2])
