"""GraphDecoder attends to the latents of DeepSeek's and GLM's models by latent_attention, on the reference backend."""

import copy
import threading

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder, latents
from fp8moe.hf.fused import latent_attention as fused_latents
from tests.decode_models import NEW, forced_logits, fp8moe_attention_on_cpu
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
KINDS = [*((name, {}) for name in DENSE), *((name, {"index_n_heads": 32}) for name in SPARSE)]
PADDING = (0, 9, 2)


@pytest.fixture(scope="module")
def models():
    # So many heads of an indexer that no score is a sum of zeros: keys of equal scores may be chosen either way.
    return {name: MODELS[name]._replace(options=MODELS[name].options | heads).build() for name, heads in KINDS}


@pytest.fixture
def calls(monkeypatch):
    """GraphDecoder attends as on a GPU. The calls of latent_attention: numbers of queries, and of chosen latents."""
    fp8moe_attention_on_cpu(monkeypatch)
    found, attend = [], fused_latents.latent_attention

    def counted(q, *others, indices=None, **how):
        found.append((q.shape[1], None if indices is None else indices.shape[2]))
        return attend(q, *others, indices=indices, **how)

    monkeypatch.setattr(fused_latents, "latent_attention", counted)
    return found


@torch.no_grad()
def expected_logits(model, ids, mask):
    """Those of the model's own forward, from the token before the last NEW tokens of ids on."""
    whole = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1).long()
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=whole, position_ids=positions, use_cache=False).logits[:, -1 - NEW :]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_logits_in_float32(name, chunk, fuse, models, calls):
    model = models[name]
    ids = prompts(len(PADDING), 40, seed=3)
    mask = left_padded(ids[:, :-NEW], *PADDING).bool()
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=64, fuse=fuse, prefill_chunk=chunk)
    assert decoder.attention == "flash"
    calls.clear()
    close(forced_logits(decoder, ids, mask), expected_logits(model, ids, mask))
    layers = model.config.num_hidden_layers
    chosen = model.config.index_topk if name in SPARSE else None
    assert calls[-layers * NEW :] == [(1, chosen)] * layers * NEW
    whole = [(32, chosen)] * layers if chosen else []  # otherwise the latents of whole prompts are expanded
    assert calls[: -layers * NEW] == whole if chunk is None else {count for count, _ in calls} == {5, 2, 1}
    assert not any("expand_kv" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", SPARSE)
def test_short_contexts_are_read_whole(name, models, calls):
    model = models[name]
    ids = prompts(1, 3 + NEW, seed=2)
    topk = model.config.index_topk
    decoder = GraphDecoder(model, batch_sizes=(1,), max_length=3 + NEW)
    assert topk < 3 + NEW
    model.config.index_topk = 16
    indexers = [module for module in model.modules() if hasattr(module, "index_topk")]
    try:
        for module in indexers:
            module.index_topk = 16
        calls.clear()
        close(
            forced_logits(decoder, ids, torch.ones(1, 3, dtype=torch.bool)),
            expected_logits(model, ids, torch.ones(1, 3)),
        )
    finally:
        for module in (model.config, *indexers):
            module.index_topk = topk
    assert {chosen for _, chosen in calls} == {None}


@pytest.mark.parametrize("name", [DENSE[0], SPARSE[0]])
@pytest.mark.parametrize("way", ["run", "prefix", "stream"])
def test_ways_to_generate(name, way, models, calls):
    model = models[name]
    decoder = GraphDecoder(model, batch_sizes=(1, 2), max_length=64)
    assert decoder.attention == "flash"
    ids = prompts(1, 20, seed=3)
    tokens = model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    if way == "stream":
        found = torch.cat([*decoder.stream(ids, max_new_tokens=NEW, eos_token_id=())])
        assert torch.equal(found, tokens[0, 20:])
    elif way == "run":
        asked = [{"input_ids": row, "max_new_tokens": NEW, "eos_token_id": ()} for row in (ids[0], prompts(1, 3)[0])]
        assert torch.equal(dict(decoder.run(asked * 2))[2], tokens[0, 20:])
    else:
        prefix = decoder.prefix(ids[0, :12])
        assert torch.equal(
            decoder.generate(ids[:, 12:], prefix=prefix, max_new_tokens=NEW, eos_token_id=()), tokens[:, 12:]
        )


def test_another_thread_runs_the_model_meanwhile(models, calls, monkeypatch):
    model = models[DENSE[1]]
    ids, inside, results = prompts(1, 20, seed=4), threading.Event(), []
    decoder = GraphDecoder(model, batch_sizes=(1,), max_length=64)
    with torch.no_grad():
        expected = model(ids).logits

    def other():
        with torch.no_grad():
            results.append(model(ids).logits)

    attend = latents.attend

    def interrupted(*args, **how):
        if not inside.is_set():
            inside.set()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return attend(*args, **how)

    monkeypatch.setattr(latents, "attend", interrupted)
    decoder.generate(ids, max_new_tokens=2)
    assert inside.is_set() and torch.equal(results[0], expected)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", [DENSE[0], DENSE[1], SPARSE[0]])
def test_latents_in_fp8(name, chunk, models, calls):
    model = copy.deepcopy(models[name]).bfloat16()
    ids = prompts(len(PADDING), 40, seed=1)
    mask = left_padded(ids[:, :-NEW], *PADDING).bool()
    how = {"batch_sizes": (4,), "max_length": 64, "prefill_chunk": chunk}
    own, fp8 = (GraphDecoder(model, **how, cache_dtype=dtype) for dtype in (None, torch.float8_e4m3fn))
    expected, found = (forced_logits(decoder, ids, mask) for decoder in (own, fp8))
    assert not torch.equal(found, expected)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() <= 0.1, error
    layer, config = fp8.steps[4].cache.layers[0], model.config
    assert layer.keys.shape == (4, 1, 64, config.kv_lora_rank + 4 + 2 * config.qk_rope_head_dim)
    assert layer.keys.dtype is torch.uint8 and not layer.values.numel()


def test_ways_to_generate_in_fp8(models, calls):
    decoder = GraphDecoder(
        copy.deepcopy(models[SPARSE[1]]).bfloat16(), batch_sizes=(1, 2), max_length=64, cache_dtype=torch.float8_e4m3fn
    )
    ids = prompts(1, 20, seed=3)
    tokens = decoder.generate(ids, max_new_tokens=NEW, eos_token_id=())
    asked = [{"input_ids": row, "max_new_tokens": NEW, "eos_token_id": ()} for row in (ids[0], prompts(1, 3)[0])]
    assert torch.equal(dict(decoder.run(asked * 2))[2], tokens[0, 20:])
    prefix = decoder.prefix(ids[0, :12])
    assert decoder.generate(ids[:, 12:], prefix=prefix, max_new_tokens=NEW, eos_token_id=()).shape == (1, 16)


def test_batch_invariance_is_refused_by_name(models):
    with fp8moe.batch_invariant(), pytest.raises(ValueError, match="cannot be batch invariant.*latent attention"):
        GraphDecoder(copy.deepcopy(models[DENSE[1]]).bfloat16(), batch_sizes=(1,), max_length=32)


@pytest.mark.parametrize("name", [DENSE[0], SPARSE[1]])
def test_many_queries_are_attended_to_in_parts(name, models, calls, monkeypatch):
    model = models[name]
    ids = prompts(2, 30, seed=2)
    mask = torch.ones(2, 30 - NEW, dtype=torch.bool)
    monkeypatch.setattr(fused_latents, "ROWS_AT_A_TIME", 5 * model.config.num_attention_heads)
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=64, prefill_chunk=13)
    calls.clear()
    close(forced_logits(decoder, ids, mask), expected_logits(model, ids, mask))
    assert {queries for queries, _ in calls} == {5, 3, 4, 1}
