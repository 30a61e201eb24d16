"""integrations/kernels: built into a local directory, loaded by `kernels`, and put into modules by kernelize()."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8moe import FP8Linear, FP8Tensor, GroupedExperts, dequantize, linear, quantize_128x128
from fp8moe.hf import load_model
from tests.docs_pages import FP8_MODEL, MODEL, models
from tests.errors import relative_error
from tests.transformers_models import BASE, TOKENS, modules_named, random_model

pytest.importorskip("kernels")
transformers = pytest.importorskip("transformers")
from kernels import (  # noqa: E402
    KernelizeFallback,
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from transformers.integrations.finegrained_fp8 import FP8Experts  # noqa: E402
from transformers.integrations.finegrained_fp8 import FP8Linear as TransformersFP8Linear  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402
from transformers.utils.import_utils import is_kernels_available  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).parents[2] / "integrations/kernels"
ROUNDING = 0.1  # what FP8 costs in an expert
QWEN3 = BASE | {
    **{"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 32},
    **{"initializer_range": 0.1, "max_position_embeddings": 64},
}
GPT_OSS = BASE | {
    **{"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 8, "num_key_value_heads": 2, "head_dim": 32},
    **{"initializer_range": 0.1, "max_position_embeddings": 64},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """The directory that the command has written."""
    out = tmp_path_factory.mktemp("kernel")
    subprocess.run([sys.executable, FOLDER / "build.py", out], check=True)
    return out


@pytest.fixture
def mark(monkeypatch):
    """Name classes for kernelize(), until the test ends."""

    def mark(cls, name):
        for attribute in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(cls, attribute, None, raising=False)
        replace_kernel_forward_from_hub(cls, name)

    return mark


@pytest.fixture
def on_fp8moe(repository):
    """Kernelize a model without any fallback for the layers of fp8moe."""

    def on_fp8moe(model, mode=Mode.INFERENCE):
        names = ("FP8MoeExperts", "FP8Linear")
        mapping = {name: {"cpu": LocalLayerRepository(repository, layer_name=name)} for name in names}
        with use_kernel_mapping(mapping, inherit_mapping=False):
            return kernelize(model, mode=mode, device="cpu", use_fallback=KernelizeFallback.NO_LAYER)

    return on_fp8moe


@use_kernel_forward_from_hub("FP8MoeExperts")
class OwnExperts(nn.Module):
    def __init__(self, dtype=torch.float32, bias=False):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 256, 128, dtype=dtype) / 12)
        self.down_proj = nn.Parameter(torch.randn(4, 128, 128, dtype=dtype) / 12)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        gate, up = torch.einsum("th,eih->tei", hidden_states, self.gate_up_proj).chunk(2, dim=-1)
        out = torch.einsum("tei,ehi->teh", self.act_fn(gate) * up, self.down_proj)
        index = top_k_index[..., None].expand(-1, -1, out.shape[-1])
        return (out.gather(1, index) * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


@use_kernel_forward_from_hub("FP8Linear")
class OwnLinear(nn.Module):
    def __init__(self, dtype=torch.float32, scale_dtype=torch.float32):
        super().__init__()
        scale_format = "ue8m0" if scale_dtype is torch.float8_e8m0fnu else "float32"
        weight = quantize_128x128(torch.randn(192, 256) / 16, scale_format=scale_format)
        self.weight, scale = (nn.Parameter(value, requires_grad=False) for value in weight)
        self.weight_scale_inv = nn.Parameter(scale.to(scale_dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(192, dtype=dtype))

    def forward(self, input):
        weight = dequantize(FP8Tensor(self.weight, self.weight_scale_inv.float()), dtype=torch.float32)
        return F.linear(input, weight.to(input.dtype), self.bias)


def tokens(dtype, count=50, experts=4, hidden=128):
    x = torch.randn(count, hidden, dtype=dtype)
    return x, torch.rand(count, experts).argsort(1)[:, :2], torch.rand(count, 2, dtype=dtype)


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


def kernelized(model, name):
    """The modules of a name that run in the kernel's module."""
    found = modules_named(model, name)
    assert found and all(module.forward.__module__.startswith("_fp8moe_") for module in found)
    return found


