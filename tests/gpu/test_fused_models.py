"""Models whose known parts run in the kernels: logits and tokens of every class, against the models' own."""

import pytest
import torch

from fp8moe.decode import GraphDecoder
from fp8moe.hf import optimize, register
from fp8moe.hf.fused import flash_attention_3, linears
from tests.hf.test_fused_models import PARTS, WIDE, distance, in_fp8, prompt, skipped_if_broken
from tests.tiny_moe_models import MODELS

pytestmark = pytest.mark.gpu

FUSED = [name for name, parts in PARTS.items() if parts]


def on_gpu(model):
    return model.cuda()


def cuda_logits(model, ids=None):
    with torch.no_grad():
        return model(input_ids=(prompt() if ids is None else ids).cuda()).logits.float()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "DiffusionGemmaForBlockDiffusion"])
def test_logits_of_every_class_in_float32(name):
    model = on_gpu(MODELS[name].build())
    with skipped_if_broken(name):
        before = cuda_logits(model)
    optimize(model)
    assert distance(cuda_logits(model), before) <= 1e-5


@pytest.mark.parametrize("name", FUSED)
def test_logits_in_bfloat16(name):
    """Every token has all experts: with others chosen in a near tie, logits are far apart."""
    tiny = MODELS[name]
    everyone = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    config = tiny.config()
    options = tiny.options | {key: value for key, value in everyone.items() if hasattr(config, key)}
    model = on_gpu(tiny._replace(options=options).build(torch.bfloat16))
    before = cuda_logits(model)
    optimize(model)
    assert distance(cuda_logits(model), before) <= 1e-2


@pytest.mark.parametrize("name", FUSED)
def test_tokens_of_a_captured_decoder_equal_those_of_generate(name):
    register()
    own = "eager" if name == "GptOssForCausalLM" else "sdpa"  # sdpa has no sinks
    model = on_gpu(MODELS[name].build(experts_implementation="fp8moe", attn_implementation=own))
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=64)
    assert decoder.captured and decoder.fused
    ids, mask = prompt(3).cuda(), torch.ones(3, 12, dtype=torch.long, device="cuda")
    mask[1, :5] = mask[2, :1] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=20), expected)


@pytest.mark.parametrize("rows,length", [(1, 1), (3, 7), (2, 300)])
def test_one_gemm_for_q_k_and_v(rows, length, monkeypatch):
    monkeypatch.setattr(flash_attention_3, "_interface", lambda: None)  # which rounds in other places
    model = on_gpu(in_fp8(**WIDE))
    ids = torch.randint(3, 120, (rows, length))
    before = cuda_logits(model, ids)
    optimize(model)
    attention = model.model.layers[0].self_attn
    assert linears.joined([linears.weights(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    assert distance(cuda_logits(model, ids), before) <= 2e-2
