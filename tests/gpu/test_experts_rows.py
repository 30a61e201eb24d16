"""Experts over rows that are in their order already, on the CUDA backend; and with gate and up in two masters."""

import pytest
import torch

from fp8moe.kernels.experts import experts_of_rows, experts_of_tokens, experts_training
from fp8moe.kernels.experts.operands import Masters, TokenOperands
from fp8moe.layers.separate_masters import experts_rows_training, experts_tokens_training
from fp8moe.quant.quantize import quantize_1x128
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, layer_of, make_trained, trained_layer
from tests.gpu.checks import captured
from tests.gpu.test_experts import DTYPES, TOLERANCE, exact, make
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
GRADIENTS = 2e-2  # between GEMMs that may split K in another way, and so FP8 values on the other side of an edge
FEW = 3e-2
OFFSETS = ((3, 20, 20, 33, 37), 40), ((0, 1, 1, 1, 1), 1), ((0, 300, 300, 301, 1000), 1000), ((7, 7, 7, 7, 7), 30)


def groups(offsets):
    return torch.tensor(offsets, dtype=torch.int32, device=DEVICE)


def as_tokens(offsets, count):
    """The expert of each row, -1 for none, as a routing with one expert for each token; and the weights."""
    index = torch.full((count, 1), -1, device=DEVICE)
    for expert, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        index[start:end] = expert
    return index, torch.ones(count, 1, device=DEVICE)


def random(count, hidden=272, dtype=torch.bfloat16):
    return torch.randn(count, hidden, device=DEVICE).to(dtype)


def run(layer, rows, offsets, **options):
    return experts_of_rows(rows, groups(offsets), layer_of(layer), **options)


def row_dtype_of(dtype):
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


