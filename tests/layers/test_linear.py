"""FP8Linear and replace_linears on the reference backend."""

import copy
import ctypes
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.api import gemm
from fp8moe.kernels.linear import forward
from fp8moe.kernels.linear.forward import apply as linear
from fp8moe.layers.linear import FP8Linear, replace_linears
from fp8moe.quant.quantize import quantize_1x128, quantize_128x128
from fp8moe.runtime import launch as runtime_launch
from tests.errors import refused
from tests.linear_reference import close, exact

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(576, 200), (576, 1536), (1536, 576), (131, 261), (16, 8), (1, 1)])
def test_forward(features, dtype, device):
    layer = FP8Linear(*features, device=device, dtype=dtype)
    for lead in ((), (1,), (5,), (2, 3), (2, 1, 3), (200,), (0,), (2, 0)):
        x = torch.randn(*lead, features[0], dtype=dtype, device=device)
        out = layer(x)
        assert out.is_contiguous()
        close(out, exact(layer, x))


@settings(max_examples=40, deadline=None)
@given(
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 300),
    rows=st.integers(0, 5),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_number_of_features(in_features, out_features, rows, bias, dtype):
    layer = FP8Linear(in_features, out_features, bias, dtype=dtype)
    assert layer.weight.shape == (out_features, in_features)
    assert layer.weight_scale_inv.shape == (-(-out_features // 128), -(-in_features // 128))
    x = torch.randn(rows, in_features, dtype=dtype)
    close(layer(x), exact(layer, x))


def test_float16_output_is_rounded_once():
    layer = FP8Linear(256, 64, dtype=torch.float32)
    x = torch.randn(32, 256).half()
    assert torch.equal(layer(x), layer(x.float()).half())


# The CUDA path, with kernels that are stood in for by PyTorch on the memory that they are given.


def memory_at(address, shape, strides, dtype):
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.frombuffer((ctypes.c_uint8 * (count * size)).from_address(address), dtype=torch.uint8)
    return data.view(dtype).as_strided(shape, strides)


class FakeQuantizer:
    def __init__(self, device_index, name, rows, vector):
        assert name == "quantize_1x128" and rows.stride(1) == 1
        self.layout, self.aligned = (rows.shape, rows.stride(), rows.dtype), rows.data_ptr() % 16 == 0

    def launch(self, stream, x, data, scale):
        assert self.aligned == (x % 16 == 0) and data % 16 == 0 and scale % 16 == 0
        quantized = quantize_1x128(memory_at(x, *self.layout))
        for target, value in ((data, quantized.data), (scale, quantized.scale)):
            memory_at(target, value.shape, value.stride(), value.dtype).copy_(value)


class FakeGemm:
    @staticmethod
    def look_up(*operands, **options):
        return None

    def __init__(self, device_index, operands, out_dtype, pdl):
        assert pdl and all(t.data_ptr() % 16 == 0 for t in operands[:3])
        self.out_dtype = out_dtype
        self.layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in operands]

    def launch(self, stream, mapped, pointers):
        (*operands, result), (weight_scale, bias, out, pitch) = mapped, pointers
        assert result == out
        a, a_scale, b, b_scale = (
            memory_at(*pair)
            for pair in zip((*operands, weight_scale), *zip(*self.layouts[:4], strict=True), strict=True)
        )
        bias = memory_at(bias, *self.layouts[4]) if bias else None
        expected = gemm((a, a_scale), (b, b_scale), bias=bias, out_dtype=self.out_dtype)
        memory_at(out, expected.shape, (pitch, 1), self.out_dtype).copy_(expected)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(forward, "use_cuda", lambda *tensors: True)
    monkeypatch.setattr(runtime_launch, "_plans", {})
    monkeypatch.setattr(forward, "quantizer", FakeQuantizer)
    monkeypatch.setattr(launch, "dense", FakeGemm)
    monkeypatch.setattr(runtime_launch, "device_guard", lambda index: nullcontext())
    monkeypatch.setattr(forward, "device_guard", lambda index: nullcontext())
    monkeypatch.setattr(forward, "current_stream", lambda index: 0)


def inputs(dtype, k):
    yield torch.randn(5, k).to(dtype)
    yield torch.randn(k).to(dtype)
    yield torch.randn(2, 3, k).to(dtype)
    yield torch.randn(2, 3, 3 * k).to(dtype)[..., k : 2 * k]
    yield torch.randn(4, 3, k).to(dtype)[:, -1:]
    yield torch.randn(2, 4, k).to(dtype)[:, ::3]
    yield torch.randn(5, k + 1).to(dtype)[:, 1:]
    yield torch.randn(3, k, 2).to(dtype).transpose(1, 2)
    yield torch.randn(1, k).to(dtype).expand(4, k)
    yield torch.randn(2, 0, k).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(272, 136), (131, 21)])