@DTYPES
@pytest.mark.parametrize(
    ("model_type", "options", "cls"), [("qwen3_moe", QWEN3, Qwen3MoeExperts), ("gpt_oss", GPT_OSS, GptOssExperts)]
)
def test_experts_of_transformers(model_type, options, cls, dtype, mark, on_fp8moe):
    """GPT-OSS's have biases, and transposed weights whose gate and up take turns."""
    model = random_model(model_type, options, dtype=dtype)
    expected = logits(model)
    layers = [GroupedExperts.from_experts(module) for module in modules_named(model, "experts")]
    mark(cls, "FP8MoeExperts")
    found = logits(on_fp8moe(model))
    assert found.dtype is dtype and 1e-4 < relative_error(found, expected) < ROUNDING
    for module, layer in zip(kernelized(model, "experts"), layers, strict=True):
        arguments = tokens(dtype, experts=8)
        assert torch.equal(module(*arguments), layer(*arguments))


@DTYPES
def test_checkpoints_in_fp8(dtype, mark, on_fp8moe, fp8_without_gpu):
    """Logits are those of load_model, which has fp8moe's own modules in their places."""
    fp8 = Path(models().name, FP8_MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(fp8, dtype=dtype)
    mark(FP8Experts, "FP8MoeExperts")
    mark(TransformersFP8Linear, "FP8Linear")
    found = logits(on_fp8moe(model))
    kernelized(model, "experts")
    kernelized(model, "q_proj")
    assert torch.equal(found, logits(load_model(fp8, dtype=dtype, device="cpu")))
    unquantized = transformers.AutoModelForCausalLM.from_pretrained(Path(models().name, MODEL), dtype=dtype)
    assert 1e-4 < relative_error(found, logits(unquantized)) < 2 * ROUNDING  # all linears are in FP8


@DTYPES
def test_experts_of_ones_own(dtype, on_fp8moe):
    module, arguments = OwnExperts(dtype), tokens(dtype)
    expected, layer = module(*arguments), GroupedExperts.from_experts(module)
    found = on_fp8moe(module)(*arguments)
    assert found.dtype is dtype and relative_error(found, expected) < ROUNDING
    assert torch.equal(found, layer(*arguments))
    with torch.no_grad():
        module.down_proj.mul_(2)
        assert relative_error(module(*arguments), 2 * expected) < ROUNDING


@DTYPES
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu], ids=str)
def test_linears_of_ones_own(dtype, scale_dtype, on_fp8moe):
    """Input and bias get gradients, also where the FP8 weight requires one, as transformers' do."""
    module = OwnLinear(dtype, scale_dtype)
    x = torch.randn(3, 20, 256, dtype=dtype, requires_grad=True)
    grad = torch.randn(3, 20, 192, dtype=dtype)
    expected = module(x), *torch.autograd.grad(module(x), (x, module.bias), grad)
    module.weight.requires_grad_()
    out = on_fp8moe(module, Mode.TRAINING)(x)
    found = out, *torch.autograd.grad(out, (x, module.bias), grad)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is dtype and relative_error(one, other) < ROUNDING
    own = FP8Linear(256, 192, device="meta")
    own.weight, own.weight_scale_inv = (
        nn.Parameter(value.detach(), requires_grad=False) for value in (module.weight, module.weight_scale_inv.float())
    )
    own.bias = module.bias
    assert torch.equal(out, own(x)) and torch.equal(out, linear(x, (own.weight, own.weight_scale_inv), own.bias))


def test_frozen_experts_pass_gradients_on(on_fp8moe):
    module = OwnExperts().requires_grad_(False)
    x, index, weights = tokens(torch.float32)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(module(x, index, weights).sum(), x)
    (found,) = torch.autograd.grad(on_fp8moe(module)(x, index, weights).sum(), x)
    assert relative_error(found, expected) < ROUNDING


def test_weights_of_experts_are_not_trained(on_fp8moe):
    module, arguments = OwnExperts(), tokens(torch.float32)
    with pytest.raises(RuntimeError, match="of OwnExperts .to train its weights"):
        on_fp8moe(module)(*arguments).sum().backward()
    with pytest.raises(ValueError, match="does not support mode"):
        on_fp8moe(OwnExperts(), Mode.TRAINING)


