"""GroupedExperts with weights in four bits: the values of their state dict, which is as checkpoints store them."""

import copy
import io

import pytest
import torch

from fp8moe import GroupedExperts, PackedTensor, dequantize, experts, quantize_int4, quantize_mxfp4
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.quant.arranged import ARRANGED
from fp8moe.quant.packed import quantize_nvfp4
from tests.errors import refused
from tests.experts_cases import packed
from tests.small_checkpoints import bits

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"num_experts": 4, "hidden_size": 256, "intermediate_size": 384}


def make(form, **options):
    torch.manual_seed(0)
    return GroupedExperts(**SIZES | options, weight_format=form).eval()


def inputs(tokens=5, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, SIZES["hidden_size"], generator=generator).to(dtype)
    return x, torch.randint(0, 4, (tokens, 2), generator=generator), torch.rand(tokens, 2, generator=generator)


def quantize(values, form):
    """Quantize weights (E, P, N, K) as a state dict has them: the rows of P projections stacked."""
    form, group = PACKED_WEIGHTS[form]
    if form == "int4":
        made = quantize_int4(values, group=group)
    else:
        made = (quantize_mxfp4 if form == "mxfp4" else quantize_nvfp4)(values)
    tensor_scale = made.tensor_scale
    if tensor_scale is not None and tensor_scale.shape[1] == 1:
        tensor_scale = tensor_scale[:, 0]
    return PackedTensor(made.data.flatten(1, 2), made.scale.flatten(1, 2), form, tensor_scale)