def test_what_the_kernels_are_given(stand_ins, features, dtype, bias):
    layer = FP8Linear(*features, bias, dtype=dtype)
    for x in inputs(dtype, features[0]):
        for _ in range(2):
            out = layer(x)
            assert out.is_contiguous()
            close(out, exact(layer, x))


@torch.no_grad()
def test_a_second_call_checks_and_copies_nothing(stand_ins, monkeypatch):
    layer = FP8Linear(272, 136, dtype=torch.float32)
    shaped = list(inputs(torch.float32, 272))[:6]
    first = [layer(x) for x in shaped[:5]]
    for module, name in ((forward, "check"), (forward, "row_major"), (forward, "bias_vector")):
        monkeypatch.setattr(module, name, lambda *arguments: pytest.fail("checked again"))
    for x, expected in zip(shaped, first, strict=False):
        assert torch.equal(layer(x), expected)
    refused(pytest.fail.Exception, "checked again", layer, shaped[5])


def test_weights_that_are_not_aligned_are_copied(stand_ins):
    layer = FP8Linear(272, 136)
    x = torch.randn(5, 272)
    expected = layer(x)
    memory = torch.zeros(272 * 136 + 8, dtype=torch.uint8)[8:].view(layer.weight.dtype).view(136, 272)
    layer.weight.data = memory.copy_(layer.weight)
    assert layer.weight.data_ptr() % 16
    assert torch.equal(layer(x), expected)


# The module.


def test_state_dict_is_the_checkpoint():
    state = FP8Linear(131, 261, dtype=torch.float16).state_dict()
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == {
        "weight": ((261, 131), torch.float8_e4m3fn),
        "weight_scale_inv": ((3, 2), torch.float32),
        "bias": ((261,), torch.float16),
    }
    assert list(FP8Linear(16, 8, bias=False).state_dict()) == ["weight", "weight_scale_inv"]


def test_initialization_is_that_of_nn_linear():
    torch.manual_seed(3)
    reference = nn.Linear(272, 136)
    torch.manual_seed(3)
    layer = FP8Linear(272, 136, dtype=torch.float32)
    quantized = quantize_128x128(reference.weight.detach())
    assert torch.equal(layer.weight.float(), quantized.data.float())
    assert torch.equal(layer.weight_scale_inv, quantized.scale)
    assert torch.equal(layer.bias, reference.bias)
    assert not layer.weight.requires_grad and not layer.weight_scale_inv.requires_grad


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear(scale_format, bias):
    source = nn.Linear(272, 136, bias=bias, dtype=torch.bfloat16).eval()
    layer = FP8Linear.from_linear(source, scale_format=scale_format)
    assert (layer.in_features, layer.out_features, layer.training) == (272, 136, False)
    assert layer.bias is source.bias
    mantissas = layer.weight_scale_inv.frexp().mantissa
    assert (mantissas == 0.5).all() == (scale_format == "ue8m0")
    x = torch.randn(64, 272, dtype=torch.bfloat16)
    expected = source(x)
    assert (layer(x) - expected).norm() < 0.06 * expected.norm()


def test_from_linear_without_data():
    layer = FP8Linear.from_linear(nn.Linear(144, 24, device="meta"))
    assert all(value.is_meta for value in layer.state_dict().values())
    assert layer(torch.empty(3, 144, device="meta")).shape == (3, 24)


