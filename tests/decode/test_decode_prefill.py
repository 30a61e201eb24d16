"""How prompts are read: in chunks, after a prefix that was read once; the tokens are those of the whole prompt."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder, attention, memory, prefill, probe
from fp8moe.decode import decoder as decoder_module
from fp8moe.decode.step import Capabilities, Step
from fp8moe.runtime.jit import KernelSpec
from tests import linear_attention_models
from tests.decode_models import tiny_mixtral
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LENGTH = 64
CPU = torch.device("cpu")
KINDS = [
    name
    for name in (
        *("MixtralForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GptOssForCausalLM"),
        *("InklingForCausalLM", "MiMoV2FlashForCausalLM", "Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM"),
        *("JambaForCausalLM", "Lfm2MoeForCausalLM", "KimiLinearForCausalLM"),
    )
    if name in MODELS
]


@pytest.fixture(scope="module")
def decoder():
    return GraphDecoder(tiny_mixtral(sliding_window=6), batch_sizes=(1, 4), max_length=MAX_LENGTH)


@pytest.fixture
def probed_once(monkeypatch):
    """All decoders of a model have the capabilities that the first has found."""
    known, find = {}, decoder_module.find_capabilities

    def find_once(model, *others):
        if model not in known:
            known[model] = find(model, *others)
        return known[model]

    monkeypatch.setattr(decoder_module, "find_capabilities", find_once)


@pytest.mark.parametrize("name", KINDS)
def test_chunks_change_no_tokens(name, probed_once):
    model = linear_attention_models.build(name)
    asked = []
    for batch, padding in ((1, [0]), (3, [4, 0, 16])):
        ids = prompts(batch, 17, seed=batch)
        mask = left_padded(ids, *padding)
        tokens = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
        asked.append((ids, mask, tokens))
    for chunk in (1, 5, 16):
        decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH, prefill_chunk=chunk)
        assert decoder.capabilities.chunked_prefill == (name != "JambaForCausalLM")
        for ids, mask, expected in asked:
            with reads(model) as calls:
                found = decoder.generate(ids, attention_mask=mask, max_new_tokens=6)
            assert torch.equal(found, expected), chunk
            assert calls[0]["input_ids"].shape[1] == (max(2, chunk) if decoder.capabilities.chunked_prefill else 17)
            if "logits_to_keep" in calls[0]:
                assert all(call["logits_to_keep"] == 1 for call in calls if call["input_ids"].shape[1] > 1)


@contextmanager
def reads(model):
    """The arguments of its calls."""
    calls = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def test_a_model_that_forgets_between_chunks_reads_prompts_in_one_piece():
    model = MODELS["JambaForCausalLM"].build()
    with pytest.raises(ValueError, match="JambaForCausalLM forgets its states of linear attention when it reads sever"):
        probe.check_step(model, CPU, False, Capabilities(chunked_prefill=True))
    capabilities, refusals = probe.find_capabilities(model, CPU, False, None)
    assert capabilities == Capabilities(ragged=True)
    assert list(refusals) == ["chunked_prefill"] and "forgets its states" in refusals["chunked_prefill"]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_padded_prompts_move_left_where_kernels_read_the_cache(batch_invariant):
    model = tiny_mixtral(head_dim=64).bfloat16()
    ids, lengths = prompts(3, 21), [21, 1, 16]
    step = Step(model, 4, MAX_LENGTH, CPU, Capabilities(attention.NAME, ragged=True, chunked_prefill=True))
    mask = left_padded(ids, *(21 - length for length in lengths))
    with torch.no_grad(), fp8moe.batch_invariant(batch_invariant):
        step.start(3, 21, mask, [], 0)
        logits = step.prefill(ids, mask)
        if batch_invariant:
            assert step.columns.tolist() == [21] * 4 and step.begin.tolist() == [0, 20, 5, 0]
            return
        assert step.columns.tolist() == [*lengths, 21] and not step.begin.any() and step.mask.all()
        for _ in range(4):
            for row, length in enumerate(lengths):
                expected = model(ids[row : row + 1, -length:]).logits[0, -1]
                assert torch.nn.functional.cosine_similarity(logits[row].float(), expected.float(), dim=0) > 0.999
            step.accept(logits)
            ids = torch.cat([ids, step.tokens[:3]], dim=1)
            lengths = [length + 1 for length in lengths]
            logits = step.read()


def test_padded_prompts_of_a_model_that_does_not_call_its_output_layer(monkeypatch):
    model = tiny_mixtral(head_dim=64).bfloat16()
    ids, mask = prompts(2, 9), torch.arange(9) >= torch.tensor([[0], [4]])
    found = []
    for head in (model.lm_head, torch.nn.Identity()):
        monkeypatch.setattr(model, "get_output_embeddings", lambda head=head: head)
        step = Step(model, 2, MAX_LENGTH, CPU, Capabilities(attention.NAME, ragged=True, chunked_prefill=True))
        with torch.no_grad():
            step.start(2, 9, mask, [], 0)
            found.append(step.prefill(ids, mask))
    assert found[0].shape == found[1].shape
    assert torch.nn.functional.cosine_similarity(*(logits.float() for logits in found)).min() > 0.999


GPU, GIB = torch.device("cuda"), 2**30


def columns(monkeypatch, free, batch=1, end=100_000, mask=False, ranks=1, copied=0, **changes):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    config = transformers.AutoConfig.for_model("qwen3_moe", **changes)
    model = SimpleNamespace(config=config, dtype=torch.bfloat16)
    return memory.columns_at_a_time(model, batch, end, GPU, masked=mask, ranks=ranks, copied=copied)


def test_chunks_follow_the_memory(monkeypatch):
    assert columns(monkeypatch, 40 * GIB, batch=8, end=8000) == 8000  # in one piece
    assert columns(monkeypatch, 40 * GIB) == memory.MOST_TOKENS
    assert columns(monkeypatch, 40 * GIB, batch=8) == memory.MOST_TOKENS // 8
    some = [columns(monkeypatch, free * GIB) for free in (0, 0.25, 0.5, 1)]
    assert memory.LEAST_COLUMNS == some[0] < some[1] < some[2] < some[3] < memory.MOST_TOKENS
    assert columns(monkeypatch, GIB, hidden_size=8192) < some[3]
    assert columns(monkeypatch, GIB, ranks=8) < columns(monkeypatch, GIB, ranks=2) < some[3]
    assert columns(monkeypatch, GIB, end=10_000, mask=True) < columns(monkeypatch, GIB, end=10_000)
    assert columns(monkeypatch, GIB, copied=100_000) < some[3]
    llama = transformers.AutoConfig.for_model("llama")
    model = SimpleNamespace(config=llama, dtype=torch.float32)
    assert memory.columns_at_a_time(model, 1, 77, CPU, masked=True) == 77


def test_other_threads_may_make_plans_while_kernels_are_loaded(monkeypatch):
    class Noted:
        """Of which another plan is made while it is read."""

        def variants(self, rows, sms):
            known[object()] = 1
            return {KernelSpec("x.cu", "found")}

    known, loaded = {Noted(): 1, Noted(): 1}, []
    monkeypatch.setattr(prefill, "families", known)
    monkeypatch.setattr(prefill, "num_sms", lambda index: 132)
    monkeypatch.setattr(prefill, "load_all", loaded.extend)
    prefill.compile_for_prompts(0, 64)
    assert [spec.name for spec in loaded] == ["found"] and len(known) == 4


def whole(prefix, ids, mask=None):
    """The prompts with their prefix, without padding: one tensor for each."""
    rows = ids if mask is None else [row[shown.bool()] for row, shown in zip(ids, mask, strict=True)]
    return [torch.cat([prefix, row])[None] for row in rows]


def check_prefix(decoder, prefix, ids, mask=None, **options):
    options = {"max_new_tokens": 8} | options
    handle = decoder.prefix(prefix)
    assert handle.length == len(prefix)
    expected = [decoder.generate(prompt, **options)[0, prompt.shape[1] :] for prompt in whole(prefix, ids, mask)]
    for _ in range(2):
        found = decoder.generate(ids, attention_mask=mask, prefix=handle, **options)
        assert torch.equal(found[:, : ids.shape[1]], ids)
        for row, tokens in enumerate(expected):
            assert torch.equal(found[row, ids.shape[1] :], tokens)


@pytest.mark.parametrize("name", KINDS)
def test_a_prefix_equals_the_whole_prompt(name):
    decoder = GraphDecoder(linear_attention_models.build(name), batch_sizes=(1, 3), max_length=MAX_LENGTH)
    if not decoder.capabilities.chunked_prefill:
        with pytest.raises(ValueError, match=f"^model: {name} reads a prompt in one piece only"):
            decoder.prefix(prompts(1, 7))
        return
    check_prefix(decoder, prompts(1, 14, 1)[0], prompts(2, 5, 2))
    check_prefix(decoder, prompts(1, 1, 1)[0], prompts(1, 9, 2))


@pytest.mark.parametrize("length", [1, 5, 14])
@pytest.mark.parametrize("padding", [[0, 0, 0, 0], [0, 4, 8, 5], [2, 3, 4, 5], [8, 8, 8, 8]])
def test_prompts_of_different_lengths_after_a_prefix(decoder, length, padding):
    """Shorter than the prefix, longer, and of its length."""
    ids = prompts(4, 9, 2)
    check_prefix(decoder, prompts(1, length, 1)[0], ids, left_padded(ids, *padding))
    check_prefix(decoder, prompts(1, length, 1)[0], ids[:1], left_padded(ids[:1], padding[1]))


def test_a_prefix_in_chunks_with_penalties_and_samples():
    decoder = GraphDecoder(tiny_mixtral(), batch_sizes=(3,), max_length=MAX_LENGTH, prefill_chunk=4)
    ids = prompts(3, 9, 2)
    mask = left_padded(ids, 0, 4, 7)
    check_prefix(decoder, prompts(1, 14, 1)[0], ids, mask, repetition_penalty=1.5, max_new_tokens=20)
    check_prefix(decoder, prompts(1, 14, 1)[0], ids, mask, do_sample=True, seed=3, repetition_penalty=1.5, top_k=9)


def test_what_a_prefix_needs():
    decoder = GraphDecoder(tiny_mixtral(), batch_sizes=(2,), max_length=MAX_LENGTH)
    other = GraphDecoder(decoder.model, max_length=MAX_LENGTH)
    ids, prefix = prompts(2, 6), decoder.prefix(prompts(1, 30))

    def generate(decoder=decoder, **options):
        return decoder.generate(ids, **{"prefix": prefix, "max_new_tokens": 4} | options)

    with pytest.raises(ValueError, match="^max_new_tokens: 30 tokens of prefix, 6 of prompt and 29 new ones .* 64"):
        generate(max_new_tokens=29)
    assert generate(max_new_tokens=28).shape == (2, 34)
    with pytest.raises(ValueError, match="^prefix: it was made by another GraphDecoder"):
        other.generate(ids[:1], prefix=prefix, max_new_tokens=4)
    amid = torch.ones_like(ids)
    amid[0, 3] = 0
    with pytest.raises(ValueError, match="^attention_mask: after a prefix expected zeros on the left only"):
        generate(attention_mask=amid)
    for wrong, exception, message in (
        (prompts(2, 6), ValueError, "^input_ids: expected one prefix, got a batch of 2"),
        (prompts(1, 63), ValueError, "^input_ids: 63 tokens leave no room for others in max_length, 64"),
        (prompts(1, 6).float(), TypeError, "^input_ids: expected integers"),
        ([3, 4], TypeError, r"^input_ids: expected a torch\.Tensor"),
        (torch.tensor([3, 128]), ValueError, "^input_ids: expected tokens between 0 and 127, got 128"),
        (prompts(1, 0), ValueError, "^input_ids: .* neither of them 0"),
    ):
        with pytest.raises(exception, match=message):
            decoder.prefix(wrong)
    with pytest.raises(TypeError, match="^prefix: "):
        generate(prefix=prompts(1, 30))
    with torch.no_grad():
        decoder.model.lm_head.weight.mul_(2)
    with pytest.raises(ValueError, match="^prefix: the model's weights have moved or changed since it was made"):
        generate()
    decoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        decoder.prefix(prompts(1, 6))


def test_a_prefix_does_not_outlive_what_is_added_to_the_scores_of_routers():
    decoder = GraphDecoder(MODELS["DeepseekV3ForCausalLM"].build(), max_length=MAX_LENGTH)
    prefix, ids = decoder.prefix(prompts(1, 7)), prompts(1, 6)
    decoder.generate(ids, prefix=prefix, max_new_tokens=4)
    decoder.model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").add_(torch.arange(8))
    with pytest.raises(ValueError, match="^prefix: the model's weights have moved or changed since it was made"):
        decoder.generate(ids, prefix=prefix, max_new_tokens=4)


@pytest.mark.parametrize("name", ["InklingForCausalLM", "Qwen3NextForCausalLM"])
def test_prompts_that_cannot_be_padded_after_a_prefix(name):
    decoder = GraphDecoder(MODELS[name].build(), batch_sizes=(2,), max_length=MAX_LENGTH)
    ids = prompts(2, 6)
    with pytest.raises(ValueError, match=f"^prefix: {name} can continue it with prompts of one length only"):
        mask = left_padded(ids, 0, 3)
        decoder.generate(ids, attention_mask=mask, prefix=decoder.prefix(prompts(1, 7)), max_new_tokens=4)


def test_a_prefix_holds_its_own_tokens_only(decoder):
    prefix = decoder.prefix(prompts(1, 7))
    kept = [tensor for layer in prefix._cache.layers for tensor in (layer.keys, layer.values)]
    assert all(tensor.shape[0] == 1 and tensor.shape[2] == 7 for tensor in kept) and kept
    decoder.generate(prompts(1, 3), max_new_tokens=3)  # the step's cache is another
    before = [tensor.clone() for tensor in kept]
    decoder.generate(prompts(4, 3), prefix=prefix, max_new_tokens=3)
    assert all(map(torch.equal, kept, before))
