"""The indexers of transformers' models on fp8moe's reference backend: tokens, masks and caches as without."""

import pytest
import torch

from fp8moe.decode import GraphDecoder
from fp8moe.hf import indexers as integration
from fp8moe.hf import register, unregister
from tests.compilers import INDUCTOR
from tests.indexer_reference import operands
from tests.transformers_indexers import (
    ALL,
    FEW,
    NEW_TOKENS,
    arguments,
    generate,
    left_padded,
    make_model,
    random_indexer,
    without,
)
from tests.transformers_models import LENGTH, modules_named, prompts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread", "registered")


@pytest.fixture
def launches(monkeypatch):
    """The shapes of q and of the keys in each call of mqa_logits."""
    calls, logits = [], integration.mqa_logits

    def counted(q, kv, *rest, **options):
        calls.append((tuple(q.shape), tuple(kv[0].shape)))
        return logits(q, kv, *rest, **options)

    monkeypatch.setattr(integration, "mqa_logits", counted)
    return calls


def test_models_with_hooks_from_before(launches):
    """As accelerate puts them on the modules of a model on several devices: they call the forward that was there."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = make_model(FEW, num_hidden_layers=2)
    hooked, unhooked = modules_named(model, "indexer")
    unregister()
    for indexer in (hooked, unhooked):
        hooks.add_hook_to_module(indexer, hooks.ModelHook())
    hooks.remove_hook_from_module(unhooked)
    expected = generate(model, prompts())
    assert not launches
    register()
    assert torch.equal(generate(model, prompts()), expected)
    assert len(launches) == 2 * (3 + NEW_TOKENS - 1)


# Tokens.


@pytest.mark.parametrize("top_k", [FEW, ALL])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tokens_are_equal(top_k, attention, launches):
    model = make_model(top_k)
    model.set_attn_implementation(attention)
    with without(model):
        expected = generate(model, prompts())
    assert not launches
    assert torch.equal(generate(model, prompts()), expected)
    # In each of three layers, a launch for each sequence of the prompt, and one for all of them in each step after it.
    prompt = [((LENGTH, 32, 32), (LENGTH, 32))] * 3
    steps = [((3, 32, 32), (3 * length, 32)) for length in range(LENGTH + 1, LENGTH + NEW_TOKENS)]
    assert launches == prompt * 3 + [step for step in steps for _ in range(3)]


def test_the_selection_matters():
    """The equality above would not survive another selection."""
    model = make_model(FEW)
    expected = generate(model, prompts())

    def first_tokens(self, hidden_states, q_resid, position_embeddings, attention_mask, *rest, **options):
        count = min(self.index_topk, attention_mask.shape[-1])
        return torch.arange(count, dtype=torch.int32).expand(*hidden_states.shape[:2], count)

    with without(model, first_tokens):
        assert not (generate(model, prompts()) == expected).all(1).any()


@pytest.mark.parametrize("top_k", [FEW, ALL])
def test_left_padding(top_k):
    model = make_model(top_k)
    ids, mask = left_padded(prompts(), 0, 5, 11)
    with without(model):
        expected = generate(model, ids, mask)
    out = generate(model, ids, mask)
    assert torch.equal(out, expected)
    alone = generate(model, ids[1:2, 5:])
    assert torch.equal(out[1:2, 5:], alone)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},  # reorders the cache
        {"prompt_lookup_num_tokens": 3},  # crops it
        {"cache_implementation": "static", "disable_compile": True},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ways_of_generating(options):
    model = make_model(FEW)
    ids = prompts(1, seed=1)
    with without(model):
        expected = generate(model, ids, **options)
    assert torch.equal(generate(model, ids, **options), expected)


def test_graph_decoder():
    model = make_model(FEW)
    ids, mask = left_padded(prompts(), 3, 0, 6)
    with without(model):
        expected = generate(model, ids, mask)
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=40)
    for _ in range(2):
        assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS), expected)


def test_a_prompt_in_chunks(launches):
    model = make_model(FEW, num_hidden_layers=2)
    expected = generate(model, prompts(1))
    launches.clear()
    assert torch.equal(generate(model, prompts(1), prefill_chunk_size=5), expected)
    assert [(q[0], keys[0]) for q, keys in launches[:6:2]] == [(5, 5), (5, 10), (2, 12)]


def test_a_conversation_that_goes_on():
    model = make_model(FEW)
    new = prompts(seed=1)[:, :5]
    answer = model.generate(prompts(), do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    cache = answer.past_key_values
    cache.crop(-3)
    whole = torch.cat((answer.sequences[:, : cache.get_seq_length()], new), dim=1)
    with without(model):
        expected = generate(model, whole)
    assert torch.equal(generate(model, whole, past_key_values=cache), expected)
    assert cache.layers[2].indexer_keys.shape[1] == cache.get_seq_length() == whole.shape[1] + NEW_TOKENS - 1


def test_glm():
    sizes = {"head_dim": 16, "pad_token_id": 0, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    model = make_model(FEW, "glm_moe_dsa", **sizes)
    if not hasattr(type(modules_named(model, "indexer")[0]).forward, "_fp8moe"):
        pytest.skip("this version of transformers calls the indexer of GLM-MoE-DSA with other arguments")
    with without(model):
        expected = generate(model, prompts())
    assert torch.equal(generate(model, prompts()), expected)


# Selections of random indexers.


def reference(indexer, hidden, q_resid, embeddings):
    """Scores (B, S, T) in float64 over operands that are rounded to FP8."""
    q, weights, k = operands(indexer, hidden, q_resid, *embeddings)
    return torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", q, k).relu(), weights)


def check_scores(selected, expected, visible):
    """Of what a query sees, the best is selected, in order, apart from near ties; then any."""
    count = visible.sum(-1).clamp(max=selected.shape[-1])[..., None]
    ranks = torch.arange(selected.shape[-1]) < count
    expected = expected.masked_fill(~visible, -torch.inf)
    best = expected.topk(selected.shape[-1], dim=-1).values
    chosen = expected.gather(-1, selected.long())
    torch.testing.assert_close(chosen[ranks], best[ranks], rtol=1e-4, atol=1e-5)
    assert all(len(set(row)) == len(row) for row in selected.flatten(0, 1).tolist())


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_any_mask(additive, batch):
    """Not causal, with holes: visible tokens are never passed over for masked ones."""
    indexer = random_indexer(FEW)
    operands = arguments(indexer, batch, 30)
    visible = torch.rand(batch, 30, 30, generator=torch.Generator().manual_seed(1)) < 0.4
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min) if additive else visible
    selected = indexer(*operands, mask, None)
    assert selected.dtype is torch.int32 and selected.shape == (batch, 30, FEW)
    check_scores(selected, reference(indexer, *operands), visible)

    hidden, q_resid, (cos, sin) = operands
    cache = transformers.DynamicCache(config=indexer.config)
    for part in (slice(0, 28), slice(28, 29), slice(29, 30)):
        step = hidden[:, part], q_resid[:, part], (cos[:, part], sin[:, part]), mask[:, part, : part.stop], None
        last = indexer(*step, past_key_values=cache)
    assert torch.equal(last, selected[:, -1:])


def test_masks_broadcast():
    indexer = random_indexer(FEW)
    operands = arguments(indexer, 3, 10)
    causal = torch.ones(1, 10, 10, dtype=torch.bool).tril()
    assert torch.equal(indexer(*operands, causal, None), indexer(*operands, causal.expand(3, -1, -1), None))


def test_long_prompts_go_in_chunks(monkeypatch, launches):
    indexer = random_indexer(FEW)
    operands = *arguments(indexer, 2, 40), torch.ones(1, 40, 40, dtype=torch.bool).tril(), None
    expected = indexer(*operands)
    launches.clear()
    monkeypatch.setattr(integration, "LOGITS_AT_A_TIME", 40 * 15)
    assert torch.equal(indexer(*operands), expected)
    assert [q[0] for q, _ in launches] == [15, 15, 10] * 2


def test_selections_of_transformers():
    """Against unquantized scores."""
    indexer = random_indexer(FEW)
    operands = *arguments(indexer, 4, 60), torch.ones(1, 60, 60, dtype=torch.bool).tril(), None
    selected = indexer(*operands)
    expected = type(indexer).forward.__wrapped__(indexer, *operands)
    assert selected.dtype == expected.dtype and selected.shape == expected.shape
    chosen, best = (torch.zeros(4, 60, 60).scatter(-1, value.long(), 1) for value in (selected, expected))
    assert (chosen * best)[:, FEW:].sum() / best[:, FEW:].sum() > 0.95


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compile(backend, fresh_compiler):
    """Two steps on a static cache, as generate compiles them; with inductor only the second, of a single token."""
    indexer = random_indexer(FEW)
    hidden, q_resid, (cos, sin) = arguments(indexer, 3, 20)
    mask = torch.ones(20, 24, dtype=torch.bool).tril()[None]
    compiled = torch.compile(indexer, backend=backend, fullgraph=True)
    caches = [transformers.StaticCache(config=indexer.config, max_cache_len=24) for _ in range(2)]
    for part in (slice(0, 19), slice(19, 20)):
        step = hidden[:, part], q_resid[:, part], (cos[:, part], sin[:, part]), mask[:, part], None
        first = compiled if part.start or backend != "inductor" else indexer  # a second of g++ for each kernel
        runs = zip((first, indexer), caches, strict=True)
        ours, expected = (
            torch.zeros(3, 20, 24)[:, part].scatter(-1, run(*step, past_key_values=cache).long(), 1)
            for run, cache in runs
        )
        best = expected * mask[:, part]
        assert (ours * best).sum() / best.sum() > 0.98
    ours, expected = (integration._keys(cache.layers[0].indexer_keys.flatten(0, 1), 32) for cache in caches)
    # A compiler's own rounding may put a value on the other side of an edge of E4M3.
    assert (ours.data.float() != expected.data.float()).float().mean() < 0.01
    torch.testing.assert_close(ours.scale, expected.scale)


# Caches.


def test_keys_are_cached_in_fp8():
    model = make_model(FEW)
    with torch.no_grad():
        cache = model(prompts(), use_cache=True).past_key_values
        model(prompts(seed=1)[:, :2], past_key_values=cache)
    for layer in cache.layers:
        assert layer.indexer_keys.dtype is torch.uint8 and layer.indexer_keys.shape == (3, LENGTH + 2, 32 + 16)


def test_each_key_is_quantized_once(monkeypatch):
    rows, quantize = [], integration.quantize_1x128
    monkeypatch.setattr(integration, "quantize_1x128", lambda k: rows.append(k.shape[0]) or quantize(k))
    generate(make_model(FEW, num_hidden_layers=1), prompts())
    assert sum(rows) == 3 * (LENGTH + NEW_TOKENS - 1)


def test_a_cache_from_before():
    model = make_model(FEW)
    with torch.no_grad():
        with without(model):
            cache = model(prompts(), use_cache=True).past_key_values
        message = "cache: layer 0 has indexer keys in torch.float32, .* This cache cannot be used further"
        with pytest.raises(ValueError, match=message):
            model(prompts()[:, :1], past_key_values=cache)
    lengths = [(layer.keys.shape[2], layer.indexer_keys.shape[1]) for layer in cache.layers]
    assert lengths == [(LENGTH + 1, LENGTH), (LENGTH, LENGTH), (LENGTH, LENGTH)]


def test_buffers_from_before():
    """Of a static cache and of a decoder: neither makes new ones."""
    model = make_model(FEW)
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=40)
    with without(model), torch.no_grad():
        model(prompts(), past_key_values=cache)
        decoder.generate(prompts(), max_new_tokens=2)
    cache.reset()
    message = "Start again with a new cache or GraphDecoder"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(prompts(), past_key_values=cache)
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompts(), max_new_tokens=2)


@pytest.mark.parametrize("sizes", [{"index_n_heads": 16}, {"index_head_dim": 48}])
def test_other_sizes_stay_with_transformers(sizes, launches):
    indexer = random_indexer(FEW, **sizes)
    operands = *arguments(indexer, 2, 20), torch.ones(1, 20, 20, dtype=torch.bool).tril(), None
    cache = transformers.DynamicCache(config=indexer.config)
    expected = type(indexer).forward.__wrapped__(indexer, *operands)
    assert torch.equal(indexer(*operands, past_key_values=cache), expected)
    assert cache.layers[0].indexer_keys.dtype is torch.float32 and not launches


def test_an_indexer_called_with_other_arguments_stays_as_it_is(monkeypatch):
    cls = type(random_indexer(FEW))

    def forward(self, hidden_states, q_resid, position_embeddings, attention_mask, use_cache=False):
        return "theirs"

    unregister()
    monkeypatch.setattr(cls, "forward", forward)
    register()
    assert cls.forward is forward and "__call__" not in vars(cls)
