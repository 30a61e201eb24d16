"""Experts over rows that are in their order already: forward, backward, rows of no expert, quantized rows.

And experts whose gate and up are two masters, over rows and over tokens.
"""

import pytest
import torch

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import backward as kernels
from fp8moe.kernels.experts import experts_of_rows, experts_of_tokens, experts_training
from fp8moe.kernels.experts.operands import Masters, TokenOperands
from fp8moe.layers import master
from fp8moe.layers.separate_masters import experts_rows_training, experts_tokens_training
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, layer_of, make, make_trained, trained_layer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = {"plain": (144, 96), "odd": (131, 77)}
OFFSETS = (3, 20, 20, 33, 37)  # of 40 rows: an empty group, rows in front and behind
INSIDE = slice(3, 37)


def offsets(values=OFFSETS):
    return torch.tensor(values, dtype=torch.int32)


def as_tokens(values=OFFSETS, rows=40):
    """The expert of each row, -1 for none, as a routing with one expert for each token."""
    index = torch.full((rows, 1), -1)
    for expert, (start, end) in enumerate(zip(values, values[1:], strict=False)):
        index[start:end] = expert
    return index


def random_rows(dtype=torch.bfloat16, hidden=144, rows=40):
    return torch.randn(rows, hidden).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_layer_with_one_expert_a_token(variant, sizes, dtype):
    hidden, size = SIZES[sizes]
    layer = make(4, hidden, size, **VARIANTS[variant])
    rows, index = random_rows(dtype, hidden), as_tokens()
    row_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    got = experts_of_rows(rows, offsets(), layer_of(layer), row_dtype=row_dtype)
    assert got.shape == rows.shape and got.dtype == row_dtype and got.is_contiguous()
    expected, _ = experts_of_tokens(TokenOperands(rows, index, torch.ones(40, 1), layer_of(layer)))
    assert torch.equal(got.to(dtype), expected)
    assert not got[:3].any() and not got[37:].any() and got[INSIDE].any(1).all()


@pytest.mark.parametrize("hidden", [144, 131])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize("training", [False, True])
def test_rows_that_are_quantized_already(variant, hidden, training):
    layer = make(4, hidden, 96, **VARIANTS[variant])
    rows = random_rows(hidden=hidden)
    quantized = quantize_1x128(rows)
    expected = experts_of_rows(rows, offsets(), layer_of(layer), training=training)
    for scale in (quantized.scale, quantized.scale.contiguous()):
        got = experts_of_rows((quantized.data, scale), offsets(), layer_of(layer), training=training)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("training", [False, True])
def test_rows_of_no_expert_do_not_matter(training):
    layer = make()
    rows = random_rows()
    expected = experts_of_rows(rows, offsets(), layer_of(layer), training=training)
    rows[:3], rows[37:] = float("nan"), float("inf")
    assert torch.equal(experts_of_rows(rows, offsets(), layer_of(layer), training=training), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [0, 5])
def test_nothing_to_do(count, training):
    layer = make()
    out = experts_of_rows(random_rows(rows=count), offsets([0] * 5), layer_of(layer), training=training)
    assert out.shape == (count, 144) and not out.any()


# Gradients.


def rows_gradients(layer, rows, grad, values=OFFSETS, *, row_dtype):
    rows = rows.detach().requires_grad_() if isinstance(rows, torch.Tensor) else rows
    masters = Masters(getattr(layer, layer.up_name), layer.down_proj)
    out = experts_of_rows(rows, offsets(values), trained_layer(layer), row_dtype=row_dtype, masters=masters)
    leaves = {"up": masters.up_master, "down": masters.down_master}
    if isinstance(rows, torch.Tensor):
        leaves["x"] = rows
    return out.detach(), dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_a_layer_with_one_expert_a_token(variant, sizes, dtype):
    hidden, size = SIZES[sizes]
    layer = make_trained(4, hidden, size, **VARIANTS[variant])
    rows, grad = random_rows(dtype, hidden), random_rows(dtype, hidden)
    row_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    out, got = rows_gradients(layer, rows, grad.to(row_dtype), row_dtype=row_dtype)
    x, masters = rows.requires_grad_(), (getattr(layer, layer.up_name), layer.down_proj)
    whole = experts_training(x, as_tokens(), torch.ones(40, 1), trained_layer(layer), Masters(*masters))
    assert torch.equal(out.to(dtype), whole.detach())
    for name, value in zip(("x", "up", "down"), torch.autograd.grad(whole, (x, *masters), grad), strict=True):
        assert torch.equal(got[name], value), name
    assert not got["x"][:3].any() and not got["x"][37:].any()


