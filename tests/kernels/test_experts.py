"""GroupedExperts and the operator behind it on the reference backend."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.experts.operands import Layer, Norm, TokenOperands
from fp8moe.kernels.experts.operator import experts_of_tokens
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128, quantize_128x128
from tests import experts_cases
from tests.errors import relative_error
from tests.experts_cases import MLP, layer_of, make, route
from tests.experts_training_reference import Block
from tests.gpu.checks import same_bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The largest error allowed against float64 over the same quantized operands.
TOLERANCE = 1e-2
VARIANTS = experts_cases.VARIANTS | {
    "gelu, limit": dict(activation="gelu_pytorch_tanh", swiglu_limit=0.4),
    "silu, no gate": dict(gated=False),
}


def float64(layer):
    """The dequantized weights: projections (E, 1 or 2, I, H) and down (E, H, I)."""
    up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    count, hidden, size = down.shape
    blocks = -(-size // 128)
    parts = up.reshape(-1, size, hidden), up_scale.reshape(-1, blocks, up_scale.shape[-1])
    projections = dequantize(parts, dtype=torch.float64).view(count, -1, size, hidden)
    return projections, dequantize((down, down_scale), dtype=torch.float64)


def exact(layer, x, index, weights):
    """A plain loop over tokens and experts in float64 over the quantized operands."""
    limit, alpha = layer.activation.limit, layer.activation.alpha
    function = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu2": lambda v: F.relu(v) ** 2,
    }[layer.activation.name]
    projections, down = float64(layer)
    rows = dequantize(quantize_1x128(x), dtype=torch.float64)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in ((t, k) for t in range(len(x)) for k in range(index.shape[1])):
        expert = index[t, k].item()
        if not 0 <= expert < layer.num_experts:
            continue
        *gate, up = (w @ rows[t] for w in projections[expert])
        if not gate:
            value = function(up)
        else:
            gate = gate[0] if limit is None else gate[0].clamp(max=limit)
            up = up if limit is None else up.clamp(-limit, limit)
            value = function(gate) * up if alpha is None else gate * torch.sigmoid(alpha * gate) * (up + 1)
        quantized = dequantize(quantize_1x128(value[None].float()), dtype=torch.float64)[0]
        out[t] += weights[t, k].double() * (down[expert] @ quantized)
    return out


def close(actual, expected, tolerance=TOLERANCE):
    assert relative_error(actual, expected) <= tolerance


# Numbers.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, dtype):
    layer = make(**VARIANTS[variant])
    x = torch.randn(7, 144).mul(3).to(dtype)
    index, weights = route(7, 4, 2)
    out = layer(x, index, weights)
    assert out.dtype == dtype and out.is_contiguous()
    close(out, exact(layer, x, index, weights))


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 12),
    num_experts=st.integers(1, 6),
    top_k=st.integers(1, 4),
    hidden_size=st.integers(1, 300),
    intermediate_size=st.integers(1, 300),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    capacity=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_size_and_routing(tokens, num_experts, top_k, hidden_size, intermediate_size, index_dtype, capacity, seed):
    layer = make(num_experts, hidden_size, intermediate_size, seed, decode_capacity=48 if capacity else None)
    x = torch.randn(tokens, hidden_size)
    # Indices of other ranks on both sides, experts without tokens, and the same expert twice.
    index = torch.randint(-1, num_experts + 2, (tokens, top_k), dtype=index_dtype)
    weights = torch.rand(tokens, top_k)
    close(layer(x, index, weights), exact(layer, x, index, weights))


@pytest.mark.parametrize("sizes", [(144, 96), (144, 200), (272, 320), (131, 77), (1, 1), (128, 128)])
def test_sizes_that_are_not_multiples(sizes):
    layer = make(3, *sizes, swiglu_limit=0.4)
    x = torch.randn(5, sizes[0], dtype=torch.bfloat16)
    index, weights = route(5, 3, 2)
    close(layer(x, index, weights), exact(layer, x, index, weights))


def test_one_expert_and_top_1():
    layer = make(1)
    x = torch.randn(5, 144)
    index, weights = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    close(layer(x, index, weights), exact(layer, x, index, weights))


def test_no_experts_to_a_token():
    layer = make()
    assert not layer(torch.randn(3, 144), torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0)).any()
    assert not layer(torch.randn(3, 144), torch.full((3, 2), 4), torch.ones(3, 2)).any()


def test_indices_of_other_ranks_add_nothing():
    """The experts of two halves, each with its own indices, together make the whole."""
    layer = make(6)
    x = torch.randn(9, 144)
    index, weights = route(9, 6, 3)
    whole = layer(x, index, weights)
    halves = []
    for first in (0, 3):
        half = make(3)
        half.load_state_dict({name: value[first : first + 3] for name, value in layer.state_dict().items()})
        halves.append(half(x, index - first, weights))
    close(halves[0] + halves[1], whole, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["plain", "gelu", "relu2, no gate"])
@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_decode_capacity_changes_nothing(tokens, variant, dtype):
    layer = make(**VARIANTS[variant])
    masked = make(**VARIANTS[variant], decode_capacity=8)
    x = torch.randn(tokens, 144).to(dtype)
    index, weights = route(tokens, 4, 2)
    index[0, 0] = 9
    close(masked(x, index, weights), layer(x, index, weights), 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_assignments_that_are_sorted_already(variant, monkeypatch):
    layer, masked = make(**VARIANTS[variant]), make(**VARIANTS[variant], decode_capacity=9)
    x, (index, weights) = torch.randn(9, 144), route(9, 4, 2)
    index[0, 0], index[3, 1] = 9, -1
    order = sort_by_expert(index, 4)._asdict()
    expected = layer(x, index, weights, residual=x)
    close(masked(x, index, weights, residual=x, **order), expected, 1e-6)  # with rows of its own
    monkeypatch.setattr("fp8moe.kernels.experts.operator.sort_by_expert", None)
    for _ in range(2):
        assert torch.equal(layer(x, index, weights, residual=x, **order), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [0, 1, 9, 64, 65])
def test_norm_of_the_result(tokens, variant, dtype):
    x, (index, weights) = torch.randn(tokens, 144).to(dtype), route(tokens, 4, 2)
    norm_weight = torch.randn(144).to(dtype)
    for capacity, residual in ((None, None), (9, x)):
        layer = make(**VARIANTS[variant], decode_capacity=capacity)
        expected = layer(x, index, weights, residual=residual)
        for quantized in (False, True):
            norm = Norm(norm_weight, 1e-6, quantized)
            out, normed = layer.forward_with_norm(x, index, weights, norm, residual=residual)
            assert torch.equal(out, expected)
            # With these sizes and activations there is one kernel for both.
            if not (0 < tokens <= 64 and layer.activation.is_swiglu and dtype is not torch.float16):
                assert normed is None
                continue
            other = rms_norm(expected, norm_weight, 1e-6, values=not quantized, quantized=quantized)
            assert normed.sum is None and (normed.values is None) == quantized == (normed.quantized is not None)
            for one, two in zip(normed.quantized or (normed.values,), other.quantized or (other.values,), strict=True):
                assert torch.equal(one.float(), two.float()) and one.stride() == two.stride()


def test_norm_where_no_kernel_gives_it_besides():
    index, weights = route(9, 4, 2)
    for sizes in ((131, 96), (144, 77)):
        layer, x = make(4, *sizes), torch.randn(9, sizes[0])
        out, normed = layer.forward_with_norm(x, index, weights, Norm(torch.ones(sizes[0]), 1e-6, False))
        assert normed is None and torch.equal(out, layer(x, index, weights))
    trained = experts_cases.make_trained(4, 144, 96)
    out, normed = trained.forward_with_norm(torch.randn(9, 144), index, weights, Norm(torch.ones(144), 1e-6))
    assert normed is None and out.requires_grad
    with pytest.raises(ValueError, match=r"^norm_weight: expected shape \(144,\), got \(143,\)"):
        make().forward_with_norm(torch.randn(9, 144), index, weights, Norm(torch.ones(143), 1e-6))


@pytest.mark.parametrize("tokens", [4, 5])
def test_decode_capacity_is_for_few_tokens(tokens, monkeypatch):
    given = []
    monkeypatch.setattr(
        "fp8moe.layers.experts.experts_of_tokens",
        lambda call: given.append(call.capacity) or (call.hidden_states, None),
    )
    make(decode_capacity=4)(torch.randn(tokens, 144), *route(tokens, 4, 2))
    assert given == [4 if tokens == 4 else None]


def test_bad_weight_touches_tokens_of_its_expert_only():
    layer = make()
    x = torch.randn(8, 144)
    index, weights = route(8, 4, 2)
    clean = layer(x, index, weights)
    layer.down_proj_scale_inv[1] = float("nan")
    out = layer(x, index, weights)
    routed = (index == 1).any(-1)
    assert 0 < routed.sum() < 8
    assert out[routed].isnan().all() and torch.equal(out[~routed], clean[~routed])


@pytest.mark.parametrize("variant", ["gated", "gelu"])
@pytest.mark.parametrize("hidden_size", [128, 100])
@pytest.mark.parametrize("tokens", [0, 5])
def test_residual_is_added_to_the_rounded_result(variant, hidden_size, tokens):
    layer = make(hidden_size=hidden_size, activation="gelu" if variant == "gelu" else "silu")
    index, weights = route(tokens, 4, 2)
    x, residual = torch.randn(2, tokens, hidden_size).bfloat16()
    expected = residual + layer(x, index, weights)
    assert torch.equal(layer(x, index, weights, residual=residual), expected)
    assert torch.equal(layer(x[None], index[None], weights[None], residual=residual[None]), expected[None])
    with pytest.raises(ValueError, match=r"^residual: expected shape"):
        layer(x, index, weights, residual=residual[:, 1:])


def test_residual_gets_its_gradient():
    layer = make()
    index, weights = route(9, 4, 2)
    x = torch.randn(9, layer.hidden_size)
    residual = torch.randn_like(x).requires_grad_()
    layer(x, index, weights, residual=residual).sum().backward()
    assert (residual.grad == 1).all()
    trained = experts_cases.make_trained()
    out = trained(x, index, weights, residual=residual.detach())
    assert torch.equal(out, residual + trained(x, index, weights))


@pytest.mark.parametrize("sizes", [(4, 144, 112), (4, 131, 77)])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_quantized_already(dtype, variant, sizes):
    """With their order and without, in the result's dtype and with a norm of it, and in one that keeps them apart."""
    layer, masked = make(*sizes, **VARIANTS[variant]), make(*sizes, **VARIANTS[variant], decode_capacity=64)
    for tokens in (0, 1, 16, 17):
        x, (index, weights) = torch.randn(tokens, sizes[1]).to(dtype), route(tokens, 4, 2)
        index[:1, 0] = -1
        order, quantized = sort_by_expert(index, 4)._asdict(), quantize_1x128(x)
        norm = Norm(torch.randn(sizes[1]).to(dtype), 1e-6, True)
        for one, extra in ((layer, order), (layer, {}), (masked, order)):
            expected = one(x, index, weights, residual=x, **extra)
            assert torch.equal(one(x, index, weights, residual=x, quantized=quantized, **extra), expected)
            results = one.forward_with_norm(x, index, weights, norm, residual=x, quantized=quantized, **extra)
            assert same_bits(results, one.forward_with_norm(x, index, weights, norm, residual=x, **extra))
        wrong = quantized._replace(scale=quantized.scale * 2)  # they are what is read
        assert not tokens or not torch.equal(layer(x, index, weights, quantized=wrong), layer(x, index, weights))


