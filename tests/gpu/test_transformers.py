"""transformers models on fp8moe's CUDA kernels."""

import copy

import pytest
import torch

from fp8moe.decode import GraphDecoder
from fp8moe.hf import load_model
from fp8moe.layers.experts import GroupedExperts
from fp8moe.weights import quantize_checkpoint
from tests.checkpoint_formats import LAYOUTS
from tests.errors import relative_error
from tests.transformers_models import BASE, MLA, TOKENS, modules_named, prompts, random_model, write_checkpoints

transformers = pytest.importorskip("transformers")
from transformers.integrations import finegrained_fp8  # noqa: E402

from tools.format_matrix import source_of, wanted  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("registered")]

DEVICE = "cuda"
SHAPE = BASE | {"hidden_size": 256, "max_position_embeddings": 64, "initializer_range": 0.03}
WIDE_MLA = MLA | {
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
}
MODELS = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 32},
    "deepseek_v3": WIDE_MLA,
    "deepseek_v32": WIDE_MLA | {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 16},
}


def make_model(name):
    return random_model(name, SHAPE | MODELS[name], dtype=torch.bfloat16)


@pytest.fixture(scope="module", params=MODELS)
def checkpoints(request, tmp_path_factory):
    """(name, bf16 checkpoint, FP8 checkpoint)"""
    return request.param, *write_checkpoints(make_model(request.param), tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def logits(model):
    return model(TOKENS.to(DEVICE)).logits


def routing(num_experts, tokens=9):
    generator = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(tokens)])
    return index, torch.rand(tokens, 2, generator=generator)


def agrees_with_the_cpu(module, hidden=256):
    """One experts module on the GPU, against the same on the reference backend."""
    x = torch.randn(9, hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
    arguments = (x, *routing(module.num_experts))
    with torch.no_grad():
        ours = module(*(value.to(DEVICE) for value in arguments))
        moved = copy.deepcopy(module).cpu()
        reference = moved if isinstance(moved, GroupedExperts) else GroupedExperts.from_experts(moved)
        expected = reference(*arguments)
    # Few values, of which some fall on the other side of an E4M3 rounding edge.
    assert relative_error(ours.cpu(), expected) < 2e-2


def test_experts_in_bfloat16(checkpoints):
    _, directory, _ = checkpoints
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, experts_implementation="fp8moe", device_map=DEVICE
    )
    for module in modules_named(model, "experts"):
        agrees_with_the_cpu(module)
    ours = logits(model)
    model.set_experts_implementation("eager")
    # E4M3 keeps 3 bits of mantissa, a relative error of 2.6% in the mean square. Five roundings (input, gate, up,
    # intermediate, down) make that about 6% of what the experts contribute, and they are only a part of the logits.
    assert 0 < relative_error(ours, logits(model)) < 0.06


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_fp8_checkpoint(checkpoints, tmp_path, scale_format):
    """All that a user writes; transformers' own FP8 modules, on our kernels, with no copy of the experts."""
    _, bf16, directory = checkpoints
    if scale_format == "ue8m0":
        directory = tmp_path / "fp8"
        quantize_checkpoint(bf16, directory, scale_format="ue8m0")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, experts_implementation="fp8moe", device_map=DEVICE
    )
    assert any(type(module) is finegrained_fp8.FP8Linear for module in model.modules())
    out = logits(model)
    for module in modules_named(model, "experts"):
        assert type(module) is finegrained_fp8.FP8Experts
        assert module._fp8moe.layer.down_proj.data_ptr() == module.down_proj.data_ptr()
        agrees_with_the_cpu(module)
    assert torch.equal(out, logits(load_model(directory, device=DEVICE)))


def decodes_alike(model, seeds):
    """In graphs and without."""
    captured = GraphDecoder(model, batch_sizes=(3,), max_length=32)
    plain = GraphDecoder(model, batch_sizes=(3,), max_length=32, capture=False)
    for seed in range(seeds):
        ids = prompts(3, 9, seed, DEVICE)
        assert torch.equal(captured.generate(ids, max_new_tokens=16), plain.generate(ids, max_new_tokens=16))


def test_load_model_and_decode(checkpoints):
    _, _, directory = checkpoints
    model = load_model(directory, device=DEVICE)
    assert {value.device.type for value in (*model.parameters(), *model.buffers())} == {"cuda"}
    decodes_alike(model, 3)


def test_gpt_oss(tmp_path):
    """As published: MXFP4 experts with biases, and attention with sinks."""
    source = source_of("GPT-OSS", tmp_path / "source")
    source.write(LAYOUTS["GPT-OSS"], tmp_path / "x", wanted("GPT-OSS"))
    model = load_model(tmp_path / "x", device=DEVICE)
    for module in modules_named(model, "experts"):
        agrees_with_the_cpu(module, source.config["hidden_size"])
    decodes_alike(model, 1)


def test_moving_the_model_quantizes_again():
    model = make_model("mixtral")
    model.set_experts_implementation("fp8moe")
    with torch.no_grad():
        model(TOKENS)
        first = logits(model.to(DEVICE))
        assert modules_named(model, "experts")[0]._fp8moe.layer.down_proj.is_cuda
        assert torch.equal(logits(model.cpu().to(DEVICE)), first)


def test_generate():
    """transformers' own loop, which switches caches and may compile."""
    model = make_model("qwen3_moe").to(DEVICE)
    model.set_experts_implementation("fp8moe")
    ids = TOKENS[:1].to(DEVICE)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 20)