def test_load_into_meta_module():
    source = FP8Linear(144, 24)
    for layer in (FP8Linear(144, 24, device="meta"), FP8Linear(144, 24, device="meta").to_empty(device="cpu")):
        layer.load_state_dict(source.state_dict(), assign=layer.weight.is_meta)
        assert not layer.weight.requires_grad
        x = torch.randn(3, 144)
        assert torch.equal(layer(x), source(x))


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.float16),
        lambda m: m.half(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.type(torch.float16),
    ],
)
def test_casts_keep_weight_and_scale(cast):
    model = nn.Sequential(FP8Linear(144, 24, dtype=torch.float32))
    before = copy.deepcopy(model[0])
    cast(model)
    assert torch.equal(model[0].weight.float(), before.weight.float()) and model[0].weight.dtype == torch.float8_e4m3fn
    assert torch.equal(model[0].weight_scale_inv, before.weight_scale_inv)
    assert model[0].weight_scale_inv.dtype == torch.float32
    assert model[0].bias.dtype == torch.float16
    assert [type(value) for value in model.parameters()] == [nn.Parameter] * 3


def test_moves_to_another_device():
    layer = FP8Linear(144, 24).to("meta", torch.float32)
    assert all(value.is_meta for value in layer.parameters())
    assert layer.weight.dtype == torch.float8_e4m3fn


def test_copies_and_files(tmp_path):
    layer = FP8Linear(131, 261)
    x = torch.randn(3, 131)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    torch.save(layer, tmp_path / "layer.pt")
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(x), expected)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    save_file(layer.state_dict(), tmp_path / "state.safetensors")
    for state in (torch.load(tmp_path / "state.pt"), load_file(tmp_path / "state.safetensors")):
        other = FP8Linear(131, 261)
        assert not torch.equal(other(x), expected)
        other.load_state_dict(state)
        assert torch.equal(other(x), expected)


def test_loading_a_weight_that_is_not_fp8_is_refused():
    layer = FP8Linear(144, 24, dtype=torch.float32)
    before = layer.weight.float()
    with pytest.raises(RuntimeError, match=r"0\.weight: expected float8_e4m3fn, got torch.float32.*from_linear"):
        nn.Sequential(layer).load_state_dict(nn.Sequential(nn.Linear(144, 24)).state_dict(), strict=False)
    assert torch.equal(layer.weight.float(), before)


def test_repr():
    assert repr(FP8Linear(144, 24, bias=False)) == "FP8Linear(in_features=144, out_features=24, bias=False)"


# torch.library, torch.compile, autograd.


def check_compile(backend, device):
    model = nn.Sequential(FP8Linear(131, 48), nn.SiLU(), FP8Linear(48, 20, bias=False)).to(device)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for shape in ((2, 3, 131), (4, 5, 131)):
        x = torch.randn(shape, device=device)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.02)  # SiLU may round otherwise


def test_compile(fresh_compiler):
    check_compile("aot_eager", "cpu")


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_fp8_weights_have_no_gradient(backend, fresh_compiler):
    layer = FP8Linear(144, 24).requires_grad_()
    x = torch.randn(3, 144)
    call = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    out = call(x)
    assert out.requires_grad
    with torch.no_grad():
        assert torch.equal(out, layer(x))
    with pytest.raises(RuntimeError, match=r"FP8 weight that requires a gradient, not a master_dtype, has no backward"):
        out.sum().backward()


@pytest.mark.parametrize("how", [{}, {"master_dtype": torch.float32}, {"weight_scales": "channel"}], ids=str)
def test_results_may_be_changed_in_place(how):
    """As those of nn.Linear: autograd refuses that for a result that is a view."""
    layer = FP8Linear(144, 24, dtype=torch.float32, **how)
    x = torch.randn(2, 3, 144, requires_grad=True)
    out = layer(x)
    expected = out.detach().relu()
    assert out.requires_grad and torch.equal(out.relu_(), expected)


def test_no_grad_records_nothing():
    layer = FP8Linear(144, 24)
    with torch.no_grad():
        assert layer(torch.randn(3, 144, requires_grad=True)).grad_fn is None
    with torch.inference_mode():
        assert layer(torch.randn(3, 144)).shape == (3, 24)
    frozen = layer.requires_grad_(False)
    assert not frozen(torch.randn(3, 144)).requires_grad