def same(value, other):
    return value.dtype == other.dtype and torch.equal(bits(value), bits(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", PACKED_WEIGHTS)
def test_it_computes_with_the_values_of_its_state_dict(form, dtype):
    layer, (x, index, weights) = make(form), inputs(dtype=dtype)
    state, group = layer.state_dict(), PACKED_WEIGHTS[form][1]
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "gate_up_proj": (4, 768, 128),
        "gate_up_proj_scale": (4, 768, 256 // group),
        "down_proj": (4, 256, 192),
        "down_proj_scale": (4, 256, 384 // group),
    } | ({"gate_up_proj_tensor_scale": (4, 2), "down_proj_tensor_scale": (4,)} if form == "nvfp4" else {})
    up, down = packed(state, "gate_up_proj", form), packed(state, "down_proj", form)
    assert torch.equal(layer(x, index, weights), experts(x, index, weights, up, down))
    rows, bounds = x[:4], torch.tensor([0, 1, 1, 4, 4], dtype=torch.int32)
    out = layer.forward_rows(rows, bounds)
    assert out.dtype is dtype and out.isfinite().all()


@pytest.mark.parametrize("form", PACKED_WEIGHTS)
def test_copies(form):
    layer, operands = make(form), inputs()
    expected, state = layer(*operands), layer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = make(form, intermediate_size=384)
    torch.nn.init.zeros_(loaded.down_proj)
    loaded.load_state_dict(torch.load(file))
    for other in (loaded, copy.deepcopy(layer), copy.deepcopy(layer).half(), copy.deepcopy(layer).to(torch.float64)):
        assert torch.equal(other(*operands), expected)
        assert all(same(value, state[name]) for name, value in other.state_dict().items())
        assert other.state_dict().keys() == state.keys()
    zeros, kept = {name: torch.zeros_like(value) for name, value in state.items()}, layer.state_dict(keep_vars=True)
    assert all(value is layer.get_parameter(name) for name, value in kept.items())
    loaded.load_state_dict(zeros)
    loaded.load_state_dict(kept)
    assert torch.equal(loaded(*operands), expected)
    for end in ("_proj", "_scale"):  # either alone
        loaded.load_state_dict(zeros)
        loaded.load_state_dict({name: value for name, value in state.items() if not name.endswith(end)}, strict=False)
        loaded.load_state_dict({name: value for name, value in state.items() if name.endswith(end)}, strict=False)
    assert torch.equal(loaded(*operands), expected)
    assert f"weight_format={form!r}" in repr(layer) and not any(p.requires_grad for p in layer.parameters())


def test_scales_keep_their_dtype():
    layer, operands = make("int4"), inputs()
    state = layer.state_dict()
    state = {name: value.float() * 1.001 if name.endswith("_scale") else value for name, value in state.items()}
    layer.load_state_dict(state)
    assert layer.down_proj_scale.dtype is torch.float32
    up, down = packed(state, "gate_up_proj", "int4"), packed(state, "down_proj", "int4")
    assert torch.equal(layer(*operands), experts(*operands, up, down))


def test_without_a_gate_and_with_biases():
    for options in ({"gated": False, "activation": "relu2"}, {"bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.7}):
        for form in PACKED_WEIGHTS:
            layer = make(form, **options)
            assert layer(*inputs()).isfinite().all()
            other = make(form, **options)
            other.load_state_dict(layer.state_dict())
            assert torch.equal(other(*inputs()), layer(*inputs()))
            if form == "nvfp4":
                scale = layer.state_dict()[f"{layer.up_name}_tensor_scale"]
                assert scale.shape == ((4, 2) if layer.activation.gated else (4,))


@pytest.mark.parametrize("form", PACKED_WEIGHTS)
def test_compiled(form, fresh_compiler):
    layer, operands = make(form), inputs()
    assert torch.equal(torch.compile(layer, fullgraph=True)(*operands), layer(*operands))


def test_refusals():
    refused(ValueError, r"^weight_format: expected one of .*, got 'nf4'", make, "nf4")
    refused(
        ValueError, "^master_dtype: expected None with weight_format 'int4'", make, "int4", master_dtype=torch.float32
    )
    refused(ValueError, "^weight_scales: expected 'block' with", make, "mxfp4", weight_scales="channel")
    refused(ValueError, "^hidden_size: expected a multiple of 128 with", make, "int4", hidden_size=160)
    refused(ValueError, "^intermediate_size: expected a multiple of 32 with", make, "mxfp4", intermediate_size=40)
    layer = make("mxfp4")
    wrong = {**layer.state_dict(), "down_proj": torch.zeros(4, 256, 384)}
    refused(RuntimeError, "down_proj: expected uint8, got torch.float32", layer.load_state_dict, wrong)
    scale = {**layer.state_dict(), "down_proj_scale": torch.zeros(4, 256, 12)}
    refused(RuntimeError, "down_proj_scale: expected scales in uint8, float8_e8m0fnu", layer.load_state_dict, scale)
    refused(
        ValueError,
        "^module: expected experts in FP8 or unquantized, got weight_format 'mxfp4': experts in four bits are not",
        GroupedExperts.from_experts,
        layer,
    )


E4M3 = torch.float8_e4m3fn
UP, DOWN = "gate_up_proj_tensor_scale", "down_proj_tensor_scale"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (UP, None, rf"{UP}: expected float32 \(4, 2\) beside gate_up_proj_scale, got none"),
        (DOWN, None, rf"{DOWN}: expected float32 \(4,\) beside down_proj_scale, got none"),
        (DOWN, torch.ones(4, 2), rf"{DOWN}: .* \(4,\) beside .*shape \(4, 2\)"),
        (UP, torch.ones(4), rf"{UP}: .* \(4, 2\) beside .*shape \(4,\)"),
        (UP, torch.ones(4, 2).half(), f"{UP}: expected float32 .*torch.float16"),
        (
            "down_proj_scale",
            torch.full((4, 256, 24), -1.0).to(E4M3),
            "down_proj_scale: .* scales that are not negative",
        ),
        ("down_proj_scale", torch.ones(4, 256, 12).to(E4M3), "size mismatch for down_proj_scale"),
        ("down_proj_scale", torch.ones(4, 256, 24).byte(), "down_proj_scale: .* float8_e4m3fn, got"),
        ("gate_up_proj_scale", None, 'Missing key.*"gate_up_proj_scale"'),
    ],
)
def test_scales_of_nvfp4_that_are_refused(name, value, message):
    layer = make("nvfp4")
    before = layer.state_dict()
    state = {key: item for key, item in before.items() if key != name} | ({} if value is None else {name: value})
    refused(RuntimeError, message, layer.load_state_dict, state)
    assert same(layer.state_dict()[name], before[name])


def test_all_scales_of_nvfp4_are_kept():
    """Those that are 0, subnormal or NaN, and tensor scales that differ widely."""
    layer, generator = make("nvfp4"), torch.Generator().manual_seed(2)
    state = layer.state_dict()
    for name, value in state.items():
        if value.dtype is E4M3:
            codes = torch.randint(0, 128, value.shape, generator=generator, dtype=torch.uint8)
            state[name] = codes.view(E4M3)
        elif value.dtype is torch.float32:
            state[name] = torch.rand(value.shape, generator=generator).mul(20).sub(10).exp2()
    layer.load_state_dict(state)
    assert all(same(value, state[name]) for name, value in layer.state_dict().items())
    state["down_proj_scale"].view(torch.uint8)[0, 0, :2] = torch.tensor([0x80, 0xFF])  # -0 and NaN lose their signs
    layer.load_state_dict(state)
    assert layer.state_dict()["down_proj_scale"].view(torch.uint8)[0, 0, :2].tolist() == [0, 0x7F]


@pytest.mark.parametrize("size", [384, 96])
@pytest.mark.parametrize("form", ["mxfp4", "int4-32", "nvfp4"])
def test_backward_to_the_input(form, size):
    """The backward through MXFP4 and NVFP4 has the bits of that through FP8 blocks of equal values."""
    layer, (x, index, weights) = make(form, intermediate_size=size), inputs(20)
    blocks = GroupedExperts(**SIZES | {"intermediate_size": size}).eval()
    here = layer.local_weights().layer.in_blocks()
    for name, value in zip(blocks.weight_names, (*here.up, *here.down), strict=True):
        getattr(blocks, name).data.copy_(value)
    grad, results = torch.randn(20, 256).bfloat16(), []
    for module in (layer, blocks):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = module(leaves[0], index, leaves[1])
        out.backward(grad)
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for got, expected in zip(*results, strict=True):
        if form in ARRANGED:
            assert torch.equal(got, expected)
        else:
            assert float((got - expected).norm() / expected.norm()) < 6e-2  # both weights are rounded to E4M3


@pytest.mark.parametrize("form", PACKED_WEIGHTS)
def test_from_experts(form):
    """Unquantized weights, masters and FP8 weights are rounded to nearest."""
    trained = GroupedExperts(**SIZES, master_dtype=torch.float32, bias=False)
    frozen = GroupedExperts.from_experts(trained)
    for source in (trained, frozen):
        layer = GroupedExperts.from_experts(source, weight_format=form)
        state, training = layer.state_dict(), layer.training
        assert layer.weight_format == form and training == source.training
        for name, count in (("gate_up_proj", 2), ("down_proj", 1)):
            values = getattr(source, name).unflatten(1, (count, -1))
            if source is frozen:
                scale = getattr(source, f"{name}_scale_inv").unflatten(1, (count, -1))
                values = dequantize((values, scale))
            made = quantize(values, form)
            assert same(state[name], made.data) and same(state[f"{name}_scale"], made.scale)
            if made.tensor_scale is not None:
                assert same(state[f"{name}_tensor_scale"], made.tensor_scale)
        assert layer.eval()(*inputs()).isfinite().all()
    meta = GroupedExperts.from_experts(copy.deepcopy(trained).to("meta"), weight_format=form)
    assert meta.down_proj.is_meta and meta.down_proj.shape == layer.down_proj.shape
    refused(
        ValueError,
        rf"^scale_format: expected 'float32' with weight_format {form!r}, got 'ue8m0'",
        GroupedExperts.from_experts,
        trained,
        weight_format=form,
        scale_format="ue8m0",
    )
    refused(
        ValueError,
        "^master_dtype: expected None",
        GroupedExperts.from_experts,
        trained,
        weight_format=form,
        master_dtype=torch.float32,
    )
