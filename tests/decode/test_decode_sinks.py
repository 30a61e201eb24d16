"""GPT-OSS in GraphDecoder as on a GPU: sinks and windows in the kernels, in float32 by their references."""

import pytest
import torch

from fp8moe.decode import GraphDecoder, attention
from tests.decode_models import fp8moe_attention_on_cpu, kernels_in_float32, tiny_gpt_oss
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, NEW = 6, 14


@pytest.fixture(scope="module")
def model():
    return tiny_gpt_oss()


@pytest.fixture
def called(monkeypatch):
    fp8moe_attention_on_cpu(monkeypatch)
    return kernels_in_float32(monkeypatch)


def generated(model, ids, mask=None, new=NEW):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)


@pytest.mark.parametrize("chunk", [None, 5])
def test_equals_generate(model, called, chunk):
    """Prompts and answers shorter and longer than the window, padded or not, in a batch with copies of a row."""
    decoder = GraphDecoder(model, batch_sizes=(1, 4), max_length=40, prefill_chunk=chunk)
    assert decoder.attention == "flash" and decoder.capabilities.ragged and decoder.capabilities.chunked_prefill
    for length, padding in ((1, [0]), (WINDOW, [0]), (17, [0, 0]), (20, [4, 0, 16]), (12, [0, 1, 11, 3])):
        ids = prompts(len(padding), length, seed=length)
        mask = left_padded(ids, *padding)
        expected = generated(model, ids, mask)
        assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW), expected), length
    assert called == {"one, appended", "several"}


def test_after_a_prefix(model, called):
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=40)
    for length in (3, 11):
        system, ids = prompts(1, length, seed=7), prompts(3, 9, seed=length)
        mask = left_padded(ids, 4, 0, 8)
        found = decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW, prefix=decoder.prefix(system))
        for row, shown, answer in zip(ids, mask.bool(), found, strict=True):
            expected = generated(model, torch.cat([system[0], row[shown]])[None])
            assert torch.equal(answer[9:], expected[0, -NEW:])


def test_requests_of_their_own_lengths(model, called):
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=40)
    lengths = [(2, 9), (19, 3), (7, 20), (6, 1), (11, 14), (1, 25), (15, 8)]
    asked = [{"input_ids": prompts(1, length, seed=length)[0], "max_new_tokens": new} for length, new in lengths]
    found = dict(decoder.run(asked))
    for index, request in enumerate(asked):
        ids, new = request.values()
        assert torch.equal(found[index], generated(model, ids[None], new=new)[0, len(ids) :]), index


def test_a_model_whose_attention_lacks_its_sinks_is_noticed(model, called, monkeypatch):
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args, s_aux, **how: attend(*args, **how))
    decoder = GraphDecoder(model, max_length=40)
    assert decoder.attention.startswith("eager: model: with a static cache the logits of GptOssForCausalLM are not")
