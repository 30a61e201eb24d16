"""GroupedExperts with a backward: trained from master weights, and frozen, on the reference backend."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8moe.kernels.activation import FUNCTIONS, Activation, activation_backward
from fp8moe.kernels.experts import backward as kernels
from fp8moe.kernels.experts.backward import experts_training
from fp8moe.kernels.experts.operands import Layer, Masters, Shard
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.layers import master as masters
from fp8moe.layers.experts import GroupedExperts
from fp8moe.quant import transpose
from fp8moe.quant.formats import FP8Tensor
from tests import experts_cases
from tests.compilers import INDUCTOR
from tests.errors import relative_error
from tests.experts_cases import MLP, inputs
from tests.experts_cases import make_trained as make
from tests.experts_training_reference import (
    Block,
    backward,
    equal,
    gradients,
    quantized,
    recipe,
    straight_through,
)

NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VARIANTS = experts_cases.VARIANTS | {
    "gelu, limit": dict(activation="gelu_pytorch_tanh", swiglu_limit=0.4),
    "sigmoid, no gate": dict(activation="sigmoid", gated=False),
}
# Against float64 with every quantization taken for the identity.
STRAIGHT_THROUGH = 6e-2
# Against float64 over the same quantized operands: values near the edge of two FP8 values may fall to the other side.
TOLERANCE = 1e-2


def check(layer, *arguments, straight=STRAIGHT_THROUGH):
    out, grads = backward(layer, *arguments)
    for expected, tolerance in ((recipe, TOLERANCE), (straight_through, straight)):
        values = expected(layer, *arguments)
        errors = {name: relative_error(grad, values[name]) for name, grad in grads.items()}
        assert max(errors.values()) <= tolerance, (expected.__name__, errors)
    return out, grads


# Numbers.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients(variant, dtype):
    layer = make(**VARIANTS[variant])
    arguments = inputs(dtype=dtype)
    out, grads = check(layer, *arguments)
    assert out.dtype == grads["x"].dtype == dtype
    with torch.no_grad():
        assert relative_error(out, layer.eval()(*arguments[:3])) <= 2e-2


@pytest.mark.parametrize("sizes", [(128, 128), (272, 200), (131, 77), (256, 384)])
@pytest.mark.parametrize("variant", ["plain", "relu2, no gate"])
def test_sizes(sizes, variant):
    layer = make(3, *sizes, **VARIANTS[variant])
    check(layer, *inputs(300, 3, hidden=sizes[0]))


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 12),
    num_experts=st.integers(1, 6),
    top_k=st.integers(0, 4),
    hidden_size=st.integers(1, 150),
    intermediate_size=st.integers(1, 150),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_any_size_and_routing(tokens, num_experts, top_k, hidden_size, intermediate_size, index_dtype, seed):
    layer = make(num_experts, hidden_size, intermediate_size, seed)
    # Indices of other ranks on both sides, experts without tokens, and the same expert twice.
    index = torch.randint(-1, num_experts + 2, (tokens, top_k), dtype=index_dtype)
    arguments = torch.randn(tokens, hidden_size), index, torch.rand(tokens, top_k), torch.randn(tokens, hidden_size)
    _, grads = backward(layer, *arguments)
    expected = recipe(layer, *arguments)
    for name, grad in grads.items():
        assert relative_error(grad, expected[name]) <= 3e-2, name  # few values, so that one on the other side shows
        assert grad.isfinite().all()


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (4, 4)])
def test_number_of_experts(num_experts, top_k):
    check(make(num_experts), *inputs(40, num_experts, top_k))


def test_one_expert_twice_in_a_token():
    x, index, weights, grad = inputs()
    index[:, 1] = index[:, 0]
    check(make(), x, index, weights, grad)


def test_indices_outside_the_range_give_no_gradient():
    layer = make()
    x, index, weights, grad = inputs()
    index[3] = torch.tensor([-1, 4])
    index[5, 1] = 2**40
    _, grads = check(layer, x, index, weights, grad)
    assert not grads["x"][3].any() and not grads["routing"][3].any() and not grads["routing"][5, 1]
    assert grads["x"][5].any() and grads["routing"][5, 0]
    index.fill_(-1)
    _, grads = backward(layer, x, index, weights, grad)
    assert not any(value.any() for value in grads.values())


@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_experts_without_tokens_get_zero_gradients(variant):
    layer = make(**VARIANTS[variant])
    x, index, weights, grad = inputs(num_experts=2)
    _, grads = backward(layer, x, index + 1, weights, grad)
    for name in ("up", "down"):
        assert not grads[name][[0, 3]].any() and all(value.any() for value in grads[name][1:3])


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (0, 0), (3, 0)])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_zero_tokens(variant, tokens, top_k):
    layer = make(**VARIANTS[variant])
    out, grads = backward(layer, *inputs(tokens, top_k=top_k))
    assert out.shape == grads["x"].shape == (tokens, 144) and grads["routing"].shape == (tokens, top_k)
    for name in ("x", "routing", "up", "down"):
        assert not grads[name].any()


@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
def test_dtypes_of_gradients(master_dtype, weights_dtype):
    layer = make(master_dtype=master_dtype)
    x, index, weights, grad = inputs()
    _, grads = check(layer, x, index, weights.to(weights_dtype), grad)
    assert grads["routing"].dtype == weights_dtype
    for name, value in (("up", layer.gate_up_proj), ("down", layer.down_proj)):
        assert grads[name].dtype == value.dtype == master_dtype and grads[name].is_contiguous()


def test_padding_does_not_change_scales():
    """A function that is not 0 at 0 would be the largest value of a block of small ones."""
    layer = make(activation="sigmoid", gated=False)
    x, index, weights, _ = inputs()
    with torch.no_grad():
        layer.up_proj.fill_(-14 / 144)
        out = layer(x.fill_(1), index, weights)
        assert relative_error(out, layer.eval()(x, index, weights)) <= TOLERANCE


def test_leading_dimensions():
    layer = make()
    x, index, weights, grad = inputs()
    flat = backward(layer, x, index, weights, grad)[1]
    _, grads = backward(layer, *(value.view(5, 8, -1) for value in (x, index, weights, grad)))
    equal(
        {name: value.flatten(0, -2) for name, value in grads.items() if name in ("x", "routing")},
        {name: flat[name] for name in ("x", "routing")},
    )
    assert torch.equal(grads["up"], flat["up"])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("form", [dict(gated=False), dict(), dict(limit=0.4)])
def test_derivatives_of_activations(name, form):
    activation = Activation(name=name, **form)
    projected = torch.randn(50, 32, dtype=torch.float64).requires_grad_()
    value = activation(projected)
    grad = torch.randn_like(value)
    d_projected, again = activation_backward(projected.detach(), grad, activation)
    torch.testing.assert_close(again, value.detach())
    torch.testing.assert_close(d_projected, torch.autograd.grad(value, projected, grad)[0])
    bad = torch.full((1, 32), NAN, dtype=torch.float64)
    if name != "linear":
        assert activation_backward(bad, torch.ones(1, value.shape[1]), activation)[0].isnan().all()


# What must not happen.


def touched(index, token, num_experts=4):
    return torch.tensor([expert in index[token] for expert in range(num_experts)])


@pytest.mark.parametrize("variant", ["plain", "limit", "gelu"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("where", ["x", "grad", "weight"])
def test_bad_value_touches_what_depends_on_it_only(where, bad, variant):
    layer = make(**VARIANTS[variant])
    arguments = dict(zip(("x", "index", "weights", "grad"), inputs(12), strict=True))
    _, clean = backward(layer, *arguments.values())
    arguments["weights" if where == "weight" else where][7, 1] = bad
    _, grads = backward(layer, *arguments.values())
    experts = touched(arguments["index"], 7)
    if where == "weight":
        experts = torch.arange(4) == arguments["index"][7, 1]
    assert 0 < experts.sum() < 4
    for name in ("up", "down"):
        assert torch.equal(grads[name][~experts], clean[name][~experts])
    if where == "grad":
        assert not grads["x"][7].isfinite().any() and not grads["routing"][7].isfinite().any()
    elif where == "weight":
        assert not grads["x"][7].isfinite().any() and torch.equal(grads["routing"][7], clean["routing"][7])
    else:
        assert not grads["routing"][7].isfinite().any()
    others = torch.arange(12) != 7
    for name in ("x", "routing"):
        assert torch.equal(grads[name][others], clean[name][others])
    # Where a limit clamps a value, its gradient is zero, whatever comes.
    names = ("down",) if variant == "limit" else ("up", "down")
    for name in names:
        assert all(not value.isfinite().all() for value in grads[name][experts])


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_master_changed_between_forward_and_backward(name):
    layer = make()
    x, index, weights, grad = inputs()
    out = layer(x, index, weights)
    with torch.no_grad():
        getattr(layer, name).mul_(2)
    with pytest.raises(RuntimeError, match=rf"GroupedExperts: {name}, shape \(4, .* changed in place between forward"):
        out.backward(grad)
    backward(layer, x, index, weights, grad)


def test_master_changed_is_seen_when_compiled(fresh_compiler):
    layer = make()
    x, index, weights, grad = inputs()
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, index, weights)
    with torch.no_grad():
        layer.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        out.backward(grad)


@pytest.mark.parametrize("frozen", [False, True])
def test_double_backward(frozen):
    layer = make()
    if frozen:
        layer = GroupedExperts.from_experts(layer)
    x, index, weights, _ = inputs()
    for wanted in ([x], [x, weights]):
        for value in wanted:
            value.requires_grad_()
        grads = torch.autograd.grad(layer(x, index, weights).sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match=r"GroupedExperts: there is no double backward"):
            sum(grad.float().square().sum() for grad in grads).backward()


def test_result_may_be_changed_in_place():
    layer = make()
    x, index, weights, grad = inputs()
    expected = backward(layer, x, index, weights, grad)[1]
    for shape in ((40,), (5, 8)):
        layer.zero_grad()
        out = layer(*(value.unflatten(0, shape) for value in (x, index, weights)))
        out.mul_(2).backward(grad.div(2).unflatten(0, shape))
        assert torch.equal(layer.down_proj.grad, expected["down"])


def test_second_backward_through_one_forward():
    layer = make()
    x, index, weights, grad = inputs()
    out = layer(x, index, weights)
    out.backward(grad, retain_graph=True)
    once = layer.down_proj.grad.clone()
    out.backward(grad)
    assert torch.equal(layer.down_proj.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(grad)


# What is quantized and what is kept.


@pytest.fixture
def calls(monkeypatch):
    """How often each quantizer runs."""
    counts = {}

    def count(module, name):
        function = getattr(module, name)

        def counted(*arguments, **options):
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    for name in (
        "quantize_with_transpose",
        "quantize_columns",
        "swiglu_quantize",
        "swiglu_backward_quantize",
        "permute_quantize",
        "quantize_1x128",
    ):
        count(kernels, name)
    count(masters, "_quantize")
    count(transpose, "transpose_fp8")
    return counts


def test_each_quantization_happens_once(calls):
    layer = make()
    x, index, weights, grad = inputs()
    x.requires_grad_()
    out = layer(x, index, weights.requires_grad_())
    # x by rows, both weights; GEMM 1 quantizes h.
    assert calls == {"permute_quantize": 1, "_quantize": 2}
    calls.clear()
    out.backward(grad)
    # The gradient of the result; that of the gate and up projections, and h by columns; x by columns.
    by_columns = {"quantize_with_transpose": 1, "swiglu_backward_quantize": 1, "quantize_columns": 1}
    assert calls == by_columns | {"transpose_fp8": 2}  # of padded copies


def test_micro_batches_share_the_transposes_that_are_made_with_the_copies(calls):
    layer = make(intermediate_size=128)
    x, index, weights, grad = inputs()
    for _ in range(3):
        layer(x.requires_grad_(), index, weights).backward(grad)
    assert calls["_quantize"] == 2 and "transpose_fp8" not in calls
    first = [parameter.grad.clone() for parameter in layer.parameters()]
    fresh = make(intermediate_size=128)
    with torch.no_grad():
        fresh(x, index, weights)  # leaves copies without transposes
    for _ in range(3):
        fresh(x, index, weights).backward(grad)
    assert calls["transpose_fp8"] == 6
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(fresh.parameters(), first, strict=True))


def test_each_quantization_happens_once_with_another_activation(calls):
    layer = make(**VARIANTS["gelu"])
    backward(layer, *inputs())
    by_rows = {"permute_quantize": 1, "quantize_1x128": 1, "_quantize": 2}
    assert calls == by_rows | {"quantize_with_transpose": 2, "quantize_columns": 2, "transpose_fp8": 2}


@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_frozen_weights_need_no_transposed_activations(calls, variant):
    layer = GroupedExperts.from_experts(make(**VARIANTS[variant]))
    calls.clear()
    backward(layer, *inputs())
    activations = {"swiglu_backward_quantize": 1}
    others = activations if variant == "plain" else {"quantize_1x128": 2}
    assert calls == {"permute_quantize": 2, "transpose_fp8": 2} | others


def test_masters_are_quantized_once_per_step(calls):
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, index, weights, grad = inputs()
    for step in range(1, 4):
        for _ in range(2):
            layer(x, index, weights).backward(grad)
        with torch.no_grad():
            layer(x, index, weights)
        layer(x, index, weights).backward(grad)
        assert calls["_quantize"] == 2 * step
        optimizer.step()
        optimizer.zero_grad()


def kept_bytes(layer, x, index, weights):
    """Bytes of the tensors that autograd saves, but for the inputs, parameters and FP8 weights."""
    left_out = {value.untyped_storage().data_ptr() for value in (*layer.parameters(), x, weights)}
    if layer.trainable:
        copies = [kept for copy in layer.local_weights().layer[:2] for kept in (copy, transpose.backward_operand(copy))]
        left_out |= {value.untyped_storage().data_ptr() for copy in copies for value in copy}
    kept = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr() or id(value)] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out = layer(x, index, weights)
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(256, 128), (131, 77)])
@pytest.mark.parametrize("gated", [True, False])
def test_memory_kept_for_the_backward(gated, sizes, dtype):
    """As documented by experts_training: the result of GEMM 1, and no copy of the input, which is the caller's."""
    experts, tokens, top_k, (hidden, size) = 4, 200, 2, sizes
    x, index, weights, _ = inputs(tokens, experts, top_k, hidden, dtype)
    rows, size = tokens * top_k, -(-size // 128) * 128
    documented = (4 if gated else 2) * rows * size + 4 * rows + 4 * (experts + 1)

    layer = make(experts, *sizes, gated=gated)
    x.requires_grad_()
    assert kept_bytes(layer, x, index, weights) == documented
    layer.down_proj.requires_grad_(False)
    assert kept_bytes(layer, x, index, weights) == documented
    assert kept_bytes(GroupedExperts.from_experts(layer), x, index, weights) == documented


def kept_inputs(call, *inputs):
    """Which of the inputs autograd saves for the backward of the call's result."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        call()
    pointers = {value.untyped_storage().data_ptr() for value in kept}
    return [value.untyped_storage().data_ptr() in pointers for value in inputs]


def test_the_input_is_kept_where_a_gradient_reads_it():
    layer = make()
    x, index, weights, _ = inputs()
    x.requires_grad_()
    assert kept_inputs(lambda: layer(x, index, weights), x) == [True]
    getattr(layer, layer.up_name).requires_grad_(False)
    assert kept_inputs(lambda: layer(x, index, weights), x) == [False]
    assert kept_inputs(lambda: GroupedExperts.from_experts(layer)(x, index, weights), x) == [False]


@pytest.mark.parametrize("trained", ["up", "down"])
def test_input_changed_between_forward_and_backward(trained):
    layer = make()
    getattr(layer, layer.up_name if trained == "down" else "down_proj").requires_grad_(False)
    x, index, weights, grad = inputs()
    out = layer(x, index, weights)
    x.mul_(2)
    if trained == "down":  # nothing reads it
        out.backward(grad)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)


def test_nothing_is_kept_without_gradients():
    layer = make()
    x, index, weights, _ = inputs()
    with torch.no_grad():
        out = layer(x, index, weights)
        assert not out.requires_grad
    assert torch.equal(layer(x, index, weights), out)  # in training mode, the same bits
    layer.requires_grad_(False)
    assert not layer(x, index, weights).requires_grad


# Frozen weights.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(144, 96), (131, 200)])
def test_frozen_weights_pass_gradients(sizes, variant):
    layer = make(4, *sizes, **VARIANTS[variant])
    frozen = GroupedExperts.from_experts(layer, decode_capacity=64)
    arguments = inputs(hidden=sizes[0])
    out, grads = check(frozen, *arguments)
    expected_out, expected = backward(layer, *arguments)
    assert torch.equal(out, expected_out)
    equal(grads, {name: expected[name] for name in ("x", "routing")})
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in frozen.parameters())


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj"])
def test_one_frozen_master(frozen):
    layer, arguments = make(), inputs()
    expected = backward(layer, *arguments)[1]
    getattr(layer, frozen).requires_grad_(False).grad = None
    _, grads = backward(layer, *arguments)
    equal(grads, {name: value for name, value in expected.items() if name != frozen.split("_")[-2]})


@pytest.mark.parametrize("wanted", ["x", "routing", "gate_up_proj", "down_proj"])
def test_one_gradient(wanted):
    layer = make().requires_grad_(False)
    x, index, weights, grad = inputs()
    expected = backward(make(), x, index, weights, grad)[1]
    named = {"x": x, "routing": weights, "gate_up_proj": layer.gate_up_proj, "down_proj": layer.down_proj}
    named[wanted].requires_grad_()
    layer(x, index, weights).backward(grad)
    name = {"gate_up_proj": "up", "down_proj": "down"}.get(wanted, wanted)
    assert torch.equal(named[wanted].grad, expected[name])
    assert all(value.grad is None for key, value in named.items() if key != wanted)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_fp8_weights_have_no_gradient(backend, fresh_compiler):
    layer = GroupedExperts.from_experts(make()).requires_grad_()
    x, index, weights, grad = inputs()
    call = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    out = call(x.requires_grad_(), index, weights)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match=r"fp8moe\.GroupedExperts has no backward"):
        out.backward(grad)


def test_inference_mode():
    layer = make()
    x, index, weights, _ = inputs()
    with torch.inference_mode():
        out = layer.eval()(x, index, weights)
        assert torch.equal(out, GroupedExperts.from_experts(layer)(x, index, weights))


# Training loops.


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    block, x = Block(make()), torch.randn(30, 144)
    expected = gradients(block, block, x)
    assert expected.keys() == {"x", "gate.weight", "gate.bias", "experts.gate_up_proj", "experts.down_proj"}
    equal(gradients(block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant), x), expected)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("frozen", [False, True])
def test_compile(frozen, backend, fresh_compiler):
    block = Block(make())
    if frozen:
        block.experts = GroupedExperts.from_experts(block.experts)
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
    for tokens in (3, 40, 41):
        x = torch.randn(tokens, 144)
        expected = gradients(block, block, x)
        actual = gradients(block, compiled, x)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert relative_error(actual[name], value) <= (0 if backend == "aot_eager" else 2e-2), name
        optimizer.step()


def test_compile_of_sizes_that_depend_on_data(fresh_compiler):
    block, x, mask = Block(make()), torch.randn(30, 144), torch.rand(30) > 0.3
    expected = gradients(block, lambda x: block(x[mask]), x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: block(x[mask]), fullgraph=True, backend="aot_eager")
        equal(gradients(block, compiled, x), expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_changes_nothing(frozen):
    layer = GroupedExperts.from_experts(make()) if frozen else make()
    x, weights, grad = torch.randn(30, 144), torch.rand(30, 2), torch.randn(30, 144)
    index = torch.rand(30, layer.num_experts).topk(2).indices
    out, grads = backward(layer, x, index, weights, grad)
    with torch.autocast("cpu", torch.bfloat16):
        autocast_out, autocast_grads = backward(layer, x, index, weights, grad)
    assert torch.equal(autocast_out, out)
    equal(autocast_grads, grads)


def test_compile_with_checkpointing(fresh_compiler):
    block, x = Block(make()), torch.randn(30, 144)
    expected = gradients(block, block, x)
    compiled = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    equal(gradients(block, compiled, x), expected)


def test_accumulation_over_micro_batches():
    block = Block(make())
    batches = [torch.randn(20, 144) for _ in range(3)]
    separate = [gradients(block, block, x) for x in batches]
    block.zero_grad()
    for x in batches:
        block(x).square().sum().backward()
    for name, value in block.named_parameters():
        assert torch.equal(value.grad, separate[0][name] + separate[1][name] + separate[2][name])


@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_optimizers(form, master_dtype):
    block = Block(make(master_dtype=master_dtype))
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3, **{form: True})
    torch.manual_seed(1)
    x, target = torch.randn(64, 144), torch.randn(64, 144)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.mse_loss(block(x), target)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(block.parameters(), 0.1)
        total = sum(value.grad.double().square().sum() for value in block.parameters()).sqrt()
        assert norm.isfinite() and total <= 0.101
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    # The FP8 copies are those of the weights as they are now.
    fresh = Block(make(master_dtype=master_dtype))
    fresh.load_state_dict(block.state_dict())
    assert torch.equal(fresh(x), block(x))


# The module.


def test_state_dict_is_that_of_unquantized_experts():
    for dtype in (torch.bfloat16, torch.float32):
        layer = make(3, 272, 200, master_dtype=dtype)
        assert {name: (value.shape, value.dtype) for name, value in layer.state_dict().items()} == {
            "gate_up_proj": ((3, 400, 272), dtype),
            "down_proj": ((3, 272, 200), dtype),
        }
        assert all(value.requires_grad for value in layer.parameters())
    assert make(3, 272, 200, gated=False).up_proj.shape == (3, 200, 272)


def test_initialization_is_that_of_frozen_experts():
    torch.manual_seed(0)
    frozen = GroupedExperts(num_experts=2, hidden_size=272, intermediate_size=200, dtype=torch.float32)
    expected = GroupedExperts.from_experts(make(2, 272, 200)).state_dict()
    assert all(torch.equal(value.float(), expected[name].float()) for name, value in frozen.state_dict().items())


def test_casts_moves_and_copies(tmp_path):
    layer = make(swiglu_limit=0.4)
    x, index, weights, grad = inputs()
    expected = backward(layer, x, index, weights, grad)[1]
    torch.save(layer, tmp_path / "layer.pt")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        with torch.no_grad():
            layer.down_proj.neg_()  # shared with neither
        equal(backward(other, x, index, weights, grad)[1], expected)
        with torch.no_grad():
            layer.down_proj.neg_()
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert all(value.dtype == torch.bfloat16 for value in half.parameters())
    _, grads = backward(half, x, index, weights, grad)
    assert grads["up"].dtype == torch.bfloat16
    check(half, x, index, weights, grad)
    on_meta = copy.deepcopy(layer).to("meta")
    assert on_meta(x.to("meta"), index.to("meta"), weights.to("meta")).is_meta


def test_repr():
    assert repr(make()).endswith("activation='silu', master_dtype=torch.float32)")


def test_changes_that_versions_do_not_show():
    """Through .data, as some code exchanges weights for those of an average; seen after a switch of modes."""
    layer = make()
    x, index, weights, _ = inputs()
    with torch.no_grad():
        before = layer.eval()(x, index, weights)
        layer.train()
        layer.down_proj.data = -layer.down_proj.data
        assert torch.equal(layer.eval()(x, index, weights), -before)
        layer.load_state_dict(make().state_dict())
        assert torch.equal(layer(x, index, weights), before)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_loading_fp8_weights_is_refused(name):
    layer = make()
    before = copy.deepcopy(layer).state_dict()
    state = layer.state_dict() | {name: layer.state_dict()[name].to(torch.float8_e4m3fn)}
    with pytest.raises(RuntimeError, match=rf"0\.{name}: expected bfloat16.*got torch.float8_e4m3fn.*from_experts"):
        nn.Sequential(layer).load_state_dict({f"0.{key}": value for key, value in state.items()})
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def fused(size=96, dtype=torch.bfloat16):
    """A module as transformers has them."""
    torch.manual_seed(0)
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.randn(4, 2 * size, 144).mul(0.1).to(dtype))
    module.down_proj = nn.Parameter(torch.randn(4, 144, size).mul(0.1).to(dtype))
    module.act_fn = nn.SiLU()
    return module


@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_experts(dtype, master_dtype):
    module = fused(dtype=dtype).eval()
    layer = GroupedExperts.from_experts(module, master_dtype=master_dtype, decode_capacity=4)
    assert not layer.training and layer.decode_capacity == 4
    for name in ("gate_up_proj", "down_proj"):
        value, source = getattr(layer, name), getattr(module, name)
        assert value.requires_grad and value.dtype == master_dtype and torch.equal(value, source.to(master_dtype))
        assert (value is source) == (dtype == master_dtype)
    check(layer, *inputs())
    layer = GroupedExperts.from_experts(module.requires_grad_(False), master_dtype=master_dtype)
    assert not any(value.requires_grad for value in layer.parameters())


def test_from_experts_one_by_one():
    modules = nn.ModuleList(MLP() for _ in range(4)).float()
    layer = GroupedExperts.from_experts(modules, master_dtype=torch.float32)
    for expert, module in enumerate(modules):
        gate_up = torch.cat([module.gate_proj.weight, module.up_proj.weight])
        assert torch.equal(layer.gate_up_proj[expert], gate_up)
        assert torch.equal(layer.down_proj[expert], module.down_proj.weight)
    check(layer, *inputs())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [96, 200])
def test_from_experts_of_our_own(size, variant):
    """Train, freeze, and go on training from the frozen weights."""
    trained = make(4, 144, size, **VARIANTS[variant])
    x, index, weights, _ = inputs()
    with torch.no_grad():
        expected = trained.eval()(x, index, weights)
        frozen = GroupedExperts.from_experts(trained)
        assert frozen.activation == trained.activation and not frozen.trainable and not frozen.training
        assert torch.equal(frozen(x, index, weights), expected)
        again = GroupedExperts.from_experts(frozen, master_dtype=torch.float32)
        up, down = quantized(frozen)
        assert torch.equal(getattr(again, again.up_name), up.flatten(1, 2).float())
        assert torch.equal(again.down_proj, down.float())
        assert all(value.requires_grad for value in again.parameters())
        assert relative_error(again(x, index, weights), expected) <= 1e-6


def test_decode_capacity_is_for_calls_without_gradients(monkeypatch):
    layer = make(decode_capacity=64)
    x, index, weights, grad = inputs()
    given = []

    def run(operands):
        given.append(operands.capacity)
        return operands.hidden_states, None

    monkeypatch.setattr("fp8moe.layers.experts.experts_of_tokens", run)
    with torch.no_grad():
        layer.eval()(x, index, weights)
    assert given == [64]
    equal(backward(layer, x, index, weights, grad)[1], backward(make(), x, index, weights, grad)[1])
    assert given == [64]


# A rank's share of the experts.


def share(layer, start, end, x, index, weights, grad, **options):
    """The result of experts [start, end), and gradients by name."""
    up, down, activation, _ = layer.local_weights().layer
    up, down = (FP8Tensor(*(part[start:end] for part in weight)) for weight in (up, down))
    masters = [value.detach()[start:end].requires_grad_() for value in (layer.gate_up_proj, layer.down_proj)]
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    shard = Shard(**{"first_expert": start, "num_experts": layer.num_experts, "out_dtype": torch.float32} | options)
    out = experts_training(x, index, weights, Layer(up, down, activation), Masters(*masters), shard=shard)
    grads = torch.autograd.grad(out, (x, weights, *masters), grad.to(out.dtype))
    return out.detach(), dict(zip(("x", "routing", "up", "down"), grads, strict=True))


@pytest.mark.parametrize("sizes", [(144, 96), (131, 77)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_shares_add_up_to_the_layer(variant, dtype, sizes):
    layer = make(6, *sizes, **VARIANTS[variant])
    arguments = inputs(40, 6, 3, sizes[0], dtype)
    index = arguments[1]
    expected, whole = backward(layer, *arguments)
    total, d_x = torch.zeros(40, sizes[0]), torch.zeros(40, sizes[0])
    for start in (0, 2, 4):
        local = (index >= start) & (index < start + 2)
        out, grads = share(layer, start, start + 2, *arguments, num_rows=int(local.sum()))
        assert out.dtype == torch.float32 and grads["x"].dtype == dtype
        total, d_x = total + out, d_x + grads["x"].float()
        for name in ("up", "down"):
            assert torch.equal(grads[name], whole[name][start : start + 2]), name
        assert torch.equal(grads["routing"], torch.where(local, whole["routing"], 0))
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(total.to(dtype), expected, rtol=step, atol=1e-6)
    torch.testing.assert_close(d_x, whole["x"].float(), rtol=0, atol=2 * step * whole["x"].abs().max().item())


def test_sums_are_not_rounded_with_a_wider_out_dtype():
    layer, arguments = make(), inputs()
    narrow, expected = share(layer, 0, 4, *arguments, out_dtype=None)
    wide, grads = share(layer, 0, 4, *arguments)
    assert narrow.dtype == torch.bfloat16 and torch.equal(wide.bfloat16(), narrow)
    assert not torch.equal(wide, wide.bfloat16().float())
    equal(grads, expected)


def test_assignments_beyond_the_rows_add_nothing():
    layer = make()
    x, index, weights, grad = inputs()
    kept = sort_by_expert(index, 3, first_expert=1, num_rows=25).rows >= 0
    assert 0 < kept.sum() == 25 < (index >= 1).sum()
    got, grads = share(layer, 1, 4, x, index, weights, grad, num_rows=25)
    out, expected = share(layer, 1, 4, x, torch.where(kept, index, -1), weights, grad)
    assert torch.equal(got, out)
    equal(grads, expected)


def seen_products(monkeypatch, look):
    """A list of what `look` makes of the arguments of each product of rows and experts, as they are computed."""
    found = []
    for name in ("grouped_rows", "grouped_gemm_swiglu_keeping"):
        multiply = getattr(kernels, name)
        seen = lambda *a, multiply=multiply, **options: found.append(look(*a, **options)) or multiply(*a, **options)  # noqa: E731
        monkeypatch.setattr(kernels, name, seen)
    return found


def test_memory_kept_is_that_of_the_rows(monkeypatch):
    layer, arguments = make(), inputs()
    found = seen_products(monkeypatch, lambda a, *rest, **options: len(a.data))
    share(layer, 0, 2, *arguments, num_rows=60)
    assert found == [60] * 4


def test_tiles_are_chosen_for_the_rows_of_a_share(monkeypatch):
    found = seen_products(monkeypatch, lambda *a, **options: options["whole"])
    share(make(), 0, 2, *inputs(), num_experts=16)
    assert found == [(80, 16)] * 4
    layer = make()
    backward(layer, *inputs())
    assert found[4:] == [(80, len(layer.down_proj))] * 4


@pytest.mark.parametrize(
    ("options", "exception", "message"),
    [
        (
            {"num_experts": 3},
            ValueError,
            "^first_expert: expected that the 2 experts here are among 3 from 0 on, got 2",
        ),
        ({"first_expert": -1}, ValueError, "^first_expert: .* got -1"),
        ({"num_rows": -1}, ValueError, "^num_rows: expected 0 to"),
        (
            {"out_dtype": torch.float64},
            TypeError,
            "^out_dtype: expected bfloat16, float16 or float32, got torch.float64",
        ),
    ],
)
def test_bad_share(options, exception, message):
    with pytest.raises(exception, match=message):
        share(make(), 2, 4, *inputs(), **options)


# Bad input.


def test_bad_construction():
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float64):
        with pytest.raises(TypeError, match=rf"^master_dtype: expected .* got {dtype}"):
            make(master_dtype=dtype)
        with pytest.raises(TypeError, match=rf"^master_dtype: expected .* got {dtype}"):
            GroupedExperts.from_experts(fused(), master_dtype=dtype)
    with pytest.raises(ValueError, match=r"^scale_format: expected 'float32' with a master_dtype, got 'ue8m0'"):
        GroupedExperts.from_experts(fused(), master_dtype=torch.float32, scale_format="ue8m0")


@pytest.mark.parametrize(
    ("change", "exception", "message"),
    [
        (lambda x, i, w: (x.double(), i, w), TypeError, r"^hidden_states: expected bfloat16, .* got torch.float64"),
        (lambda x, i, w: (x[:, :128], i, w), ValueError, r"^hidden_states: expected shape \(T, 144\)"),
        (lambda x, i, w: (x, i.short(), w), TypeError, r"^top_k_index: expected int32 or int64"),
        (lambda x, i, w: (x, i, w[:, :1]), ValueError, r"^top_k_weights: expected shape \(40, 2\)"),
        (lambda x, i, w: (x, i.to("meta"), w), ValueError, r"^top_k_index: expected on cpu .* got meta"),
    ],
)
def test_bad_input(change, exception, message):
    with pytest.raises(exception, match=message):
        make()(*change(*inputs()[:3]))


def test_bad_master():
    layer = make().local_weights().layer
    x, index, weights, _ = inputs()
    for name in ("up_master", "down_master"):
        with pytest.raises(ValueError, match=rf"^{name}: expected shape \(4, .* like the FP8 weight, got \(4, 3\)"):
            experts_training(x, index, weights, layer, Masters(**{name: torch.zeros(4, 3, requires_grad=True)}))
