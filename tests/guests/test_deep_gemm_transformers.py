"""transformers' DeepGEMM path on the drop-in: its experts, linears and models against our native layers."""

import pytest
import torch

import deep_gemm
from fp8moe.hf.experts import experts_forward
from fp8moe.kernels.gemm import gemm
from fp8moe.kernels.linear.forward import apply as linear
from fp8moe.quant.quantize import quantize_1x128
from tests.errors import relative_error
from tests.transformers_models import BASE, TOKENS, modules_named, random_model, write_checkpoints

transformers = pytest.importorskip("transformers")
from transformers.integrations import deepgemm as theirs  # noqa: E402
from transformers.integrations import finegrained_fp8, hub_kernels  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = BASE | {"hidden_size": 256, "max_position_embeddings": 64, "initializer_range": 0.03}
MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 64},
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_key_value_heads": 2},
}
NAMES = {
    "fp8_fp4_matmul": "fp8_fp4_gemm_nt",
    "grouped_fp8_fp4_matmul_nt": "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "grouped_fp8_fp4_matmul_nn": "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "grouped_bf16_matmul_nt": "m_grouped_bf16_gemm_nt_contiguous",
    "grouped_bf16_matmul_nn": "m_grouped_bf16_gemm_nn_contiguous",
    "per_token_cast_to_fp8": "per_token_cast_to_fp8",
    "transform_sf_into_required_layout": "transform_sf_into_required_layout",
}
ABSENT = ("transform_weights_for_mega_moe", "get_symm_buffer_for_mega_moe", "fp8_fp4_mega_moe")


@pytest.fixture(autouse=True)
def on_the_drop_in(monkeypatch):
    """The drop-in where transformers' loader keeps DeepGEMM, on a Hopper GPU as far as transformers can tell."""
    entries = {entry: getattr(deep_gemm, name) for entry, name in NAMES.items()}
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    bundle = theirs.DeepGEMM(**entries, **dict.fromkeys(ABSENT), m_alignment=alignment)
    monkeypatch.setattr(theirs, "_DEEPGEMM", bundle)
    monkeypatch.setattr(theirs, "is_sm100", lambda: False)
    monkeypatch.setattr(finegrained_fp8, "is_deepgemm_loadable", lambda: True)
    monkeypatch.setattr(finegrained_fp8, "is_sm100", lambda: False, raising=False)


@pytest.fixture(params=MODELS)
def model(request, fp8_without_gpu, tmp_path):
    """An FP8 model that transformers has loaded."""
    shape = SHAPE | MODELS[request.param]
    _, fp8 = write_checkpoints(random_model(request.param, shape, dtype=torch.bfloat16), tmp_path)
    return transformers.AutoModelForCausalLM.from_pretrained(fp8)


def tokens_of(module, count=50):
    """Hidden states, and for each two experts with weights."""
    x = torch.randn(count, module.hidden_dim, dtype=torch.bfloat16)
    index = torch.rand(count, module.num_experts).argsort(1)[:, :2]
    return x, index, torch.rand(count, 2)


@torch.no_grad()
def logits(model, implementation):
    model.set_experts_implementation(implementation)
    return model(TOKENS).logits


@torch.no_grad()
def with_native_gemm(module, x, index, weights):
    """The experts one by one, rounded where their DeepGEMM path rounds; an expert of another rank adds nothing."""
    out = torch.zeros(*index.shape, x.shape[1], dtype=torch.bfloat16)
    scales = module.gate_up_proj_scale_inv.float(), module.down_proj_scale_inv.float()
    for expert in range(module.num_experts):
        token, choice = (index == expert).nonzero(as_tuple=True)
        up = gemm(quantize_1x128(x[token]), (module.gate_up_proj[expert], scales[0][expert]))
        inner = quantize_1x128(module._apply_gate(up))
        down = gemm(inner, (module.down_proj[expert], scales[1][expert]))
        out[token, choice] = down * weights[token, choice].bfloat16()[:, None]
    return out.sum(1)


def test_experts(model):
    for module in modules_named(model, "experts"):
        operands = tokens_of(module)
        with torch.no_grad():
            ours = theirs.deepgemm_fp8_fp4_experts_forward(module, *operands)
        assert relative_error(ours, with_native_gemm(module, *operands)) < 1e-3


def test_experts_against_the_native_layer(model):
    """transformers rounds gate, up and their product to bfloat16 ahead of the second quantization, the layer does not.

    That turns some E4M3 codes to their neighbours, a step of 6 to 12%: 1.6% of the result's norm.
    """
    for module in modules_named(model, "experts"):
        operands = tokens_of(module)
        with torch.no_grad():
            ours = theirs.deepgemm_fp8_fp4_experts_forward(module, *operands)
            native = experts_forward(module, *operands)
        assert deep_gemm.calc_diff(ours, native) < 1e-3
        assert relative_error(ours, native) < 0.02


def test_experts_of_other_ranks(model, monkeypatch):
    module = modules_named(model, "experts")[0]
    x, index, weights = tokens_of(module)
    index[::3, 0] = module.num_experts
    index[4] = module.num_experts
    monkeypatch.setattr(module, "_is_expert_parallel", True, raising=False)  # 5.17 always does as if it were
    expected = with_native_gemm(module, x, index, weights)
    with torch.no_grad():
        ours = theirs.deepgemm_fp8_fp4_experts_forward(module, x, index.clone(), weights)
    assert relative_error(ours, expected) < 1e-3 and not ours[4].any()


def test_whole_model(model, registered):
    ours, native = logits(model, "deepgemm"), logits(model, "fp8moe")
    assert 0 < deep_gemm.calc_diff(ours, native) < 1e-2


def test_linear(model):
    module = next(module for module in model.modules() if type(module) is finegrained_fp8.FP8Linear)
    x = torch.randn(2, 5, module.in_features, dtype=torch.bfloat16)
    arguments = module.weight, module.weight_scale_inv, torch.randn(module.out_features).bfloat16(), (128, 128)
    ours = theirs.deepgemm_fp8_fp4_linear(x, *arguments)
    assert relative_error(ours, linear(x, *(value.detach() for value in arguments[:3]))) < 1e-2


@pytest.mark.parametrize("name", [*MODELS, "gpt_oss"])
def test_bfloat16_experts(name):
    """Also where weights are transposed and have a bias."""
    options = {"intermediate_size": 128, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = random_model(name, SHAPE | MODELS.get(name, options), dtype=torch.bfloat16)
    assert relative_error(logits(model, "deepgemm"), logits(model, "eager")) < 1e-2


def test_their_loader_misses_mega_moe_only(monkeypatch):
    monkeypatch.setattr(theirs, "_DEEPGEMM", None)
    monkeypatch.setattr(theirs, "is_deepgemm_loadable", lambda **_: True)
    monkeypatch.setitem(hub_kernels._KERNEL_MODULE_MAPPING, "deep-gemm", deep_gemm)
    with pytest.raises(ImportError, match=f"missing required symbols: {', '.join(ABSENT)}\\."):
        theirs.load_deepgemm_kernel()