def test_gradients_of_tokens_that_are_quantized_already():
    layer, (index, weights) = make(), route(5, 4, 2)
    x = torch.randn(5, 144, requires_grad=True)
    for extra in ({}, {"quantized": quantize_1x128(x.detach())}):
        layer(x, index, weights, **extra).sum().backward()
    once = torch.autograd.grad(layer(x, index, weights).sum(), x)[0]
    torch.testing.assert_close(x.grad, 2 * once)


def test_leading_dimensions():
    layer = make()
    x = torch.randn(2, 3, 144)
    index, weights = route(6, 4, 2)
    flat = layer(x.view(6, 144), index, weights)
    assert torch.equal(layer(x, index.view(2, 3, 2), weights.view(2, 3, 2)), flat.view(2, 3, 144))


@pytest.mark.parametrize("dtype", DTYPES)
def test_routing_weights_of_other_dtypes(dtype):
    layer = make()
    x = torch.randn(5, 144)
    index, weights = route(5, 4, 2)
    assert torch.equal(layer(x, index, weights.to(dtype)), layer(x, index, weights.to(dtype).float()))


# The module.


def test_state_dict_is_the_checkpoint():
    def described(layer):
        return {name: (tuple(value.shape), value.dtype) for name, value in layer.state_dict().items()}

    assert described(make(3, 272, 200)) == {
        "gate_up_proj": ((3, 400, 272), torch.float8_e4m3fn),
        "gate_up_proj_scale_inv": ((3, 4, 3), torch.float32),
        "down_proj": ((3, 272, 200), torch.float8_e4m3fn),
        "down_proj_scale_inv": ((3, 3, 2), torch.float32),
    }
    assert described(make(3, 272, 320))["gate_up_proj_scale_inv"] == ((3, 6, 3), torch.float32)
    assert described(make(3, 272, 320, gated=False)) == {
        "up_proj": ((3, 320, 272), torch.float8_e4m3fn),
        "up_proj_scale_inv": ((3, 3, 3), torch.float32),
        "down_proj": ((3, 272, 320), torch.float8_e4m3fn),
        "down_proj_scale_inv": ((3, 3, 3), torch.float32),
    }


