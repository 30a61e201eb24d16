"""Prompts in FlashAttention-3, with a stand-in for it on the CPU: which calls it gets, and that results stay."""

import math
import sys
from types import ModuleType

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder, attention
from fp8moe.decode.attention import AttentionMetadataBuilder
from fp8moe.hf import optimize, report
from fp8moe.hf.fused import flash_attention_3
from tests.decode_models import fp8moe_attention_on_cpu, kernels_in_float32, tiny_gpt_oss, tiny_mixtral
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, BEFORE, NEW = 40, 9, 7
KEY_HEADS, HEADS = 2, 6


@pytest.fixture
def here(monkeypatch):
    """A CPU counts as a GPU with FlashAttention-3's kernels."""
    monkeypatch.setattr(flash_attention_3, "_has_kernels", lambda like: True)
    flash_attention_3._interface.cache_clear()
    yield
    flash_attention_3._interface.cache_clear()


@pytest.fixture
def calls(here, monkeypatch):
    """What the stand-in for fa3-fwd is asked for: (queries, keys) of each call."""
    found = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        assert causal and q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3] == v.shape[3]
        found.append((q.shape[1], k.shape[1]))
        scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
        keys, values = (x.float().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) * scale
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, values).to(q.dtype), None

    module = ModuleType(flash_attention_3.MODULE)
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, flash_attention_3.MODULE, module)
    return found


@pytest.fixture
def absent(here, monkeypatch):
    monkeypatch.setitem(sys.modules, flash_attention_3.MODULE, None)


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """Prompts and steps of GraphDecoder as on a GPU, in float32, in which tokens stay."""
    fp8moe_attention_on_cpu(monkeypatch)
    monkeypatch.setattr(flash_attention_3, "DTYPES", (torch.float32,))
    monkeypatch.setattr(flash_attention_3, "HEAD_SIZES", (16, 32, 64))
    return kernels_in_float32(monkeypatch)


def attended(before=0, window=None, sinks=None, dtype=torch.bfloat16, size=64, known=True):
    """Attention of NEW tokens after ``before`` cached ones, in a cache with room after them."""
    generator = torch.Generator().manual_seed(size)
    query = torch.randn(2, NEW, HEADS, size, generator=generator).to(dtype).transpose(1, 2)
    key, value = torch.randn(2, 2, KEY_HEADS, LENGTH, size, generator=generator).to(dtype)
    begin = torch.zeros(2, dtype=torch.int64)
    builder = AttentionMetadataBuilder(begin, begin + before, LENGTH)
    builder.next_call(before=before if known else None)
    end = before + NEW
    metadata = builder.build(NEW, KEY_HEADS, window)
    return attention.attend(None, query, key[:, :, :end], value[:, :, :end], metadata, size**-0.5, s_aux=sinks)[0]


@pytest.mark.parametrize("size", flash_attention_3.HEAD_SIZES)
@pytest.mark.parametrize("before", [0, BEFORE])
@pytest.mark.parametrize("window", [None, BEFORE + NEW])
def test_results_are_those_of_other_attention(calls, before, window, size):
    found = attended(before, window, size=size)
    assert calls == [(NEW, before + NEW)]
    expected = attended(before, window, size=size, known=False)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=4e-3)


STAY = {
    "padding": {"known": False},
    "sinks": {"sinks": torch.zeros(HEADS)},
    "a shorter window": {"window": NEW - 1},
    "a window shorter than all": {"before": BEFORE, "window": BEFORE + NEW - 1},
    "float16": {"dtype": torch.float16},
    "a head size": {"size": 80},
}


@pytest.mark.parametrize("name", STAY)
def test_calls_that_it_does_not_take_keep_their_bits(name, calls, monkeypatch):
    found = attended(**STAY[name])
    assert not calls
    monkeypatch.setattr(flash_attention_3, "_has_kernels", lambda like: False)
    assert torch.equal(found, attended(**STAY[name]))


def test_batch_invariant_calls_keep_their_bits(calls, monkeypatch):
    with fp8moe.batch_invariant():
        found = attended()
        monkeypatch.setattr(flash_attention_3, "_has_kernels", lambda like: False)
        assert torch.equal(found, attended()) and not calls


def test_without_the_package_calls_keep_their_bits(absent, monkeypatch):
    found = [attended(before) for before in (0, BEFORE)]
    monkeypatch.setattr(flash_attention_3, "_has_kernels", lambda like: False)
    assert all(torch.equal(one, attended(before)) for one, before in zip(found, (0, BEFORE), strict=True))


def test_no_gradients_no_tracing_and_no_mixed_heads(calls, monkeypatch):
    x = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
    assert flash_attention_3.serves(x, x, x)
    assert not flash_attention_3.serves(x, x, x.clone().requires_grad_())
    assert not flash_attention_3.serves(x, x, torch.zeros(1, 2, 4, 128, dtype=torch.bfloat16))
    assert not flash_attention_3.serves(x, x, x.float())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not flash_attention_3.serves(x, x, x)


