"""Training FP8Linear on the reference backend: gradients, master weights and their FP8 copies, PyTorch around it."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fp8moe.kernels.linear import training as linear_training
from fp8moe.layers import master
from fp8moe.layers.linear import FP8Linear, replace_linears
from fp8moe.quant import transpose
from fp8moe.quant.quantize import dequantize, quantize_128x128
from tests.compilers import INDUCTOR
from tests.errors import refused, relative_error
from tests.linear_training_reference import assert_follows, check_checkpointing, exact, gradients, same, train

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}
ON_GPU = {torch.float32: 3e-4, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def make(in_features=272, out_features=136, bias=True, *, dtype=torch.float32, master_dtype=torch.float32):
    return FP8Linear(in_features, out_features, bias, dtype=dtype, master_dtype=master_dtype)


# Gradients.


@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(1,), (200,), (3, 100)])
def test_gradients(lead, dtype, master_dtype):
    torch.manual_seed(0)
    layer = make(dtype=dtype, master_dtype=master_dtype)
    x, grad = torch.randn(*lead, 272).to(dtype), torch.randn(*lead, 136).to(dtype)
    out, (d_x, d_weight, d_bias) = gradients(layer, x, grad, layer.parameters())
    assert (d_x.shape, d_x.dtype) == (x.shape, dtype) and d_x.is_contiguous()
    assert (d_weight.dtype, d_bias.dtype) == (master_dtype, dtype)

    expected = exact(x, grad, quantize_128x128(layer.weight))
    assert relative_error(d_x.flatten(0, -2), expected[0]) < TOLERANCE[dtype]
    assert relative_error(d_weight, expected[1]) < TOLERANCE[master_dtype]
    assert relative_error(d_bias, grad.double().flatten(0, -2).sum(0)) < TOLERANCE[dtype]

    plain = nn.Linear(272, 136, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    _, expected = gradients(plain, x.double(), grad.double(), plain.parameters())
    for actual, other in zip((d_x, d_weight, d_bias), expected, strict=True):
        assert relative_error(actual, other) < 6e-2


@settings(max_examples=25)
@given(
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 300),
    rows=st.integers(0, 140),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_sizes(in_features, out_features, rows, bias, dtype):
    layer = make(in_features, out_features, bias)
    x, grad = torch.randn(rows, in_features).to(dtype), torch.randn(rows, out_features).to(dtype)
    out, (d_x, d_weight, *d_bias) = gradients(layer, x, grad, layer.parameters())
    with torch.no_grad():
        assert torch.equal(out, layer(x)) and out.is_contiguous()
    expected = exact(x, grad, quantize_128x128(layer.weight))
    torch.testing.assert_close(d_x.double(), expected[0], rtol=0.01, atol=0.01)
    torch.testing.assert_close(d_weight.double(), expected[1], rtol=1e-5, atol=1e-4)
    assert len(d_bias) == bias


@pytest.mark.parametrize("features", [(0, 21), (131, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(), (5,), (0,)])
def test_layers_without_features(lead, features):
    layer = make(*features)
    x, grad = torch.randn(*lead, features[0]), torch.randn(*lead, features[1])
    plain = nn.functional.linear(x, layer.weight.detach(), layer.bias.detach())
    out, (d_x, d_weight, d_bias) = gradients(layer, x, grad, layer.parameters())
    assert torch.equal(out, plain) and d_x.shape == x.shape and d_weight.shape == layer.weight.shape
    assert torch.equal(d_bias, grad.reshape(lead[0] if lead else 1, features[1]).sum(0))


def test_small_gradients():
    layer = make()
    x, grad = torch.randn(64, 272), torch.randn(64, 136)
    expected = gradients(layer, x, grad, layer.parameters())[1]
    small = gradients(layer, x, grad * 2.0**-30, layer.parameters())[1]
    for actual, other in zip(small, expected, strict=True):
        assert torch.equal(actual * 2.0**30, other)


def test_gradients_below_the_floor_of_scales():
    """docs/training.md: they vanish, and a larger loss helps."""
    layer = make()
    x, grad = torch.randn(4, 272), torch.randn(4, 136).sign()
    expected = gradients(layer, x, 1e-6 * grad, [layer.weight])[1]
    scaled = gradients(layer, x, 2.0**40 * 1e-18 * grad, [layer.weight])[1]
    for size, kept in ((4e-17, 1), (1e-18, 0)):
        actual = gradients(layer, x, size * grad, [layer.weight])[1]
        for value, whole in zip(actual, expected, strict=True):
            assert relative_error(value / size, kept * whole / 1e-6) < 0.1
    for value, whole in zip(scaled, expected, strict=True):
        assert relative_error(value / 2.0**40 / 1e-18, whole / 1e-6) < 0.05


# What is computed, and how often.


@pytest.fixture
def calls(monkeypatch):
    """Names of the quantizers and GEMMs that the layer has called, in order."""
    names = []

    def count(module, name):
        function = getattr(module, name)

        def counted(*args, **kwargs):
            if not isinstance(args[0], FakeTensor):  # by which torch.compile learns what operators return
                names.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(master, "_quantize")
    count(transpose, "transpose_fp8")
    for name in ("quantize_with_transpose", "quantize_1x128", "gemm", "weight_gradient"):
        count(linear_training, name)
    return names


def test_each_quantization_happens_once(calls):
    layer = make(272, 144)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        calls.clear()
        for _ in range(2):
            layer(torch.randn(40, 272, requires_grad=True)).sum().backward()
        per_call = ["quantize_with_transpose", "gemm"]
        per_call += ["quantize_with_transpose", "weight_gradient", "gemm"]
        assert calls == ["_quantize", *per_call, *per_call]
        optimizer.step()


def test_only_what_is_needed_is_computed(calls):
    layer = make()
    layer(torch.randn(40, 272)).sum().backward()  # the first layer of a model
    assert calls == ["_quantize", *2 * ["quantize_with_transpose", "gemm"]][:-1] + ["weight_gradient"]
    calls.clear()
    x = torch.randn(40, 272, requires_grad=True)
    layer.weight.requires_grad_(False).grad = None
    layer(x).sum().backward()
    assert calls == ["quantize_1x128", "transpose_fp8", "gemm"]
    assert layer.weight.grad is None
    with torch.no_grad():
        calls.clear()
        layer(x)
    assert calls == []


def test_activations_are_kept_in_fp8():
    layer = make(256, 384, False, dtype=torch.bfloat16, master_dtype=torch.bfloat16)
    saved = {}

    def pack(value):
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    copies = sum(value.untyped_storage().nbytes() for value in master.quantized(layer.weight))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        layer(torch.randn(1024, 256).bfloat16().requires_grad_())
    assert sum(saved.values()) == copies + 1024 * 256 + 4 * (4 * 7 + 2)  # two scales, four apart


# Frozen FP8 weights.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(272, 136), (131, 21), (576, 1536), (131, 261), (144, 24)])
def test_frozen_weights_pass_gradients(features, dtype, device):
    layer, limit = FP8Linear(*features, dtype=dtype, device=device), (TOLERANCE if device == "cpu" else ON_GPU)[dtype]
    x, grad = (torch.randn(3, 100, size, device=device).to(dtype) for size in features)
    out, (d_x, d_bias) = gradients(layer, x, grad, [layer.bias])
    with torch.no_grad():
        assert torch.equal(out, layer(x))
    expected, _ = exact(x, grad, (layer.weight, layer.weight_scale_inv))
    assert relative_error(d_x.flatten(0, -2), expected) < limit
    assert relative_error(d_bias, grad.double().sum((0, 1))) < limit
    trained = make(*features, dtype=dtype).to(device)
    trained.load_state_dict({"weight": dequantize((layer.weight, layer.weight_scale_inv)), "bias": layer.bias})
    assert relative_error(gradients(trained, x, grad, trained.parameters())[1][0], d_x) < 0.05
    trained.weight.requires_grad_(False)
    assert relative_error(gradients(trained, x, grad, trained.parameters())[1][0], d_x) < 0.05


def test_low_rank_adapters_train_around_frozen_layers():
    torch.manual_seed(0)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = FP8Linear(64, 64, dtype=torch.float32).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(Adapted(), nn.SiLU(), Adapted())
    before = [value.clone() for value in model[0].base.state_dict().values()]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-2)
    x, target = torch.randn(2, 64, 64)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        assert model[0].down.weight.grad.any() or len(losses) == 1
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert all(
        torch.equal(a.float(), b.float()) for a, b in zip(model[0].base.state_dict().values(), before, strict=True)
    )


# Copies of masters.


def test_requantized_when_the_weight_changes(calls):
    layer = make()
    x = torch.randn(4, 272)

    def check(quantizations):
        calls.clear()
        with torch.no_grad():
            expected = FP8Linear.from_linear(layer)(x)
            for _ in range(2):
                assert torch.equal(layer(x), expected)
        assert calls.count("_quantize") == quantizations

    check(1)
    check(0)
    with torch.no_grad():
        layer.weight.mul_(2)
    check(1)
    layer.load_state_dict({name: value + 1 for name, value in layer.state_dict().items()})
    check(1)
    layer.weight.data = layer.weight.data * 3
    check(1)
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    check(1)
    layer.train()
    check(0)
    layer.weight.data.mul_(0.5)  # shows nowhere
    layer.eval()
    check(1)
    layer.weight.data.mul_(2)
    master.invalidate()
    check(1)
    layer.bfloat16()
    check(1)
    with torch.inference_mode():
        layer.weight.mul_(2)
    check(1)


def test_weights_without_versions_are_not_kept(calls):
    with torch.inference_mode():
        layer = make()
        x = torch.randn(4, 272)
        first = layer(x)
        layer.weight.mul_(2)
        assert not torch.equal(layer(x), first)
        assert torch.equal(layer(x), FP8Linear.from_linear(layer)(x))


def test_a_copy_made_in_inference_mode_serves_training():
    layer = make()
    x, grad = torch.randn(4, 272), torch.randn(4, 136)
    with torch.inference_mode():
        expected = layer(x)
    assert torch.equal(gradients(layer, x, grad, layer.parameters())[0], expected)


def test_layers_that_share_a_weight_share_its_copy(calls):
    first, second = make(), make()
    second.weight = first.weight
    x = torch.randn(4, 272)
    with torch.no_grad():
        assert torch.equal(first(x) - first.bias, first(x) - first.bias)
        second(x)
    assert calls.count("_quantize") == 1


def test_views_of_one_storage_have_copies_of_their_own():
    memory = torch.randn(2, 136, 272)
    layers = [make() for _ in range(2)]
    for layer, weight in zip(layers, memory, strict=True):
        layer.weight = nn.Parameter(weight)
    x = torch.randn(4, 272)
    with torch.no_grad():
        for layer in layers * 2:
            assert torch.equal(layer(x), FP8Linear.from_linear(layer)(x))


def test_copies_live_as_long_as_the_weight():
    layer = make()
    layer(torch.randn(4, 272)).sum().backward()
    copies = weakref.ref(getattr(layer.weight.untyped_storage(), master._ATTRIBUTE))
    assert copies() is not None and master.quantized(layer.weight) is master.quantized(layer.weight.detach())
    other = copy.deepcopy(layer)
    assert not getattr(other.weight.untyped_storage(), master._ATTRIBUTE).by_layout
    del layer
    gc.collect()
    assert copies() is None


# The module.


def test_state_dict_is_that_of_nn_linear(tmp_path):
    layer, plain = make(dtype=torch.float32, master_dtype=torch.bfloat16), nn.Linear(272, 136)
    state = layer.state_dict()
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == {
        "weight": ((136, 272), torch.bfloat16),
        "bias": ((136,), torch.float32),
    }
    assert all(parameter.requires_grad for parameter in layer.parameters())
    x = torch.randn(4, 272)
    layer(x).sum().backward()
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    plain.load_state_dict(state)
    other = make(master_dtype=torch.bfloat16)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other(x), layer(x))
    meta = FP8Linear(272, 136, device="meta", master_dtype=torch.bfloat16)
    meta.load_state_dict(state, assign=True)
    assert meta.weight.requires_grad and torch.equal(meta(x), layer(x))


def test_loading_fp8_into_a_master_is_refused():
    layer = make(144, 24)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"0\.weight: .* for a master weight, got torch.float8_e4m3fn; load it"):
        nn.Sequential(layer).load_state_dict(nn.Sequential(FP8Linear(144, 24)).state_dict(), strict=False)
    assert torch.equal(layer.weight, before)


def test_initialization_is_that_of_nn_linear():
    torch.manual_seed(3)
    plain = nn.Linear(272, 136)
    torch.manual_seed(3)
    layer = make()
    assert torch.equal(layer.weight, plain.weight) and torch.equal(layer.bias, plain.bias)


def test_copies_and_moves(tmp_path):
    layer = make()
    x, grad = torch.randn(4, 272), torch.randn(4, 136)
    expected = gradients(layer, x, grad, layer.parameters())
    torch.save(layer, tmp_path / "layer.pt")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        out, grads = gradients(other, x, grad, other.parameters())
        assert torch.equal(out, expected[0]) and same(grads, expected[1])
        with torch.no_grad():
            other.weight.zero_()
        assert not other(x).equal(expected[0]) and torch.equal(layer(x), expected[0])
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert gradients(layer, x, grad, layer.parameters())[1][1].dtype == torch.bfloat16
    layer.to("meta")
    assert layer.weight.is_meta and layer(torch.empty(3, 272, device="meta")).shape == (3, 136)


def test_repr():
    text = "FP8Linear(in_features=144, out_features=24, bias=False, master_dtype=torch.bfloat16)"
    assert repr(make(144, 24, False, master_dtype=torch.bfloat16)) == text


def test_from_linear_keeps_the_parameters():
    source = nn.Linear(272, 136).eval()
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    layer = FP8Linear.from_linear(source, master_dtype=torch.float32)
    assert layer.weight is source.weight and layer.bias is source.bias and not layer.training
    x = torch.randn(4, 272)
    before = layer(x)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(layer(x), before)
    assert torch.equal(layer(x), FP8Linear.from_linear(source)(x))

    source.weight.requires_grad_(False)
    other = FP8Linear.from_linear(source, master_dtype=torch.bfloat16)
    assert other.weight.dtype == torch.bfloat16 and not other.weight.requires_grad
    assert torch.equal(other.weight, source.weight.bfloat16())


def test_from_a_trained_layer():
    layer = make().eval()
    inference = FP8Linear.from_linear(layer)
    assert not inference.trainable and inference.weight.dtype == torch.float8_e4m3fn and inference.bias is layer.bias
    x = torch.randn(4, 272)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(inference(x), expected)
        layer.weight.zero_()
        assert torch.equal(inference(x), expected)
    assert FP8Linear.from_linear(layer, master_dtype=torch.float32).weight is layer.weight


def test_replace_linears_to_train_and_back():
    model = nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 48), nn.Linear(48, 8))
    parameters = list(model.parameters())
    assert replace_linears(model, skip=("3",), master_dtype=torch.float32) == ["0", "2"]
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(5, 48)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)
    with torch.no_grad():
        expected = model(x)
        assert replace_linears(model, skip=("3",), master_dtype=torch.float32) == []
        assert replace_linears(model, skip=("3",)) == ["0", "2"]
        assert torch.equal(model(x), expected)
    assert model[0].weight.dtype == model[2].weight.dtype == torch.float8_e4m3fn


# Training.


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
def test_training(options, master_dtype):
    """Loss and weights follow those of the unquantized model, with clipped gradients accumulated over micro-batches."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(master_dtype)
    model = copy.deepcopy(plain)
    replace_linears(model, master_dtype=master_dtype)
    x, target = torch.randn(2, 3, 100, 64).to(master_dtype)
    (losses, norms), (expected, plain_norms) = (
        train(each, x, target, 0.02, lr=3e-3, **options) for each in (model, plain)
    )
    assert min(*norms, *plain_norms) > 0.02
    assert_follows(losses, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(ours.detach(), theirs.detach()) < 0.1


def test_gradients_accumulate():
    layer = make()
    x, grad = torch.randn(3, 40, 272), torch.randn(3, 40, 136)
    apart = [gradients(layer, *pair, layer.parameters())[1][1:] for pair in zip(x, grad, strict=True)]
    for pair in zip(x, grad, strict=True):
        layer(pair[0]).backward(pair[1])
    for parameter, *parts in zip(layer.parameters(), *apart, strict=True):
        assert torch.equal(parameter.grad, parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize(
    "backend,dynamic", [("aot_eager", False), ("aot_eager", True), pytest.param("inductor", True, marks=INDUCTOR.marks)]
)
def test_compile(backend, dynamic, calls, fresh_compiler):
    model = nn.Sequential(make(131, 48), nn.SiLU(), make(48, 48, False))
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for shape in ((2, 3), (2, 3), (40, 5)):
        x, grad = torch.randn(*shape, 131), torch.randn(*shape, 48)
        compiled_out, compiled_grads = gradients(compiled, x, grad, parameters)
        calls.clear()
        out, grads = gradients(model, x, grad, parameters)
        assert calls.count("_quantize") == 0  # the compiled call has left copies
        torch.testing.assert_close(compiled_out, out, rtol=0.05, atol=0.02)  # SiLU may round otherwise
        for actual, expected in zip(compiled_grads, grads, strict=True):
            assert relative_error(actual, expected) < 0.02
        for parameter, value in zip(parameters, grads[1:], strict=True):
            parameter.grad = value
        optimizer.step()
        optimizer.zero_grad()
        calls.clear()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.02)
            assert not torch.allclose(compiled(x), compiled_out, rtol=0.05, atol=0.02)
        assert calls.count("_quantize") == 2


def test_compile_of_sizes_that_depend_on_data(fresh_compiler):
    layer, x, mask = make(144, 48), torch.randn(30, 144), torch.rand(30) > 0.3
    parameters = list(layer.parameters())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: layer(x[mask]), fullgraph=True, backend="aot_eager")
        grad = torch.randn(int(mask.sum()), 48)
        out, grads = gradients(compiled, x, grad, parameters)
    expected, expected_grads = gradients(lambda x: layer(x[mask]), x, grad, parameters)
    assert torch.equal(out, expected) and same(grads, expected_grads)