@pytest.mark.parametrize("gated", [True, False])
def test_initialization_is_that_of_nn_linear(gated):
    projections, down = float64(GroupedExperts(num_experts=2, hidden_size=272, intermediate_size=200, gated=gated))
    for weight, fan_in in ((projections, 272), (down, 200)):
        bound = fan_in**-0.5
        assert 0.9 * bound < weight.abs().max() < 1.05 * bound
        assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not torch.equal(down[0], down[1])


def test_parameters_are_frozen():
    assert not any(parameter.requires_grad for parameter in make().parameters())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.float16), lambda m: m.half(), lambda m: m.to("cpu", torch.float16)]
)
def test_casts_keep_all_parameters(cast, gated):
    model = nn.Sequential(make(gated=gated), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in model[0].state_dict().items()}
    cast(model)
    assert model[1].weight.dtype == torch.float16
    for name, value in model[0].state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value.float(), before[name].float())


def test_moves_to_another_device():
    layer = make().to("meta", torch.float16)
    assert all(value.is_meta for value in layer.parameters())
    assert layer.gate_up_proj.dtype == torch.float8_e4m3fn
    out = layer(torch.empty(3, 144, device="meta"), *(t.to("meta") for t in route(3, 4, 2)))
    assert out.is_meta and out.shape == (3, 144)


