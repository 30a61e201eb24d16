"""Prompts in FlashAttention-3: against float64 attention, and GraphDecoder's tokens against those without it."""

from importlib.util import find_spec

import pytest
import torch

from fp8moe.decode import GraphDecoder, attention
from fp8moe.decode.attention import AttentionMetadataBuilder
from fp8moe.hf import optimize, register, report
from fp8moe.hf.fused import flash_attention_3
from tests.gpu.checks import captured
from tests.gpu.test_decode_attention import operands, reference
from tests.hf.test_fused_models import distance
from tests.transformers_models import BASE, left_padded, prompts, random_model

pytest.importorskip("transformers")

absent = find_spec(flash_attention_3.MODULE) is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(absent, reason="fa3-fwd is not installed")]

DEVICE = "cuda"
LENGTH = 1200


@pytest.fixture
def calls(monkeypatch):
    """(queries, keys) of each call that FlashAttention-3 takes."""
    found, attend = [], flash_attention_3.attend
    monkeypatch.setattr(
        flash_attention_3,
        "attend",
        lambda query, key, *others: found.append((query.shape[2], key.shape[2])) or attend(query, key, *others),
    )
    return found


@pytest.mark.parametrize("size", flash_attention_3.HEAD_SIZES)
@pytest.mark.parametrize(("key_heads", "groups"), [(4, 8), (2, 1), (1, 7)])
@pytest.mark.parametrize(("before", "new"), [(0, 2), (0, 63), (0, 1001), (1, 2), (77, 300), (1000, 129), (513, 64)])
def test_against_float64(before, new, key_heads, groups, size, calls):
    """In a cache with room after the keys, which is NaN."""
    query, key, value = operands(2, key_heads, groups, size, LENGTH, torch.bfloat16, new)
    begin = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    columns, end = begin + before, before + new
    expected = reference(query, key, value, begin, columns)
    for cache in (key, value):
        cache[:, :, end:] = float("nan")
    builder = AttentionMetadataBuilder(begin, columns, LENGTH)
    builder.next_call(before=before)
    metadata = builder.build(new, key_heads, None)

    def run():
        return attention.attend(None, query, key[:, :, :end], value[:, :, :end], metadata, scaling=size**-0.5)[0]

    results = [run() for _ in range(3)]
    graph, again = captured(run)
    graph.replay()
    assert set(calls) == {(new, end)}
    assert results[0].shape == expected.shape and results[0].dtype == torch.bfloat16
    assert all(torch.equal(result, results[0]) for result in (*results, again))
    assert (results[0].double() - expected).norm() <= 4 * torch.finfo(torch.bfloat16).eps * expected.norm()


def make_model(size, **changes):
    register()
    shape = {"hidden_size": 256, "max_position_embeddings": 512, "initializer_range": 0.05, "head_dim": size}
    experts = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 8, "num_key_value_heads": 2}
    how = {"dtype": torch.bfloat16, "experts_implementation": "fp8moe"}
    return random_model("qwen3_moe", BASE | shape | experts | changes, **how).to(DEVICE)


@torch.no_grad()
def logits_of(decoder, ids, mask=None):
    """The logits after prompts."""
    step = decoder.steps[decoder.batch_sizes[-1]]
    mask = None if mask is None else mask.bool()
    step.start(len(ids), ids.shape[1], mask, [], 0)
    return step.prefill(ids, mask)[: len(ids)].float()


@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.parametrize("size", flash_attention_3.HEAD_SIZES)
def test_a_decoder(size, chunk, calls, monkeypatch):
    """Logits are close to those without it, and the tokens of two graphs of a prompt are equal."""
    model = make_model(size)
    assert "fa3-fwd" in {row.runs_on for row in report(model)}
    how = {"batch_sizes": (3,), "max_length": 256, "prefill_chunk": chunk}
    ids = prompts(3, 117, device=DEVICE)
    masks = (None,) if chunk else (None, left_padded(ids, 5, 0, 60))
    decoder = GraphDecoder(model, **how)
    prefix = decoder.prefix(prompts(1, 33, seed=3, device=DEVICE))
    calls.clear()
    found = [logits_of(decoder, ids, mask) for mask in masks]
    assert calls
    calls.clear()
    tokens = [decoder.generate(ids, max_new_tokens=20, prefix=prefix) for _ in range(3)]
    assert calls and all(torch.equal(one, tokens[0]) for one in tokens)
    tokens = [decoder.generate(ids, max_new_tokens=20) for _ in range(4)]  # from the second on a graph reads the prompt
    assert all(torch.equal(one, tokens[0]) for one in tokens)

    monkeypatch.setattr(flash_attention_3, "_interface", lambda: None)
    assert "fa3-fwd" not in {row.runs_on for row in report(model)}
    calls.clear()
    other = GraphDecoder(model, **how)
    for logits, mask in zip(found, masks, strict=True):
        assert distance(logits, logits_of(other, ids, mask)) <= 5e-2
    same = (other.generate(ids, max_new_tokens=20) == tokens[0])[:, 117:]
    assert same.float().mean() > 0.5  # after a near tie, tokens part
    assert not calls


def test_a_model_after_optimize(calls, monkeypatch):
    model = make_model(128)
    ids = prompts(2, 117, device=DEVICE)
    changed = optimize(model)
    with torch.no_grad():
        found = model(ids).logits.float()
        assert calls == [(117, 117)] * len(model.model.layers)
        monkeypatch.setattr(flash_attention_3, "_interface", lambda: None)
        assert distance(found, model(ids).logits.float()) <= 5e-2
    changed.restore()