@pytest.mark.parametrize("sizes", [(272, 208), (131, 77), (2048, 768)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_against_float64(variant, dtype, sizes):
    layer = make(4, *sizes, **VARIANTS[variant])
    for offsets, count in OFFSETS:
        rows, (index, ones) = random(count, sizes[0], dtype), as_tokens(offsets, count)
        got = run(layer, rows, offsets, row_dtype=row_dtype_of(dtype))
        assert got.shape == rows.shape and got.dtype == row_dtype_of(dtype) and got.is_contiguous()
        assert not got[index[:, 0] < 0].any()
        if (index >= 0).any():
            few = (index >= 0).sum() < 64  # one of few values may quantize to the next FP8 value
            assert relative_error(got, exact(layer, rows, index, ones)) <= (FEW if few else TOLERANCE)
            whole, _ = experts_of_tokens(TokenOperands(rows, index, ones, layer_of(layer)))
            assert relative_error(got, whole) <= (FEW if few else 3e-3)


@pytest.mark.parametrize("hidden", [272, 131])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize("training", [False, True])
def test_rows_that_are_quantized_already(variant, hidden, training):
    layer = make(4, hidden, 208, **VARIANTS[variant])
    for offsets, count in OFFSETS:
        rows = random(count, hidden)
        quantized = quantize_1x128(rows)
        expected = run(layer, rows, offsets, training=training)
        for scale in (quantized.scale, quantized.scale.contiguous()):
            assert torch.equal(run(layer, (quantized.data, scale), offsets, training=training), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("offsets", [(-5, 10, 4, 20, 9999), (50, 40, 30, 20, 10), (2**31 - 1, -(2**31), 0, 5, 5)])
def test_offsets_that_mean_nothing(offsets, training):
    """Some values, and no access out of bounds."""
    layer = make(4)
    assert run(layer, random(40), offsets, training=training).shape == (40, 272)


@pytest.mark.parametrize("training", [False, True])
def test_rows_of_no_expert_and_memory_do_not_matter(training):
    layer = make(4)
    offsets, count = OFFSETS[0]
    rows = random(count)
    expected = run(layer, rows, offsets, training=training)
    rows[:3], rows[37:] = NAN, float("inf")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for _ in range(3):
        junk = [torch.full((1 << i,), 0xFF, dtype=torch.uint8, device=DEVICE) for i in range(9, 25)]
        del junk
        assert torch.equal(run(layer, rows, offsets, training=training), expected)


# Gradients.


def make_masters(hidden_size=272, **options):
    return make_trained(4, hidden_size, 208, device=DEVICE, **options)


def gradients(layer, rows, grad, group_offsets, kernels_layer=None):
    """The result, and gradients of rows, if these are a tensor, and of both masters."""
    masters = Masters(getattr(layer, layer.up_name), layer.down_proj)
    leaves = [rows.detach().requires_grad_()] if isinstance(rows, torch.Tensor) else []
    given = leaves[0] if leaves else rows, group_offsets, kernels_layer or trained_layer(layer)
    out = experts_of_rows(*given, row_dtype=grad.dtype, masters=masters)
    return out.detach(), *torch.autograd.grad(out, (*leaves, *masters[:2]), grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [272, 131])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_a_layer_with_one_expert_a_token(variant, hidden, dtype):
    layer = make_masters(hidden, **VARIANTS[variant])
    masters = getattr(layer, layer.up_name), layer.down_proj
    for offsets, count in (OFFSETS[0], OFFSETS[2]):
        rows, grad = random(count, hidden, dtype), random(count, hidden, dtype)
        got = gradients(layer, rows, grad.to(row_dtype_of(dtype)), groups(offsets))
        x = rows.requires_grad_()
        whole = experts_training(x, *as_tokens(offsets, count), trained_layer(layer), Masters(*masters))
        expected = whole.detach(), *torch.autograd.grad(whole, (x, *masters), grad)
        for actual, value in zip(got, expected, strict=True):
            assert actual.isfinite().all() and relative_error(actual, value) <= GRADIENTS
        assert not got[1][as_tokens(offsets, count)[0][:, 0] < 0].any()


def test_gradients_of_masters_with_quantized_rows():
    layer = make_masters()
    offsets, count = OFFSETS[2]
    rows, grad = random(count), random(count)
    got = gradients(layer, quantize_1x128(rows), grad, groups(offsets))
    expected = gradients(layer, rows, grad, groups(offsets))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[3])
    assert relative_error(got[1], expected[2]) <= 6e-2  # its rows are quantized twice


def test_graph_replays_with_other_groups():
    layer, frozen = make_masters(), make(4)
    rows, grad, offsets = random(300), random(300), groups((0, 100, 120, 120, 290))
    weights = trained_layer(layer)

    def step():
        out = experts_of_rows(rows, offsets, layer_of(frozen))
        return out, *gradients(layer, rows, grad, offsets, weights)

    graph, results = captured(step)
    for values in ((0, 0, 0, 0, 0), (10, 20, 20, 300, 300), (0, 1, 2, 3, 4), (0, 300, 300, 300, 300)):
        rows.normal_(), grad.normal_()
        offsets.copy_(groups(values))
        for value in results:
            value.fill_(NAN)
        graph.replay()
        assert all(map(torch.equal, results, step()))


def test_nothing_waits_for_the_gpu():
    offsets = groups((0, 3, 5, 5, 9))
    layer, frozen = make_masters(), [make(4), make(4, **VARIANTS["gelu"])]
    rows, grad, weights = random(9), random(9), trained_layer(layer)

    def step():
        gradients(layer, rows, grad, offsets, weights)
        for each in frozen:
            experts_of_rows(rows, offsets, layer_of(each), whole=(18, 8))

    step()
    with no_waiting():
        step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [208, 256])
def test_gate_and_up_apart_are_one_weight(size, dtype):
    """Their gradients come from two launches, of tiles of fewer rows."""
    layer = make_trained(4, 272, size, device=DEVICE, master_dtype=dtype)
    offsets, count = OFFSETS[2]
    rows, grad = random(count).requires_grad_(), random(count)
    whole = layer.forward_rows(rows, groups(offsets))
    expected = torch.autograd.grad(whole, (rows, layer.gate_up_proj, layer.down_proj), grad)
    gate, up = (part.detach().contiguous().requires_grad_() for part in layer.gate_up_proj.chunk(2, 1))
    down = layer.down_proj.detach().requires_grad_()
    out = experts_rows_training(rows, groups(offsets), gate, up, down)
    d_rows, d_gate, d_up, d_down = torch.autograd.grad(out, (rows, gate, up, down), grad)
    assert torch.equal(out, whole) and torch.equal(d_rows, expected[0]) and torch.equal(d_down, expected[2])
    assert relative_error(torch.cat([d_gate, d_up], 1), expected[1]) <= GRADIENTS


@pytest.mark.parametrize("tokens", [7, 300])
@pytest.mark.parametrize("size", [208, 256])
def test_tokens_with_gate_and_up_apart_are_a_layer(size, tokens):
    layer = make_trained(4, 272, size, device=DEVICE, master_dtype=torch.bfloat16)
    index = torch.rand(tokens, 4, device=DEVICE).topk(2).indices
    x, weights = random(tokens).requires_grad_(), torch.rand(tokens, 2, device=DEVICE).requires_grad_()
    grad = random(tokens)
    whole = layer(x, index, weights)
    expected = torch.autograd.grad(whole, (x, weights, layer.gate_up_proj, layer.down_proj), grad)
    gate, up = (part.detach().contiguous().requires_grad_() for part in layer.gate_up_proj.chunk(2, 1))
    down = layer.down_proj.detach().requires_grad_()

    def step():
        out = experts_tokens_training(x, index, weights, gate, up, down)
        return out, *torch.autograd.grad(out, (x, weights, gate, up, down), grad)

    first = step()
    with no_waiting():
        again = step()
    assert all(map(torch.equal, first, again))
    out, d_x, d_weights, d_gate, d_up, d_down = first
    assert torch.equal(out, whole) and torch.equal(d_x, expected[0]) and torch.equal(d_weights, expected[1])
    assert torch.equal(d_down, expected[3])
    assert relative_error(torch.cat([d_gate, d_up], 1), expected[2]) <= GRADIENTS