def test_copies_and_files(tmp_path):
    layer = make(swiglu_limit=0.4, decode_capacity=4)
    x, routing = torch.randn(3, 144), route(3, 4, 2)
    expected = layer(x, *routing)
    assert torch.equal(copy.deepcopy(layer)(x, *routing), expected)
    torch.save(layer, tmp_path / "layer.pt")
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(x, *routing), expected)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    save_file(layer.state_dict(), tmp_path / "state.safetensors")
    for state in (torch.load(tmp_path / "state.pt"), load_file(tmp_path / "state.safetensors")):
        other = make(swiglu_limit=0.4, seed=1)
        assert not torch.equal(other(x, *routing), expected)
        other.load_state_dict(state)
        assert torch.equal(other(x, *routing), expected)
        on_meta = make(swiglu_limit=0.4, device="meta")
        on_meta.load_state_dict(state, assign=True)
        assert torch.equal(on_meta(x, *routing), expected)
        assert not on_meta.gate_up_proj.requires_grad


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_loading_weights_that_are_not_fp8_is_refused(name):
    layer = make()
    before = copy.deepcopy(layer).state_dict()
    state = layer.state_dict() | {name: torch.zeros_like(getattr(layer, name), dtype=torch.bfloat16)}
    with pytest.raises(RuntimeError, match=rf"0\.{name}: expected float8_e4m3fn, got torch.bfloat16.*from_experts"):
        nn.Sequential(layer).load_state_dict({f"0.{key}": value for key, value in state.items()})
    assert all(torch.equal(value.float(), before[key].float()) for key, value in layer.state_dict().items())


def test_repr():
    assert repr(make()) == ("GroupedExperts(num_experts=4, hidden_size=144, intermediate_size=96, activation='silu')")
    assert repr(make(swiglu_limit=7.0, swiglu_alpha=1.702, decode_capacity=4)).endswith(
        "activation='silu', swiglu_limit=7.0, swiglu_alpha=1.702, decode_capacity=4)"
    )
    assert repr(make(activation="relu2", gated=False)).endswith("activation='relu2', gated=False)")


# from_experts.


def fused(experts=3, hidden=144, size=96, gated=True, dtype=torch.bfloat16, act_fn=None, **attributes):
    """A module as transformers has them."""
    module = nn.Module()
    name, rows = ("gate_up_proj", 2 * size) if gated else ("up_proj", size)
    setattr(module, name, nn.Parameter(torch.randn(experts, rows, hidden).mul(0.1).to(dtype)))
    module.down_proj = nn.Parameter(torch.randn(experts, hidden, size).mul(0.1).to(dtype))
    module.act_fn = act_fn or nn.SiLU()
    module.has_gate = gated
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