def test_compiled_autograd(fresh_compiler):
    layer, x = make(144, 48), torch.randn(30, 144)

    @torch.compile(backend="aot_eager")
    def backward(loss):
        loss.backward()

    layer(x).square().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with torch._dynamo.config.patch(compiled_autograd=True):
        backward(layer(x).square().sum())
        assert torch.equal(layer.weight.grad, expected)
        loss = layer(x).square().sum()
        with torch.no_grad():
            layer.weight.mul_(2)
        refused(RuntimeError, "changed in place", backward, loss)


def test_autocast_changes_nothing():
    layer, x, grad = make(), torch.randn(40, 272), torch.randn(40, 136)
    parameters = list(layer.parameters())
    out, grads = gradients(layer, x, grad, parameters)
    with torch.autocast("cpu", torch.bfloat16):
        autocast_out, autocast_grads = gradients(layer, x, grad, parameters)
    assert torch.equal(autocast_out, out) and same(autocast_grads, grads)


def test_compiled_frozen_layers_pass_gradients(fresh_compiler):
    layer = FP8Linear(131, 48)
    x, grad = torch.randn(7, 131), torch.randn(7, 48)
    expected = gradients(layer, x, grad, [layer.bias])
    assert same(
        gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), x, grad, [layer.bias])[1], expected[1]
    )