def apart(layer):
    """Copies of a layer's masters: gate, up and down."""
    masters = *layer.gate_up_proj.chunk(2, 1), layer.down_proj
    return [weight.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for weight in masters]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_gate_and_up_apart_have_the_bits_of_one_weight(sizes, dtype):
    hidden, size = SIZES[sizes]
    layer = make_trained(4, hidden, size, master_dtype=dtype)
    rows, grad = random_rows(hidden=hidden).requires_grad_(), random_rows(hidden=hidden)
    whole = layer.forward_rows(rows, offsets())
    expected = torch.autograd.grad(whole, (rows, layer.gate_up_proj, layer.down_proj), grad)
    gate, up, down = apart(layer)
    out = experts_rows_training(rows, offsets(), gate, up, down)
    assert out.dtype is rows.dtype and torch.equal(out, whole)
    d_rows, d_gate, d_up, d_down = torch.autograd.grad(out, (rows, gate, up, down), grad)
    assert torch.equal(torch.cat([d_gate, d_up], 1), expected[1])
    assert torch.equal(d_rows, expected[0]) and torch.equal(d_down, expected[2])
    assert torch.equal(experts_rows_training(rows.detach(), offsets(), *(w.detach() for w in (gate, up, down))), out)
    for frozen in (gate, up):
        leaves = [weight for weight in (gate, up, down) if weight is not frozen]
        frozen.requires_grad_(False)
        gradients = torch.autograd.grad(experts_rows_training(rows, offsets(), gate, up, down), leaves, grad)
        assert torch.equal(gradients[0], d_up if frozen is gate else d_gate)
        frozen.requires_grad_()
    out = experts_rows_training(rows, offsets(), gate, up, down)
    with torch.no_grad():
        gate.mul_(2)
    with pytest.raises(RuntimeError, match="gate_proj, shape .* has been changed in place"):
        out.backward(grad)


def routing(tokens=40):
    """Two of four experts for each token, and none for one token; and the weights."""
    index = torch.rand(tokens, 4).topk(2).indices
    index[7] = torch.tensor([-1, 4])
    return index, torch.rand(tokens, 2).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_with_gate_and_up_apart_have_the_bits_of_a_layer(sizes, dtype):
    hidden, size = SIZES[sizes]
    layer = make_trained(4, hidden, size, master_dtype=torch.bfloat16 if dtype is torch.float32 else torch.float32)
    x, grad = random_rows(dtype, hidden).requires_grad_(), random_rows(dtype, hidden)
    index, weights = routing()
    whole = layer(x, index, weights)
    expected = torch.autograd.grad(whole, (x, weights, layer.gate_up_proj, layer.down_proj), grad)
    masters = gate, up, down = apart(layer)
    out = experts_tokens_training(x, index, weights, *masters)
    assert out.dtype is dtype and torch.equal(out, whole) and not out[7].any()
    d_x, d_weights, d_gate, d_up, d_down = torch.autograd.grad(out, (x, weights, *masters), grad)
    for got, wanted in zip((d_x, d_weights, torch.cat([d_gate, d_up], 1), d_down), expected, strict=True):
        assert got.dtype is wanted.dtype and torch.equal(got, wanted)
    with torch.no_grad():
        assert torch.equal(experts_tokens_training(x, index, weights, *masters), out)
    for frozen, other, wanted in ((gate, up, d_up), (up, gate, d_gate)):
        frozen.requires_grad_(False)
        out = experts_tokens_training(x, index, weights, *masters)
        assert torch.equal(torch.autograd.grad(out, other, grad)[0], wanted)
        frozen.requires_grad_()
    out = experts_tokens_training(x, index, weights, *masters)
    with torch.no_grad():
        up.mul_(2)
    with pytest.raises(RuntimeError, match="has been changed in place"):
        out.backward(grad)


def test_tokens_and_rows_share_fp8_copies(monkeypatch):
    """Micro-batches and what activation checkpointing computes again quantize no weight a second time."""
    made, quantize = [], master._quantize
    monkeypatch.setattr(master, "_quantize", lambda *given, **how: made.append(len(given)) or quantize(*given, **how))
    masters = apart(make_trained())
    index, weights = routing()

    def run():
        experts_tokens_training(random_rows(), index, weights, *masters).sum().backward()
        experts_rows_training(random_rows(), offsets(), *masters)

    run(), run()
    assert made == [2, 1]
    with torch.no_grad():
        masters[0].mul_(2)
    run()
    assert made == [2, 1, 2]


