"""Models with an indexer after optimize, on a GPU: against their own forward, prompts and generated tokens."""

import copy

import pytest
import torch

from fp8moe.hf import optimize
from fp8moe.hf.fused import latent_attention
from tests.gpu.latent.test_latent_decoder import build
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

NAMES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


@pytest.fixture(params=NAMES)
def model(request):
    made = build(request.param)
    if not any(map(latent_attention.is_sparse, made.modules())):
        pytest.skip("this transformers caches expanded keys and values")
    return made


@torch.no_grad()
def logits(model, ids, mask):
    return model(ids, attention_mask=mask).logits[mask.bool()].float()


def test_prompts(model, monkeypatch):
    ids = prompts(3, 200, seed=1).cuda()
    mask = left_padded(ids, 0, 9, 2)
    theirs, expected = logits(model, ids, mask), logits(copy.deepcopy(model).float(), ids, mask)
    optimize(model)
    found = logits(model, ids, mask)
    assert not torch.equal(found, theirs)
    error, usual = ((some - expected).norm(dim=-1) / expected.norm(dim=-1) for some in (found, theirs))
    for part in (0.1, 0.5):  # rounding chooses other experts, and other latents, now and then
        assert error.quantile(part) <= max(1e-2, 1.2 * usual.quantile(part)), (error, usual)
    monkeypatch.setattr(latent_attention, "ROWS_AT_A_TIME", 33 * model.config.num_attention_heads)
    assert (logits(model, ids, mask) - found).norm() <= 1e-2 * found.norm()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(model, cache):
    ids = prompts(2, 60, seed=2).cuda()
    how = {"attention_mask": left_padded(ids, 0, 11), "max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    optimize(model)
    found = [model.generate(ids, cache_implementation=cache, **how) for _ in range(2)]
    assert torch.equal(*found) and found[0].shape == (2, 72)