def test_compiled(on_fp8moe):
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE
    calls = (OwnExperts().requires_grad_(False), tokens(torch.float32)), (OwnLinear(), (torch.randn(20, 256),))
    for module, arguments in calls:
        expected = on_fp8moe(module, mode)(*arguments)
        assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(*arguments), expected)


def with_attributes(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


REFUSED = {
    "float64 experts": (lambda: OwnExperts(torch.float64), TypeError, "OwnExperts .*float64"),
    "one bias": (lambda: with_attributes(OwnExperts(), down_proj_bias=parameter(4, 128)), ValueError, "biases of both"),
    "activation": (
        lambda: with_attributes(OwnExperts(), act_fn=nn.Tanhshrink()),
        ValueError,
        "OwnExperts .*activation",
    ),
    "other parameters": (lambda: with_attributes(OwnExperts(), norm=parameter(128)), ValueError, "got also .'norm'"),
    "static scales": (
        lambda: with_attributes(OwnExperts(), activation_scheme="static"),
        ValueError,
        "dynamic activation scales",
    ),
    "unquantized linear": (
        lambda: with_attributes(OwnLinear(), weight=parameter(192, 256, dtype=torch.bfloat16)),
        ValueError,
        "OwnLinear cannot run on fp8moe's FP8Linear: weights in torch.bfloat16; fp8moe runs torch.float8_e4m3fn",
    ),
    "static scale": (lambda: with_attributes(OwnLinear(), activation_scale=parameter()), ValueError, "static"),
    "block size": (lambda: with_attributes(OwnLinear(), block_size=(64, 64)), ValueError, r"blocks \(64, 64\)"),
    "one scale": (lambda: with_attributes(OwnLinear(), block_size=None), ValueError, "blocks None"),
    "shape of the scales": (
        lambda: with_attributes(OwnLinear(), weight_scale_inv=parameter(1, 2)),
        ValueError,
        r"weight_scale_inv: expected shape \(2, 2\)",
    ),
    "float64 scales": (
        lambda: with_attributes(OwnLinear(), weight_scale_inv=parameter(2, 2, dtype=torch.float64)),
        TypeError,
        "float64",
    ),
    "float64 input": (lambda: OwnLinear(torch.float64), TypeError, "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, on_fp8moe):
    """In one sentence, when the module first runs."""
    make, error, message = REFUSED[case]
    module = make()
    dtype = torch.float64 if case == "float64 input" else torch.float32
    arguments = tokens(dtype) if isinstance(module, OwnExperts) else (torch.randn(20, 256, dtype=dtype),)
    with pytest.raises(error, match=message) as caught:
        on_fp8moe(module)(*arguments)
    assert "\n" not in str(caught.value)


def test_what_the_layers_declare(repository):
    layers = get_local_kernel(repository).layers
    assert (layers.FP8MoeExperts.has_backward, layers.FP8Linear.has_backward) == (False, True)
    assert layers.FP8MoeExperts.can_torch_compile and layers.FP8Linear.can_torch_compile


@pytest.mark.skipif(not is_kernels_available(), reason="this transformers takes other versions of kernels")
def test_set_use_kernels(repository, mark):
    """transformers' own kernelize(), with its mapping beside ours."""
    model = random_model("qwen3_moe", QWEN3, dtype=torch.float32)
    expected = logits(model)
    mark(Qwen3MoeExperts, "FP8MoeExperts")
    with use_kernel_mapping({"FP8MoeExperts": {"cpu": LocalLayerRepository(repository, layer_name="FP8MoeExperts")}}):
        model.set_use_kernels(True)
    kernelized(model, "experts")
    assert 1e-4 < relative_error(logits(model), expected) < ROUNDING


def test_the_readmes_code(tmp_path, monkeypatch, mark):
    commands, code = re.findall(r"```\w*\n(.+?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    build = commands.splitlines()[1].split()
    subprocess.run([sys.executable, FOLDER.parents[1] / build[1], tmp_path / build[2]], check=True)
    (tmp_path / MODEL).symlink_to(Path(models().name, MODEL))
    monkeypatch.chdir(tmp_path)
    mark(Qwen3MoeExperts, "FP8MoeExperts")
    names = {}
    exec(code, names)
    expected = logits(transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16))
    kernelized(names["model"], "experts")
    assert 1e-4 < relative_error(logits(names["model"]), expected) < ROUNDING