def test_tokens_that_are_refused():
    gate, down = torch.zeros(4, 96, 144), torch.zeros(4, 144, 96)
    index, weights = routing()
    given = {"hidden_states": random_rows(), "top_k_index": index, "top_k_weights": weights}
    given |= {"gate": gate, "up": gate, "down": down}

    def check(error, match, **change):
        with pytest.raises(error, match=match):
            experts_tokens_training(**(given | change))

    for name in given:
        check(TypeError, f"^{name}: expected a torch.Tensor", **{name: None})
    check(TypeError, "^up: expected bfloat16 or float32, got torch.float16", up=gate.half())
    check(TypeError, "^hidden_states: expected .*, got torch.float64", hidden_states=random_rows(torch.float64))
    check(TypeError, "^top_k_index: expected .*, got torch.float32", top_k_index=index.float())
    check(TypeError, "^top_k_weights: expected .*, got torch.float64", top_k_weights=weights.double())
    check(ValueError, r"^hidden_states: expected shape \(T, 144\)", hidden_states=random_rows(hidden=128))
    check(ValueError, "^top_k_index: expected shape", top_k_index=index[:5])
    check(ValueError, "^top_k_weights: expected shape", top_k_weights=weights[:, :1])
    check(ValueError, r"^up: expected shape \(4, 96, 144\) like gate", up=gate[:, :95])
    check(ValueError, r"^down_proj: expected shape \(4, 144, 96\)", down=down[:3])
    check(ValueError, "^activation: expected one with a gate", activation=Activation(gated=False))


def test_gate_and_up_that_are_refused():
    rows, gate, down = random_rows(), torch.zeros(4, 96, 144), torch.zeros(4, 144, 96)

    def check(error, match, **change):
        with pytest.raises(error, match=match):
            experts_rows_training(
                **({"rows": rows, "group_offsets": offsets(), "gate": gate, "up": gate, "down": down} | change)
            )

    check(TypeError, "^gate: expected bfloat16 or float32, got torch.float16", gate=gate.half())
    check(TypeError, "^down: expected a torch.Tensor", down=None)
    check(TypeError, "^rows: expected a torch.Tensor", rows=quantize_1x128(rows))
    check(ValueError, r"^up: expected shape \(4, 96, 144\) like gate", up=gate[:, :95])
    check(ValueError, "^up: expected three dimensions", up=gate[0])
    check(ValueError, r"^down_proj: expected shape \(4, 144, 96\)", down=down[:3])
    check(ValueError, "^activation: expected one with a gate", activation=Activation(gated=False))


def test_rows_of_no_expert_give_no_gradient():
    layer = make_trained()
    rows, grad = random_rows(), random_rows()
    _, expected = rows_gradients(layer, rows, grad, row_dtype=torch.bfloat16)
    for value in (rows, grad):
        value[:3], value[37:] = float("nan"), float("inf")
    _, got = rows_gradients(layer, rows, grad, row_dtype=torch.bfloat16)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("hidden", [144, 131])
def test_gradients_of_masters_with_quantized_rows(hidden, monkeypatch):
    """The rows go into GEMM 1 as they are, their values into the gradient of the first projection."""
    layer = make_trained(hidden_size=hidden)
    quantized, grad = quantize_1x128(random_rows(hidden=hidden)), random_rows(hidden=hidden)
    values = dequantize(quantized)
    again = []
    quantize = kernels.quantize_1x128
    monkeypatch.setattr(kernels, "quantize_1x128", lambda x: again.append(x) or quantize(x))
    out, got = rows_gradients(layer, quantized, grad, row_dtype=torch.bfloat16)
    assert not again and got.keys() == {"up", "down"}
    reference, expected = rows_gradients(layer, values, grad, row_dtype=torch.bfloat16)
    assert relative_error(out, reference) <= 2e-2  # its rows are quantized a second time
    for name, value in got.items():
        assert relative_error(value, expected[name]) <= 2e-2