# Of each kind: the module in transformers.models, and what its configuration takes besides sizes.
TRANSFORMERS = {
    "Mixtral": ("mixtral", dict(num_local_experts=4)),
    "Qwen3Moe": ("qwen3_moe", dict(num_experts=4)),
    "DeepseekV3": ("deepseek_v3", dict(n_routed_experts=4)),
    "DeepseekV4": ("deepseek_v4", dict(n_routed_experts=4, swiglu_limit=0.4)),
    "NemotronH": ("nemotron_h", dict(n_routed_experts=4, mlp_hidden_act="relu2")),
    "GptOss": ("gpt_oss", dict(num_local_experts=4)),
    "Aria": ("aria", dict(moe_num_experts=4, num_attention_heads=4)),
}


def transformers_experts(kind, hidden=144, size=96):
    """transformers' own experts in bfloat16, with a call that runs its plain loop."""
    transformers = pytest.importorskip("transformers")
    name, options = TRANSFORMERS[kind]
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    sizes = dict(hidden_size=hidden, moe_intermediate_size=size)
    if kind in ("Mixtral", "GptOss", "Aria"):
        sizes["intermediate_size"] = size
    name = "AriaText" if kind == "Aria" else kind
    config = getattr(transformers, f"{name}Config")(**sizes, **options)
    config._experts_implementation = "eager"
    module = getattr(modeling, f"{kind}Experts")(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    return module.bfloat16().eval()


@pytest.mark.parametrize("size", [96, 128, 200])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3", "DeepseekV4", "NemotronH"])
def test_from_experts_of_transformers(kind, size):
    module = transformers_experts(kind, size=size)
    layer = GroupedExperts.from_experts(module)
    count = module.down_proj.shape[0]
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (count, *module.down_proj.shape[1:])
    assert layer.activation == {
        "DeepseekV4": Activation(limit=0.4),
        "NemotronH": Activation(name="relu2", gated=False),
    }.get(kind, Activation())
    assert not layer.training
    x = torch.randn(16, layer.hidden_size, dtype=torch.bfloat16)
    index, weights = route(16, count, 2)
    with torch.no_grad():
        # A limit takes the large values away, so that those lost to FP8 weigh more.
        tolerance = 0.08 if layer.activation.limit is None else 0.12
        close(layer(x, index, weights), module(x, index, weights.bfloat16()), tolerance)


@pytest.mark.parametrize("size", [96, 128, 200])
@pytest.mark.parametrize("kind", ["GptOss", "Aria"])
def test_from_experts_stored_the_other_way(kind, size):
    """(E, columns, rows); GPT-OSS has rows of gate and up in turns besides, and biases."""
    module = transformers_experts(kind, size=size)
    if not hasattr(module, "is_transposed"):
        pytest.skip(f"the experts of {kind} are of another class in this transformers")
    layer = GroupedExperts.from_experts(module)
    rows = module.gate_up_proj.detach().mT.contiguous()
    if kind == "GptOss":
        rows = torch.cat([rows[:, ::2], rows[:, 1::2]], 1)
        bias = torch.cat([module.gate_up_proj_bias[:, ::2], module.gate_up_proj_bias[:, 1::2]], 1)
        assert torch.equal(layer.gate_up_proj_bias, bias)
        assert layer.down_proj_bias.data_ptr() == module.down_proj_bias.data_ptr()
        assert layer.activation == Activation(limit=7.0, alpha=1.702)
    expected = quantize_128x128(rows.unflatten(1, (2, size)))
    assert torch.equal(layer.gate_up_proj.float(), expected.data.flatten(1, 2).float())
    assert torch.equal(layer.gate_up_proj_scale_inv, expected.scale.flatten(1, 2))
    expected = quantize_128x128(module.down_proj.detach().mT.contiguous())
    assert torch.equal(layer.down_proj.float(), expected.data.float())
    x = torch.randn(16, 144, dtype=torch.bfloat16)
    index, weights = route(16, 4, 2)
    with torch.no_grad():
        close(layer(x, index, weights), module(x, index, weights.bfloat16()), 0.12)
    with pytest.raises(
        ValueError, match="^module: expected .* to train; transposed or interleaved ones would be saved"
    ):
        GroupedExperts.from_experts(module, master_dtype=torch.float32)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_from_experts_scale_format(scale_format):
    module = fused(size=200)
    layer = GroupedExperts.from_experts(module, scale_format=scale_format, decode_capacity=4)
    halves = quantize_128x128(module.gate_up_proj.detach().view(3, 2, 200, 144), scale_format=scale_format)
    assert torch.equal(layer.gate_up_proj.float(), halves.data.float().view(3, 400, 144))
    assert torch.equal(layer.gate_up_proj_scale_inv, halves.scale.view(3, 4, 2))
    down = quantize_128x128(module.down_proj.detach(), scale_format=scale_format)
    assert torch.equal(layer.down_proj.float(), down.data.float())
    assert torch.equal(layer.down_proj_scale_inv, down.scale)
    assert layer.decode_capacity == 4 and layer.training


def test_from_experts_without_data():
    with torch.device("meta"):
        layer = GroupedExperts.from_experts(fused(size=200))
    assert all(value.is_meta for value in layer.state_dict().values())


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("up_proj", "down_proj")])
def test_from_experts_one_by_one(names):
    experts_list = nn.ModuleList(MLP(names, size=200) for _ in range(3))
    layer = GroupedExperts.from_experts(experts_list)
    assert layer.activation == Activation(gated=len(names) == 3)
    x = torch.randn(8, 144, dtype=torch.bfloat16)
    index, weights = route(8, 3, 2)
    expected = sum(
        (torch.where(index == e, weights, 0).sum(-1, keepdim=True) * experts_list[e](x)).double() for e in range(3)
    )
    close(layer(x, index, weights), expected, 0.08)