def test_a_cpu_has_no_kernels():
    x = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
    assert not flash_attention_3.serves(x, x, x)


@pytest.mark.parametrize("fuse", [True, False])
def test_tokens_of_a_decoder(calls, flash_on_cpu, fuse):
    """Whole prompts, padded ones, chunks, and prompts after a prefix."""
    model = tiny_mixtral()
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=LENGTH, fuse=fuse)
    chunked = GraphDecoder(model, batch_sizes=(1,), max_length=LENGTH, fuse=fuse, prefill_chunk=5)
    assert decoder.attention == "flash"
    layers = len(model.model.layers)
    ids, system = prompts(3, 13, seed=1), prompts(1, BEFORE, seed=2)

    def check(decoder, ids, mask, expected):
        calls.clear()
        found = decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW)
        assert torch.equal(found, model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False))
        assert calls == [shape for shape in expected for _ in range(layers)]

    ones = torch.ones_like(ids)
    check(decoder, ids, ones, [(13, 13)])
    check(decoder, ids, left_padded(ids, 4, 0, 1), [(13, 13)])
    calls.clear()
    ((_, found),) = chunked.run([{"input_ids": ids[0], "max_new_tokens": NEW}])
    assert torch.equal(found, model.generate(ids[:1], max_new_tokens=NEW, do_sample=False)[0, 13:])
    assert calls == [shape for shape in [(5, 5), (5, 10), (3, 13)] for _ in range(layers)]
    prefix = decoder.prefix(system)
    calls.clear()
    found = decoder.generate(ids, max_new_tokens=NEW, prefix=prefix)
    own = model.generate(torch.cat([system.expand(3, -1), ids], 1), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found[:, -NEW:], own[:, -NEW:])
    assert calls == [(13, BEFORE + 13)] * layers


def test_models_after_optimize(calls, flash_on_cpu):
    model = MODELS["Qwen3MoeForCausalLM"].build()
    ids = prompts(2, 13)
    how = {"max_new_tokens": NEW, "do_sample": False}
    padding = {"attention_mask": left_padded(ids, 4, 0)}
    with torch.no_grad():
        before = model(ids).logits
        tokens, padded = model.generate(ids, **how), model.generate(ids, **padding, **how)
        assert not calls
        changed = optimize(model)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
        assert calls == [(13, 13)] * 2
        calls.clear()
        assert torch.equal(model.generate(ids, **how), tokens) and calls == [(13, 13)] * 2
        calls.clear()
        assert torch.equal(model.generate(ids, **padding, **how), padded)
        model.set_attn_implementation("eager")
        model(ids)
        model.set_attn_implementation("sdpa")
        with fp8moe.batch_invariant():
            model(ids)
        changed.restore()
        model(ids)
    assert not calls


@pytest.mark.parametrize("line", ["raise ImportError('undefined symbol: _ZN3c104cuda')", "import no_such_part_of_fa3"])
def test_a_broken_installation_is_told(line, here, flash_on_cpu, tmp_path, monkeypatch):
    (tmp_path / f"{flash_attention_3.MODULE}.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    told = pytest.raises(
        RuntimeError, match="^fa3-fwd is installed, but cannot be imported .*(_ZN3c104cuda|no_such_part)"
    )
    model = tiny_mixtral()
    with told:
        GraphDecoder(model, max_length=LENGTH)
    with told:
        report(model)
    optimize(model)
    with told, torch.no_grad():
        model(prompts(1, 5))


# The report.


def of_attention(model):
    return {row[2:] for row in report(model) if row.module_class.endswith("Attention")}


def test_the_report_says_which_attention_prompts_take(calls):
    model = tiny_mixtral(head_dim=64).bfloat16()
    taken = ("fa3-fwd", "prompts run in FlashAttention-3, unless they are longer than a sliding window")
    assert of_attention(model) == {taken}
    refused = "prompts do not run in FlashAttention-3: "
    with fp8moe.batch_invariant():
        assert of_attention(model) == {("fp8moe", refused + "results are batch invariant")}
    assert of_attention(model.half()) == {("PyTorch", refused + "it does not take torch.float16")}
    assert of_attention(tiny_mixtral().bfloat16()) == {("PyTorch", refused + "it does not take heads of 16 values")}
    assert of_attention(tiny_gpt_oss()) == {("PyTorch", refused + "its heads have sinks")}
    latent = MODELS["DeepseekV3ForCausalLM"].build()
    assert of_attention(latent) == {("PyTorch", refused + "its keys and values have two sizes")}


def test_the_report_says_that_the_package_is_missing(absent):
    reason = "prompts do not run in FlashAttention-3: fa3-fwd is not installed"
    assert of_attention(tiny_mixtral(head_dim=64).bfloat16()) == {("PyTorch", reason)}


def test_the_report_on_a_cpu():
    reason = "prompts do not run in FlashAttention-3: it does not run on cpu"
    assert of_attention(tiny_mixtral(head_dim=64).bfloat16()) == {("PyTorch", reason)}