# Bad input.

LAYER = FP8Linear(144, 24)
W, S, BIAS = LAYER.weight, LAYER.weight_scale_inv, LAYER.bias.detach()
X = torch.randn(3, 144)


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ((X.int(), W, S, None), TypeError, r"^x: expected bfloat16, float16 or float32, got torch.int32"),
        ((X.double(), W, S, None), TypeError, r"^x: .* got torch.float64"),
        ((X[:, :128], W, S, None), ValueError, r"^x: expected shape \(\.\.\., 144\) .* got \(3, 128\)"),
        ((X[0, 0], W, S, None), ValueError, r"^x: expected shape \(\.\.\., 144\) .* got \(\)"),
        ((X, W.float(), S, None), TypeError, r"^weight: expected float8_e4m3fn, got torch.float32"),
        ((X, W[0], S, None), ValueError, r"^weight: expected shape \(N, K\), got \(144,\)"),
        ((X, W, S.bfloat16(), None), TypeError, r"^weight_scale_inv: expected float32, got torch.bfloat16"),
        ((X, W, S[:, :1], None), ValueError, r"^weight_scale_inv: expected shape \(1, 2\).* got \(1, 1\)"),
        ((X, W, S, BIAS.int()), TypeError, r"^bias: expected bfloat16, float16 or float32, got torch.int32"),
        ((X, W, S, BIAS[:8]), ValueError, r"^bias: expected shape \(24,\), got \(8,\)"),
    ],
)
def test_bad_input(arguments, exception, message):
    refused(exception, message, linear, *arguments)


def test_bad_construction():
    refused(TypeError, r"^dtype: .* got torch.float64", FP8Linear, 16, 8, dtype=torch.float64)
    refused(TypeError, r"^master_dtype: .* got torch.float16", FP8Linear, 16, 8, master_dtype=torch.float16)
    refused(
        TypeError,
        r"^linear: expected an nn.Linear, got torch.nn.modules.conv.Conv1d",
        FP8Linear.from_linear,
        nn.Conv1d(1, 1, 1),
    )
    with pytest.raises(TypeError, match=r"^linear\.weight: .* got torch.float64"):
        FP8Linear.from_linear(nn.Linear(16, 8, dtype=torch.float64))
    refused(ValueError, "scale_format", FP8Linear.from_linear, nn.Linear(16, 8), scale_format="e8m0")
    with pytest.raises(ValueError, match="^scale_format: expected 'float32' with a master_dtype, got 'ue8m0'"):
        FP8Linear.from_linear(nn.Linear(16, 8), scale_format="ue8m0", master_dtype=torch.float32)
    refused(TypeError, r"^linear\.weight: .* got torch.float8_e4m3fn", FP8Linear.from_linear, FP8Linear(16, 8))


# replace_linears.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(48, 32)
        self.down_proj = nn.Linear(32, 48, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 48)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(48, 40, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


BLOCK_NAMES = [f"blocks.{i}.{name}" for i in range(2) for name in ("up_proj", "down_proj")]


def test_replace():
    model = Model().eval()
    tokens = torch.arange(40)[None]
    expected = model(tokens)
    up_proj_bias = model.blocks[0].up_proj.bias
    assert replace_linears(model) == BLOCK_NAMES
    assert [name for name, module in model.named_modules() if type(module) is FP8Linear] == BLOCK_NAMES
    assert type(model.lm_head) is nn.Linear
    assert model.blocks[0].up_proj.bias is up_proj_bias and not model.blocks[0].up_proj.training
    out = model(tokens)
    assert 0 < (out - expected).norm() < 0.1 * expected.norm()
    assert replace_linears(model) == []


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), []),
        (("lm_head",), ["lm_head"]),
        (["up_proj"], ["blocks.0.up_proj", "blocks.1.up_proj"]),
        (("blocks.1.up_proj", "lm_*"), ["blocks.1.up_proj", "lm_head"]),
        (("blocks.0.*",), ["blocks.0.up_proj", "blocks.0.down_proj"]),
        (("blocks",), []),
    ],
)
def test_skip(skip, left):
    model = Model()
    everything = [*BLOCK_NAMES, "lm_head"]
    assert replace_linears(model, skip=skip) == [name for name in everything if name not in left]
    assert [name for name, module in model.named_modules() if type(module) is nn.Linear] == left


