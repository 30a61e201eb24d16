"""GraphDecoder over latents on a GPU: against the model's own attention, in graphs, for every family."""

import copy

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder
from tests.decode_models import NEW, forced_logits
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
SPARSE = {"index_n_heads": 32, "index_head_dim": 64, "index_topk": 16}
KINDS = {
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"), {}),
    **dict.fromkeys(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), SPARSE),
}


def build(name, dtype=torch.bfloat16):
    if name not in MODELS:
        pytest.skip(f"this transformers has no {name}")
    kind = MODELS[name]
    model = kind._replace(options=kind.options | SIZES | KINDS[name]).build(dtype).cuda()
    fp8moe.hf.register()
    model.set_experts_implementation("fp8moe")
    return model


@torch.no_grad()
def expected_logits(model, ids, mask):
    whole = torch.cat([mask, mask.new_ones(len(ids), NEW)], 1).long()
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=whole, position_ids=positions, use_cache=False).logits[:, -1 - NEW :].float()


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_model(name, chunk):
    model = build(name)
    ids = prompts(3, 90, seed=1).cuda()
    mask = left_padded(ids[:, :-NEW], 0, 9, 2).bool()
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=128, prefill_chunk=chunk)
    assert decoder.attention == "flash"
    found, theirs = forced_logits(decoder, ids, mask), expected_logits(model, ids, mask)
    expected = expected_logits(copy.deepcopy(model).float(), ids, mask)
    # Rounding chooses other experts, and other latents, of tiny random models now and then, as in the model itself.
    error, usual = ((some - expected).norm(dim=-1) / expected.norm(dim=-1) for some in (found, theirs))
    for part in (0.1, 0.5):
        assert error.quantile(part) <= max(1e-2, 1.2 * usual.quantile(part)), (error, usual)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"])
def test_graphs_give_the_tokens_of_steps_without_graphs(name):
    model = build(name)
    ids = prompts(2, 40, seed=3).cuda()
    mask = left_padded(ids, 0, 11)
    how = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": ()}
    found = []
    for capture in (True, False):
        decoder = GraphDecoder(model, batch_sizes=(2,), max_length=64, capture=capture)
        assert decoder.attention == "flash"
        found.append([decoder.generate(ids, **how) for _ in range(2)])
    assert all(torch.equal(tokens, found[0][0]) for run in found for tokens in run)


def test_other_sizes_and_dtypes_keep_the_models_attention():
    kind = MODELS["DeepseekV3ForCausalLM"]
    for model, reason in (
        (kind.build(torch.bfloat16).cuda(), "the kernel takes latents of 576 values"),
        (build("DeepseekV3ForCausalLM", torch.float32), "the kernel takes bfloat16"),
    ):
        decoder = GraphDecoder(model, batch_sizes=(1,), max_length=64)
        assert reason in decoder.attention
        assert decoder.generate(prompts(1, 9).cuda(), max_new_tokens=3).shape == (1, 12)