@pytest.mark.parametrize(
    ("reentrant", "compiled"),
    [(False, None), (True, None), (False, "aot_eager"), pytest.param(False, "inductor", marks=INDUCTOR.marks)],
)
def test_checkpointing(reentrant, compiled, calls, fresh_compiler):
    check_checkpointing(make(272, 48, False), make(48, 272), torch.randn(2, 150, 272), reentrant, compiled)
    assert calls.count("_quantize") == 2


# Errors.


def test_a_weight_changed_before_the_backward():
    layer = make()
    out = layer(torch.randn(4, 272))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"FP8Linear: weight, shape \(136, 272\), has been changed in place between"):
        out.sum().backward()
    layer(torch.randn(4, 272)).sum().backward()


def test_another_forward_in_between_changes_nothing():
    layer = make()
    x, grad = torch.randn(2, 4, 272), torch.randn(4, 136)
    expected = gradients(layer, x[0], grad, layer.parameters())[1]

    def call(value):
        out = layer(value)
        layer.eval()
        layer(x[1])
        layer.train()
        return out

    assert same(gradients(call, x[0], grad, layer.parameters())[1], expected)


def test_retained_graphs_give_the_same_gradients():
    layer = make()
    out = layer(torch.randn(4, 272)).square().sum()
    first = torch.autograd.grad(out, list(layer.parameters()), retain_graph=True)
    assert same(torch.autograd.grad(out, list(layer.parameters())), first)