def test_tied_weights_stay_tied():
    model = Model()
    model.lm_head.weight = model.embed.weight
    assert replace_linears(model, skip=()) == BLOCK_NAMES
    assert model.lm_head.weight is model.embed.weight


def test_shared_modules_stay_shared():
    shared = nn.Linear(48, 48)
    block = Block()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": block, "d": block})
    names = ["a", "b.0", "c.up_proj", "d.up_proj", "c.down_proj", "d.down_proj"]
    assert replace_linears(model) == names
    assert type(model["a"]) is FP8Linear and model["a"] is model["b"][0]
    assert type(block.up_proj) is FP8Linear

    other = nn.Linear(48, 48)
    model = nn.ModuleDict({"a": other, "lm_head": other})
    assert replace_linears(model) == []
    assert model["a"] is other


def test_subclasses_stay():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    assert replace_linears(nn.Sequential(Scaled(16, 16), parametrized)) == []


def test_replace_errors_leave_the_model_alone():
    refused(TypeError, r"^model: .* FP8Linear\.from_linear", replace_linears, nn.Linear(16, 8))
    model = Model()
    refused(TypeError, r"^skip: .* 'lm_head'", replace_linears, model, skip="lm_head")
    refused(TypeError, r"^master_dtype: .* got torch.float64", replace_linears, model, master_dtype=torch.float64)
    model.blocks[1].down_proj.double()
    refused(TypeError, r"^blocks\.1\.down_proj\.weight: .* got torch.float64", replace_linears, model)
    assert not any(isinstance(module, FP8Linear) for module in model.modules())


def test_replace_without_data():
    with torch.device("meta"):
        model = Model()
    assert replace_linears(model) == BLOCK_NAMES
    assert all(parameter.is_meta for parameter in model.parameters())


def test_linears_that_a_fast_path_reads_stay():
    model = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).bfloat16().eval()
    x = torch.randn(2, 7, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        assert replace_linears(model) == []
        assert torch.equal(model(x), expected)


class CastsToTheWeight(torch.nn.Module):
    """T5's feed-forward, in short."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.wo(self.wi(x).to(self.wo.weight.dtype))


class CastsInAMethod(CastsToTheWeight):
    def forward(self, x):
        return self._project(x)

    def _project(self, x):
        return self.wo(self.wi(x).to(self._dtype()))

    def _dtype(self):
        return self.wo.weight.dtype


@pytest.mark.parametrize("kind", [CastsToTheWeight, CastsInAMethod])
def test_replace_linears_refuses_what_casts_to_the_dtype_of_a_weight(kind):
    model = torch.nn.Sequential(kind())
    message = rf"^0.wo: {kind.__name__} casts the input to the dtype of its weight, .* with skip=\(\.\.\., 'wo'\)"
    refused(ValueError, message, replace_linears, model)
    assert type(model[0].wi) is torch.nn.Linear
    assert replace_linears(model, skip=("wo",)) == ["0.wi"]
    assert model(torch.randn(3, 64)).shape == (3, 64)
    trained = torch.nn.Sequential(kind())
    assert len(replace_linears(trained, master_dtype=torch.float32)) == 2  # its weight is a float
    assert trained(torch.randn(3, 64)).shape == (3, 64)


class CastsFromOutside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(64, 64))])

    def forward(self, x):
        return self.blocks[0](x.to(self.blocks[0][0].weight.dtype))


def test_casts_by_a_module_further_up():
    message = "^blocks.0.0: CastsFromOutside casts the input to the dtype of its weight"
    refused(ValueError, message, replace_linears, CastsFromOutside())


def test_a_pattern_that_matches_nothing_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(ValueError, match="skip: 'nosuch' matches no module of Sequential"):
        replace_linears(model, skip=("lm_head", "nosuch"))  # a part of a name is no match either
    assert replace_linears(model, skip=("lm_head",)) == ["0"]