def test_from_experts_already_quantized_one_by_one():
    float_experts = nn.ModuleList(MLP(size=200) for _ in range(3))
    expected = GroupedExperts.from_experts(float_experts)
    fp8_experts = copy.deepcopy(float_experts)
    for expert in fp8_experts:
        for name in expert.names:
            setattr(expert, name, FP8Linear.from_linear(getattr(expert, name)))
    layer = GroupedExperts.from_experts(fp8_experts)
    for name, value in layer.state_dict().items():
        assert torch.equal(value.float(), expected.state_dict()[name].float())


def fp8_experts_of_transformers(hidden=256, size=128, block_size=(128, 128), **options):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import FP8Experts

    config = transformers.MixtralConfig(hidden_size=hidden, intermediate_size=size, num_local_experts=3)
    for key in ("swiglu_limit", "swiglu_alpha"):
        if key in options:
            setattr(config, key, options.pop(key))
    module = FP8Experts(config, block_size=block_size, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.copy_(torch.randn(parameter.shape).mul(30).to(parameter.dtype))
            elif name.endswith("scale_inv"):
                parameter.copy_(torch.rand(parameter.shape).mul(3).exp2().div(1000).to(parameter.dtype))
    return module


@pytest.mark.parametrize("size", [128, 256, 96, 200])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_from_fp8_experts_of_transformers(scale_fmt, size):
    module = fp8_experts_of_transformers(size=size, scale_fmt=scale_fmt)
    layer = GroupedExperts.from_experts(module)
    assert layer.gate_up_proj.data_ptr() == module.gate_up_proj.data_ptr()  # shared, not copied
    for name, value in layer.state_dict().items():
        assert torch.equal(value.float(), getattr(module, name).float())
    assert layer.gate_up_proj_scale_inv.dtype == torch.float32
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    index, weights = route(4, 3, 2)
    close(layer(x, index, weights), exact(layer, x, index, weights))


@pytest.mark.parametrize("options", [dict(swiglu_limit=7.0), dict(swiglu_limit=7.0, swiglu_alpha=1.702)])
def test_from_fp8_experts_with_a_limit(options):
    module = fp8_experts_of_transformers(**options)
    if options["swiglu_limit"] != module.limit or getattr(module, "swiglu_alpha", None) != options.get("swiglu_alpha"):
        pytest.skip("this version of transformers has no such experts")
    activation = GroupedExperts.from_experts(module).activation
    assert activation == Activation(options["swiglu_limit"], options.get("swiglu_alpha"))


def test_from_fp8_experts_whose_scales_have_another_shape():
    module = fp8_experts_of_transformers(size=320)  # 5 rows of scales for 640 rows: blocks across gate and up
    with pytest.raises(
        ValueError, match=r"module\.gate_up_proj: expected scales of shape \(3, 6, 2\).* got \(3, 5, 2\)"
    ):
        GroupedExperts.from_experts(module)


def clamped_after(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=0.4) * up.clamp(-0.4, 0.4)


BAD_MODULES = {
    "not a module": (lambda: [MLP()], TypeError, r"^module: expected an experts module, got list"),
    "one linear": (lambda: nn.Linear(4, 4), TypeError, r"^module: expected fused experts .* got Linear"),
    "an MLP": (MLP, TypeError, r"^module: expected fused experts .* got MLP"),
    "empty": (nn.ModuleList, ValueError, r"^module: expected at least one expert"),
    "dtype": (lambda: fused(dtype=torch.float64), TypeError, r"^module\.gate_up_proj: .* got torch.float64"),
    "bias": (
        lambda: fused(down_proj_bias=nn.Parameter(torch.zeros(3, 144))),
        ValueError,
        r"^module: expected biases of both projections or of none, got no gate_up_proj_bias",
    ),
    "transposed": (
        lambda: fused(is_transposed=True),
        ValueError,
        r"^module\.gate_up_proj: expected shape \(3, 288, 96\) .* got \(3, 144, 192\)",
    ),
    "interleaved": (
        lambda: fused(dtype=torch.float8_e4m3fn, is_concatenated=False),
        ValueError,
        "^module: transposed or interleaved FP8 weights",
    ),
    "gate of one order, weights of another": (
        lambda: fused(is_concatenated=False, swiglu_limit=0.4, _apply_gate=Activation(limit=0.4)),
        ValueError,
        "^module: its activation is none of those",
    ),
    "norm": (lambda: fused(has_post_expert_norm=True), ValueError, "expected no norm after each expert"),
    "shapes": (
        lambda: fused(down_proj=nn.Parameter(torch.zeros(3, 144, 80))),
        ValueError,
        r"^module\.gate_up_proj: expected shape \(3, 160, 144\) .* got \(3, 192, 144\)",
    ),
    "ranks": (
        lambda: fused(down_proj=nn.Parameter(torch.zeros(144, 96))),
        ValueError,
        r"^module: expected weights \(E,",
    ),
    "activation": (
        lambda: fused(act_fn=nn.Softplus()),
        ValueError,
        r"^module: expected an activation among .*Softplus",
    ),
    "learned": (lambda: fused(gated=False, act_fn=nn.PReLU()), ValueError, r"^module: .* and their biases, got also"),
    "gate": (
        lambda: fused(swiglu_limit=0.4, _apply_gate=clamped_after),
        ValueError,
        r"^module: its activation is none of those .* closest is Activation\(limit=0.4",
    ),
    "block size": (lambda: fp8_experts_of_transformers(block_size=(64, 128)), ValueError, r"128x128, got \(64, 128\)"),
    "no blocks": (lambda: fp8_experts_of_transformers(block_size=None), ValueError, "128x128, got None"),
    "static": (
        lambda: fp8_experts_of_transformers(activation_scheme="static"),
        ValueError,
        r"^module: expected dynamic activation scales, got 'static'",
    ),
    "no scales": (
        lambda: fused(dtype=torch.float8_e4m3fn),
        TypeError,
        r"^module\.gate_up_proj: expected scales weight_scale_inv in float32 or float8_e8m0fnu, got None",
    ),
    "MLP bias": (lambda: nn.ModuleList([MLP(bias=True)]), ValueError, r"^module\[0\]\.gate_proj: expected no bias"),
    "MLP sizes": (lambda: nn.ModuleList([MLP(), MLP(size=80)]), ValueError, r"^module\[1\]: expected .* sizes"),
    "MLP names": (
        lambda: nn.ModuleList([MLP(), MLP(("w1", "w3", "w2"))]),
        TypeError,
        r"^module\[1\]\.gate_proj: expected a linear layer, got NoneType",
    ),
    "MLP order": (
        lambda: nn.ModuleList([MLP(("up_proj", "gate_proj", "down_proj"))]),
        ValueError,
        r"^module\[0\]: its activation is none of those",
    ),
}


@pytest.mark.parametrize("case", BAD_MODULES)
def test_from_experts_refuses(case):
    build, exception, message = BAD_MODULES[case]
    with pytest.raises(exception, match=message):
        GroupedExperts.from_experts(build())


# torch.library, torch.compile, autograd.


def test_compile(fresh_compiler):
    block = Block(make(decode_capacity=4))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (3, 7, 9):
            x = torch.randn(tokens, 144)
            torch.testing.assert_close(compiled(x), block(x), rtol=0.02, atol=0.02)
        x = torch.randn(2, 5, 144)
        torch.testing.assert_close(compiled(x), block(x), rtol=0.02, atol=0.02)


# Bad input.

X, (INDEX, WEIGHTS) = torch.randn(3, 144), route(3, 4, 2)
LAYER = make()


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ((X.int(), INDEX, WEIGHTS), TypeError, r"^hidden_states: expected bfloat16, .* got torch.int32"),
        ((X[:, :128], INDEX, WEIGHTS), ValueError, r"^hidden_states: expected shape \(T, 144\) .* got \(3, 128\)"),
        ((X[0], INDEX, WEIGHTS), ValueError, r"^hidden_states: expected shape \(T, 144\) .* got \(144,\)"),
        ((X, INDEX.short(), WEIGHTS), TypeError, r"^top_k_index: expected int32 or int64, got torch.int16"),
        ((X, INDEX[:2], WEIGHTS), ValueError, r"^top_k_index: expected shape \(3, top_k\), got \(2, 2\)"),
        ((X, INDEX[0], WEIGHTS), ValueError, r"^top_k_index: expected shape \(3, top_k\), got \(2,\)"),
        ((X, INDEX, WEIGHTS.double()), TypeError, r"^top_k_weights: expected .* got torch.float64"),
        ((X, INDEX, WEIGHTS[:, :1]), ValueError, r"^top_k_weights: expected shape \(3, 2\) .* got \(3, 1\)"),
        ((X[None], INDEX, WEIGHTS), ValueError, r"^top_k_index: expected shape \(1, 3, top_k\) .* got \(3, 2\)"),
    ],
)
def test_bad_input(arguments, exception, message):
    with pytest.raises(exception, match=message):
        LAYER(*arguments)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "exception", "message"),
    [
        (dict(gate_up_proj=torch.zeros(4, 192, 144)), TypeError, r"^gate_up_proj: expected float8_e4m3fn"),
        (dict(gate_up_proj=zeros(4, 191, 144)), ValueError, r"^gate_up_proj: expected shape \(E, 2I, H\), gate rows"),
        (dict(gate_up_proj=zeros(4, 144)), ValueError, r"^gate_up_proj: expected shape \(E, 2I, H\), got \(4, 144\)"),
        (dict(down_proj=zeros(4, 144, 80)), ValueError, r"^down_proj: expected shape \(4, 144, 96\) .* \(4, 144, 80\)"),
        (dict(down_proj=zeros(3, 144, 96)), ValueError, r"^down_proj: expected shape \(4, 144, 96\)"),
        (dict(gate_up_proj_scale_inv=torch.ones(4, 1, 2)), ValueError, r"^gate_up_proj_scale_inv: .* \(4, 2, 2\)"),
        (dict(down_proj_scale_inv=torch.ones(4, 2, 1).half()), TypeError, r"^down_proj_scale_inv: expected float32"),
    ],
)
def test_bad_parameters(changes, exception, message):
    parameters = dict(LAYER.named_parameters()) | changes
    up, up_scale, down, down_scale = (parameters[name] for name in LAYER.weight_names)
    layer = Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), Activation())
    with pytest.raises(exception, match=message):
        experts_of_tokens(TokenOperands(X, INDEX, WEIGHTS, layer))