def test_frozen_weights_pass_gradients():
    layer = make()
    rows = random_rows().requires_grad_()
    out = experts_of_rows(rows, offsets(), layer_of(layer))
    grad = random_rows()
    (got,) = torch.autograd.grad(out, rows, grad)
    index = as_tokens()
    whole = experts_training(rows, index, torch.ones(40, 1), layer_of(layer))
    assert torch.equal(got, torch.autograd.grad(whole, rows, grad)[0])


def test_training_has_the_bits_of_a_recorded_forward():
    """For activation checkpointing, whose first forward records nothing."""
    layer = make_trained()
    rows, kernels_layer = random_rows(), trained_layer(layer)
    recorded = experts_of_rows(rows.clone().requires_grad_(), offsets(), kernels_layer).detach()
    with torch.no_grad():
        assert torch.equal(experts_of_rows(rows, offsets(), kernels_layer, training=True), recorded)
        assert not torch.equal(experts_of_rows(rows, offsets(), kernels_layer), recorded)


def test_master_changed_before_the_backward():
    layer = make_trained()
    master = layer.down_proj
    out = experts_of_rows(random_rows(), offsets(), trained_layer(layer), masters=Masters(down_master=master))
    with torch.no_grad():
        master.mul_(2)
    with pytest.raises(RuntimeError, match=r"down_proj, shape \(4, 144, 96\), has been changed in place between"):
        out.sum().backward()


def test_double_backward_is_refused():
    layer = make()
    rows = random_rows().requires_grad_()
    out = experts_of_rows(rows, offsets(), layer_of(layer))
    (grad,) = torch.autograd.grad(out.float().square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="there is no double backward"):
        grad.sum().backward()


# Operators and errors.


def test_compile_fullgraph(fresh_compiler):
    layer = layer_of(make())

    def run(rows, groups):
        return experts_of_rows(rows, groups, layer)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (17, 40):
        rows, groups = random_rows(rows=count), offsets([0, 3, 9, 9, 15])
        assert torch.equal(compiled(rows, groups), run(rows, groups))
        grads = []
        for call in (compiled, run):
            leaf = rows.clone().requires_grad_()
            grads.append(torch.autograd.grad(call(leaf, groups).float().square().sum(), leaf)[0])
        assert torch.equal(*grads)


def test_errors():
    layer = layer_of(make())
    rows, quantized = random_rows(), quantize_1x128(random_rows())

    def check(exception, message, **changed):
        arguments = {"rows": rows, "group_offsets": offsets(), "layer": layer} | changed
        for training in (False, True):
            with pytest.raises(exception, match=message):
                experts_of_rows(**arguments, training=training)

    check(TypeError, "^rows: expected bfloat16, float16 or float32, got torch.float64", rows=rows.double())
    check(TypeError, r"^rows: expected an FP8Tensor or a \(data, scale\) pair", rows=None)
    check(TypeError, "^rows.data: expected float8_e4m3fn", rows=(rows, quantized.scale))
    check(ValueError, r"^rows.scale: expected shape \(40, 2\)", rows=(quantized.data, quantized.scale[:, :1]))
    check(ValueError, r"^rows: expected shape \(R, 144\) to match gate_up_proj", rows=rows[:, :128])
    check(TypeError, "^group_offsets: expected a torch.Tensor, got list", group_offsets=[0, 1])
    check(TypeError, "^group_offsets: expected int32, got torch.int64", group_offsets=offsets().long())
    check(ValueError, "^group_offsets: expected on cpu like the rows, got meta", group_offsets=offsets().to("meta"))
    check(ValueError, r"^group_offsets: expected shape \(5,\), for 4 experts, got \(4,\)", group_offsets=offsets()[1:])
    few = layer._replace(down=FP8Tensor(layer.down.data[:3], layer.down.scale[:3]))
    check(ValueError, r"^down_proj: expected shape \(4, 144, 96\)", layer=few)
    check(TypeError, "^row_dtype: expected bfloat16 or float32, got torch.float16", row_dtype=torch.float16)
    for whole in ((39, 4), (40, 3), (0, 0)):
        check(ValueError, r"^whole: expected at least the 40 rows and 4 groups that are a part, got \(", whole=whole)
    master = torch.zeros(4, 3, requires_grad=True)
    with pytest.raises(
        ValueError,
        match=r"^up_master: expected shape \(4, 192, 144\) or \(4, 96, 144\) like the FP8 weight, got \(4, 3\)",
    ):
        experts_of_rows(rows, offsets(), layer, masters=Masters(master))