def test_no_double_backward():
    layer = make()
    x = torch.randn(4, 272, requires_grad=True)
    for wanted in (x, layer.weight):
        (grad,) = torch.autograd.grad(layer(x).sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="FP8Linear: there is no double backward"):
            grad.square().sum().backward()
    frozen = FP8Linear(272, 136, dtype=torch.float32)
    (grad,) = torch.autograd.grad(frozen(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="FP8Linear: there is no double backward"):
        grad.sum().backward()


def test_bad_input():
    layer = make()
    refused(ValueError, r"^x: expected shape \(\.\.\., 272\) .* got \(4, 271\)", layer, torch.randn(4, 271))
    with pytest.raises(TypeError, match=r"^x: expected bfloat16, float16 or float32, got torch.float64"):
        layer(torch.randn(4, 272).double())
    refused(ValueError, r"^weight: expected on meta like x, got cpu", layer, torch.randn(4, 272, device="meta"))
    weight, scale = master.quantized(layer.weight)
    with pytest.raises(ValueError, match=r"^master: expected shape \(136, 272\) like the weight, got \(272, 136\)"):
        linear_training.linear_training(torch.randn(4, 272), weight, scale, None, layer.weight.t())
    with pytest.raises(
        TypeError, match="^fp8moe.FP8Linear: weight: expected bfloat16, float16 or float32, got torch.float64"
    ):
        layer.double()(torch.randn(4, 272))