@pytest.mark.parametrize("wrong", ["groups", "rows"])
def test_bad_order(wrong):
    order = sort_by_expert(INDEX, 4)._asdict()
    other = {"groups": "rows", "rows": "groups"}[wrong]

    def fails(error, message, **changes):
        with pytest.raises(error, match=message):
            experts_of_tokens(TokenOperands(X, INDEX, WEIGHTS, layer_of(LAYER), **order | changes))

    shape = {"groups": r"\(5,\)", "rows": r"\(3, 2\)"}[wrong]
    fails(ValueError, f"^{wrong}: expected shape {shape}, got", **{wrong: order[wrong][:-1]})
    fails(TypeError, f"^{wrong}: expected int32, got torch.int64", **{wrong: order[wrong].long()})
    fails(ValueError, f"^{wrong}: expected a tensor beside {other}, got None", **{wrong: None})
    fails(ValueError, "^capacity: expected None with groups and rows, got 4", capacity=4)


def test_bad_capacity():
    with pytest.raises(ValueError, match=r"^capacity: expected at least one row an expert, got 0"):
        experts_of_tokens(TokenOperands(X, INDEX, WEIGHTS, layer_of(LAYER), capacity=0))


def test_bad_construction():
    for options, exception, message in (
        (dict(dtype=torch.float64), TypeError, r"^dtype: .* got torch.float64"),
        (dict(num_experts=0), ValueError, r"^num_experts: expected at least 1, got 0"),
        (dict(num_experts=1025, device="meta"), ValueError, r"^num_experts: expected at most 1024, got 1025"),
        (dict(intermediate_size=0), ValueError, r"^intermediate_size: expected at least 1, got 0"),
        (dict(decode_capacity=0), ValueError, r"^decode_capacity: expected at least 1, got 0"),
        (dict(activation="swiglu"), ValueError, r"^activation: expected one of"),
        (dict(swiglu_alpha=1.702), ValueError, r"^swiglu_alpha: "),
    ):
        with pytest.raises(exception, match=message):
            make(**options)
