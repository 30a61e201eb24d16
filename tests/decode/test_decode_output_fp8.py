"""GraphDecoder with the output layer in FP8, on the reference backend."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn

import fp8moe
from fp8moe.decode import GraphDecoder
from fp8moe.decode import decoder as decoding
from fp8moe.decode.output import OutputLayer, bytes_of_copy
from fp8moe.layers import FP8Linear, replace_linears
from tests import on_policy_cases
from tests.decode.test_decode_fp8_cache import forced_logits
from tests.decode_models import tiny_gpt_oss
from tests.transformers_models import BASE, left_padded, prompts, random_model

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = torch.float8_e4m3fn
NEW = 6
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.2}
TIED = {"tie_word_embeddings": True}
BUILD = {
    "qwen3_moe": lambda: on_policy_cases.build("qwen3_moe"),
    "tied": lambda: on_policy_cases.build("llama", sizes=TIED),
    "gpt_oss": lambda: tiny_gpt_oss(dtype=torch.bfloat16),
    "soft cap": lambda: random_model(
        "gemma2",
        BASE | SIZES | TIED | {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 0.5},
        dtype=torch.bfloat16,
    ),
    "scaled": lambda: random_model("granite", BASE | SIZES | {"logits_scaling": 8.0}, dtype=torch.bfloat16),
}


def with_own_layer_in_fp8(model):
    """A copy of the model that has an FP8Linear itself."""
    model = copy.deepcopy(model)
    if model.lm_head.weight is model.get_input_embeddings().weight:
        model.lm_head = FP8Linear.from_linear(model.lm_head)
    else:
        assert replace_linears(model, skip=("model.*",)) == ["lm_head"]
    return model


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("fuse", [True, False])
def test_logits_are_those_of_a_model_with_an_fp8_output_layer(name, fuse):
    model = BUILD[name]()
    ids = prompts(3, 20, seed=1)
    mask = left_padded(ids[:, :-NEW], 0, 9, 2).bool()
    before = model(ids).logits
    state = {key: (value.data_ptr(), value.dtype) for key, value in model.state_dict().items()}
    how = {"batch_sizes": (4,), "max_length": 32, "fuse": fuse}
    found = forced_logits(GraphDecoder(model, **how, output_dtype=FP8), ids, mask, NEW)
    assert torch.equal(found, forced_logits(GraphDecoder(with_own_layer_in_fp8(model), **how), ids, mask, NEW))
    own = forced_logits(GraphDecoder(model, **how), ids, mask, NEW)
    assert 0 < (found - own).norm() <= 0.06 * own.norm()
    assert name != "soft cap" or found.abs().max() <= 0.5
    assert torch.equal(model(ids).logits, before) and "forward" not in model.lm_head.__dict__
    if not fuse:
        assert state == {key: (value.data_ptr(), value.dtype) for key, value in model.state_dict().items()}


def test_batch_invariant_prompts_chunks_prefixes_and_requests():
    """A token has the same bits in whole prompts, chunks, after a prefix, beside others, and decoded."""
    model = BUILD["qwen3_moe"]()
    options = {"max_new_tokens": NEW, "eos_token_id": (), "return_logprobs": True}
    with fp8moe.batch_invariant():
        how = {"max_length": 64, "output_dtype": FP8}
        decoder = GraphDecoder(model, batch_sizes=(1, 3), **how)
        ids = prompts(1, 40, seed=2)
        tokens, logprobs = decoder.generate(ids, **options)
        assert not torch.equal(GraphDecoder(model, max_length=64).generate(ids, **options)[1], logprobs)
        found = GraphDecoder(model, **how, prefill_chunk=7).generate(ids, **options)
        assert torch.equal(found[0], tokens) and torch.equal(found[1], logprobs)
        found = decoder.generate(ids[:, 11:], prefix=decoder.prefix(ids[:, :11]), **options)
        assert torch.equal(found[0], tokens[:, 11:]) and torch.equal(found[1], logprobs)
        longer = decoder.generate(tokens[:, :43], **options)
        assert torch.equal(longer[0][:, :46], tokens) and torch.equal(longer[1][:, :3], logprobs[:, 3:])
        both = torch.cat([ids, prompts(2, 40, seed=3)])
        found = decoder.generate(both, attention_mask=left_padded(both, 0, 5, 33), **options)
        assert torch.equal(found[0][:1], tokens) and torch.equal(found[1][:1], logprobs)
        requests = [{"input_ids": row, **options} for row in (prompts(1, 9)[0], ids[0])]
        new, bits = dict(decoder.run(requests))[1]
        assert torch.equal(new, tokens[0, 40:]) and torch.equal(bits, logprobs[0])


@pytest.mark.parametrize("sizes", [{}, TIED], ids=["untied", "tied"])
def test_a_refit_reaches_the_copy(sizes):
    model, other = (on_policy_cases.build("llama", sizes=sizes) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(torch.rand(128, 1).bfloat16())
    how = {"max_length": 32, "output_dtype": FP8}
    options = {"max_new_tokens": NEW, "eos_token_id": (), "return_logprobs": True}
    ids = prompts(1, 9)
    decoder = GraphDecoder(model, **how)
    before = decoder.generate(ids, **options)
    addresses = [value.data_ptr() for value in decoder.capabilities.output._copy.parameters()]
    with pytest.raises(ValueError, match="lm_head.weight"):
        fp8moe.refit(model, [("lm_head.weight", torch.zeros(3, 3))])
    with pytest.raises(RuntimeError, match="are being replaced"):
        decoder.generate(ids, **options)
    fp8moe.refit(model, other)
    after, fresh = decoder.generate(ids, **options), GraphDecoder(other, **how).generate(ids, **options)
    assert torch.equal(after[0], fresh[0]) and torch.equal(after[1], fresh[1])
    assert not torch.equal(after[1], before[1])
    assert addresses == [value.data_ptr() for value in decoder.capabilities.output._copy.parameters()]
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="have moved or changed since the decoder was made"):
        decoder.generate(ids, **options)


def test_the_copy_counts_as_memory(monkeypatch):
    model = BUILD["tied"]()
    decoder = GraphDecoder(model, max_length=32, output_dtype=FP8)
    decoder.generate(prompts(1, 3), max_new_tokens=2)
    copied = sum(value.nbytes for value in decoder.capabilities.output._copy.parameters())
    assert bytes_of_copy(model.lm_head) == copied == 128 * 128 + 4
    free = decoder.stats().cache_bytes + copied
    copied = weakref.ref(decoder.capabilities.output._copy.weight)
    decoder.close()
    assert copied() is None
    monkeypatch.setattr(decoding, "free_memory", lambda device: free)
    GraphDecoder(model, max_length=32, output_dtype=FP8)
    free -= 1
    GraphDecoder(model, max_length=32)
    with pytest.raises(ValueError, match="tokens and the output layer in FP8 take .* GB"):
        GraphDecoder(model, max_length=32, output_dtype=FP8)


def test_threads_have_their_own_layers():
    """Another decoder waits; a forward of the model has its own layer."""
    model, x = BUILD["tied"](), torch.randn(3, 128).bfloat16()
    expected, first, second, found = model.lm_head(x), OutputLayer(model), OutputLayer(model), []

    def use(output):
        found.append(model.lm_head(x))
        with output.in_force():
            found.append(model.lm_head(x))

    other = threading.Thread(target=use, args=(second,))
    with first.in_force():
        in_fp8 = model.lm_head(x)
        other.start()
        other.join(0.2)
        assert other.is_alive() and torch.equal(model.lm_head(x), in_fp8)
    other.join()
    assert torch.equal(found[0], expected) and torch.equal(found[1], in_fp8) and not torch.equal(in_fp8, expected)
    assert torch.equal(model.lm_head(x), expected) and "forward" not in model.lm_head.__dict__


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def changed(change, name="qwen3_moe"):
    model = BUILD[name]()
    change(model)
    return model.eval()


def sharded(model):
    model.lm_head.weight.to_local, model.lm_head.weight.placements = None, "(Shard(dim=0),)"


def test_what_is_refused(monkeypatch):
    layer = "^output_dtype: the output layer of Qwen3MoeForCausalLM"
    expected = "^output_dtype: expected None or torch.float8_e4m3fn, got "
    refused = {
        f"{expected}str 'fp8'": (TypeError, BUILD["tied"](), "fp8"),
        f"{expected}torch.float8_e5m2": (ValueError, BUILD["tied"](), torch.float8_e5m2),
        "^output_dtype: Qwen3MoeForCausalLM has no output layer": (
            *(ValueError, changed(lambda model: setattr(model, "get_output_embeddings", lambda: None)), FP8),
        ),
        f"{layer}: expected the forward of nn.Linear, got that of OwnLinear": (
            *(TypeError, changed(lambda model: setattr(model, "lm_head", OwnLinear(128, 128).bfloat16())), FP8),
        ),
        f"{layer}: expected an nn.Linear, got torch.nn.modules.container.Sequential": (
            *(TypeError, changed(lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head))), FP8),
        ),
        f"{layer}: expected no hooks": (
            *(ValueError, changed(lambda model: model.lm_head.register_forward_hook(lambda *call: None)), FP8),
        ),
        f"{layer} is in FP8 already": (ValueError, with_own_layer_in_fp8(BUILD["qwen3_moe"]()), FP8),
        f"{layer}: expected a whole weight to quantize, got a DTensor": (ValueError, changed(sharded), FP8),
        r"^output_dtype: the output layer of LlamaForCausalLM is \(129, 128\), and FP8 needs multiples of 8": (
            *(ValueError, on_policy_cases.build("llama", sizes={"vocab_size": 129}), FP8),
        ),
    }
    with monkeypatch.context() as before_anything_runs:
        before_anything_runs.setattr(GraphDecoder, "_find_capabilities", None)
        for message, (error, model, dtype) in refused.items():
            with pytest.raises(error, match=message):
                GraphDecoder(model, max_length=16, output_dtype=dtype)
    other = nn.Linear(128, 128, dtype=torch.bfloat16)
    model = changed(lambda model: setattr(model, "get_output_embeddings", lambda: other))
    with pytest.raises(ValueError, match="^output_dtype: Qwen3MoeForCausalLM does not call its output layer"):
        GraphDecoder(model, max_length=16, output_dtype=FP8)
