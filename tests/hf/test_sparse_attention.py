"""Models with an indexer after optimize: attention reads what was chosen, with the logits of their own forward."""

import pytest
import torch

import fp8moe
from fp8moe.hf import optimize
from fp8moe.hf.fused import latent_attention
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, newer_than_5_17, prompts

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("one_thread", "registered"),
    newer_than_5_17("caches expanded keys and values of these models"),
]

NAMES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
LENGTH = 40


def build(name, **options):
    # So many heads of an indexer that no score is a sum of zeros: keys of equal scores may be chosen either way.
    kind = MODELS[name]
    return kind._replace(options=kind.options | {"index_n_heads": 32} | options).build()


@pytest.fixture
def calls(monkeypatch):
    """The calls of latent_attention: numbers of queries, and of chosen latents."""
    found, attend = [], latent_attention.latent_attention

    def counted(q, *others, indices=None, **how):
        found.append((q.shape[1], None if indices is None else indices.shape[2]))
        return attend(q, *others, indices=indices, **how)

    monkeypatch.setattr(latent_attention, "latent_attention", counted)
    return found


def padded(batch=3, length=LENGTH):
    ids = prompts(batch, length, seed=1)
    return ids, left_padded(ids, *(0, 7, 2)[:batch])


@torch.no_grad()
def logits(model, ids, mask, **how):
    return model(ids, attention_mask=mask, **how).logits[mask.bool()]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_prompts(name, calls, monkeypatch):
    model, (ids, mask) = build(name), padded()
    expected = logits(model, ids, mask)
    assert not calls
    with torch.no_grad():
        optimize(model)
    close(logits(model, ids, mask), expected)
    layers, chosen = model.config.num_hidden_layers, model.config.index_topk
    assert calls == [(LENGTH, chosen)] * layers and chosen < LENGTH
    monkeypatch.setattr(latent_attention, "ROWS_AT_A_TIME", 9 * model.config.num_attention_heads)
    close(logits(model, ids, mask), expected)
    assert {queries for queries, _ in calls[layers:]} == {9, LENGTH % 9}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_generate(name, cache, calls):
    model, (ids, mask) = build(name), padded()
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    how |= {"disable_compile": True} if cache == "static" else {}
    expected = model.generate(ids, **how)
    restored = optimize(model)
    assert torch.equal(model.generate(ids, **how), expected)
    assert {queries for queries, chosen in calls if chosen == model.config.index_topk} == {LENGTH, 1}
    restored.restore()
    calls.clear()
    assert torch.equal(model.generate(ids, **how), expected) and not calls


@pytest.mark.parametrize("name", NAMES)
def test_short_prompts_are_read_whole(name, calls):
    model = build(name)
    ids, mask = padded(length=model.config.index_topk)
    expected = logits(model, ids, mask)
    optimize(model)
    close(logits(model, ids, mask), expected)
    assert not calls


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_to_the_model(name, calls):
    """Training, gradients, masks that are added, and batch invariance."""
    model, (ids, mask) = build(name), padded()
    optimize(model)
    model(ids, attention_mask=mask).logits.sum().backward()
    model.train()
    logits(model, ids, mask)
    model.eval()
    with fp8moe.batch_invariant():
        logits(model, ids, mask)
    assert not calls
    model.set_attn_implementation("eager")
    expected = logits(model, ids, mask)
    assert not calls
    model.set_attn_implementation("sdpa")
    close(logits(model, ids, mask), expected)
    assert calls


def test_a_layer_without_an_indexer_wants_an_earlier_choice():
    model = build("GlmMoeDsaForCausalLM")
    optimize(model)
    attention = model.model.layers[0].self_attn
    attention.indexer = None
    with torch.no_grad(), pytest.raises(ValueError, match="^prev_topk_indices: expected"):
        model(prompts(1, 9, seed=0))


@pytest.mark.parametrize("name", NAMES)
def test_indexers_of_transformers_choose_too(name, calls):
    """Those of sizes that fp8moe does not score."""
    model, (ids, mask) = build(name, index_n_heads=4), padded(1)
    expected = logits(model, ids, mask)
    optimize(model)
    close(logits(model, ids, mask), expected)
    assert calls
