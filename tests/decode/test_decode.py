"""GraphDecoder without a graph: the CPU runs the same step that a GPU captures."""

import copy
import itertools
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from fp8moe import replace_linears
from fp8moe.decode import GraphDecoder, NaNLogits, scheduler, stats
from fp8moe.decode import decoder as decoding
from fp8moe.decode.request import Options, end_tokens
from fp8moe.decode.scheduler import STEPS_PER_END_CHECK
from fp8moe.decode.stats import Stats
from fp8moe.decode.step import Step
from tests.decode_models import LateReadback
from tests.linear_attention_models import build
from tests.transformers_models import BASE, MLA, left_padded, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = BASE | {"hidden_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2}
MODELS = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_key_value_heads": 2},
    "mixtral-sliding": {
        "model_type": "mixtral",
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_key_value_heads": 2,
        "sliding_window": 6,
    },
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v3": MLA,
    # Many heads: the indexer's scores, sums of relu over them, must not tie at zero.
    "deepseek_v32": MLA | {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 16},
    "llama": {"intermediate_size": 96},
}
CASES = [(name, "sdpa") for name in MODELS] + [(name, "eager") for name in ("mixtral-sliding", "deepseek_v32")]


def make_model(name, **changes):
    options = SHAPE | MODELS[name] | changes
    return random_model(options.pop("model_type", name), options)


@pytest.fixture(scope="module")
def model():
    return make_model("mixtral")


@pytest.fixture(scope="module")
def decoder(model):
    return GraphDecoder(model, batch_sizes=(1, 4), max_length=40)


def expected(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, **options)


def padded(ids, *padding):
    return ids.masked_fill(left_padded(ids, *padding) == 0, 0)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_equals_generate(name, attention):
    model = make_model(name, attn_implementation=attention)
    decoder = GraphDecoder(model, batch_sizes=(1, 4), max_length=40)
    for batch, padding in ((1, [0]), (3, [4, 0, 9]), (4, [0, 1, 2, 3])):
        ids = prompts(batch, 12, seed=batch)
        mask = left_padded(ids, *padding)
        assert torch.equal(
            decoder.generate(ids, attention_mask=mask, max_new_tokens=12), expected(model, ids, mask, max_new_tokens=12)
        )


def test_prompts_may_differ_from_call_to_call(model, decoder):
    for seed, (batch, length) in enumerate([(1, 3), (1, 20), (2, 20), (1, 1), (4, 5), (1, 3)]):
        ids = prompts(batch, length, seed)
        assert torch.equal(decoder.generate(ids, max_new_tokens=7), expected(model, ids, max_new_tokens=7))


def test_without_and_with_a_mask_of_ones(model, decoder):
    ids = prompts(3, 9)
    expected = decoder.generate(ids, max_new_tokens=8)
    assert torch.equal(decoder.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8), expected)
    assert torch.equal(decoder.generate(ids.int(), max_new_tokens=8), expected)


def test_a_mask_of_ones_is_no_padding(model, monkeypatch):
    """As tokenizers give it with one prompt: what is quicker without padding is so then."""
    decoder, padded, read = GraphDecoder(model, max_length=40, prefill_chunk=4), [], Step.read_several

    def noted(step, tokens, start, before, has_padding):
        padded.append(has_padding)
        return read(step, tokens, start, before, has_padding)

    monkeypatch.setattr(Step, "read_several", noted)
    ids = prompts(1, 9)
    for mask in (None, torch.ones_like(ids), torch.ones(1, 9, dtype=torch.bool), left_padded(ids, 2)):
        padded.clear()
        decoder.generate(ids, attention_mask=mask, max_new_tokens=2)
        assert padded == [mask is not None and not mask.all()] * 3


@pytest.mark.parametrize("eos", [None, 5, 0])
def test_pad_tokens_without_a_mask(model, decoder, eos):
    """They are padding, as for model.generate, also amid a prompt; but not if they are the end token."""
    left, amid = padded(prompts(3, 12), 4, 0, 9), prompts(3, 12)
    amid[0, 5] = amid[2, 3:6] = 0
    for ids in (left, amid):
        expected = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=eos, pad_token_id=0)
        out = decoder.generate(ids, max_new_tokens=8, eos_token_id=() if eos is None else eos, pad_token_id=0)
        assert torch.equal(out, expected)
        unmasked = decoder.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
        assert eos == 0 or not torch.equal(out, unmasked)
    assert torch.equal(
        decoder.generate(left, max_new_tokens=8), model.generate(left, do_sample=False, max_new_tokens=8)
    )


def test_flash_attention_wants_padding_on_the_left(model, decoder, monkeypatch):
    monkeypatch.setattr(decoder, "attention", "flash")
    left, amid = padded(prompts(3, 12), 4, 0, 9), prompts(3, 12)
    amid[0, 5] = 0
    assert decoder.generate(left, max_new_tokens=2, pad_token_id=0).shape == (3, 14)
    with pytest.raises(ValueError, match="zeros on the left only, got some between ones"):
        decoder.generate(amid, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match="zeros on the left only, got some between ones"):
        decoder.generate(amid, attention_mask=(amid != 0).long(), max_new_tokens=2)


ONE, SEVERAL = 9, [9, 70]


def test_every_option_is_documented_and_others_are_refused(decoder):
    text = GraphDecoder.generate.__doc__
    assert [name for name in Options.__annotations__ if not re.search(rf"\b{name}\b", text)] == []
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(TypeError, match="unexpected keyword argument 'beams'"):
            call(prompts(1, 3), max_new_tokens=2, beams=2)
        with pytest.raises(TypeError, match="missing a required argument: 'max_new_tokens'"):
            call(prompts(1, 3))


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (np.int64(ONE), ONE),
        (np.array(ONE), ONE),
        (torch.tensor(ONE), ONE),
        (torch.tensor([ONE]), [ONE]),
        (np.array(SEVERAL, dtype=np.uint16), SEVERAL),
        (torch.tensor(SEVERAL), SEVERAL),
        ((np.int32(SEVERAL[0]), torch.tensor(SEVERAL[1])), SEVERAL),
        (set(SEVERAL), SEVERAL),
    ],
)
def test_integers_of_any_kind(model, given, plain):
    decoder = GraphDecoder(model, batch_sizes=np.array([1]), max_length=torch.tensor(30))
    ends, expected = (end_tokens(128, tokens, None, model.generation_config)[0] for tokens in (given, plain))
    assert sorted(ends) == sorted(expected) and all(type(end) is int for end in ends)
    free = decoder.generate(prompts(1, 9), max_new_tokens=np.int64(8))
    end = free[0, 12]
    assert torch.equal(
        decoder.generate(prompts(1, 9), max_new_tokens=torch.tensor(8), eos_token_id=end, pad_token_id=np.int8(1)),
        decoder.generate(prompts(1, 9), max_new_tokens=8, eos_token_id=int(end), pad_token_id=1),
    )


def test_threads_take_turns(model, decoder):
    calls = [prompts(1 + seed % 4, 3 + seed % 5, seed) for seed in range(30)]
    expected = [decoder.generate(ids, max_new_tokens=6) for ids in calls]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda ids: decoder.generate(ids, max_new_tokens=6), calls))
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * 30


def test_training_mode_is_refused_at_each_call():
    model = make_model("mixtral", attention_dropout=0.5)
    decoder = GraphDecoder(model, max_length=40)
    before = decoder.generate(prompts(1, 9), max_new_tokens=8)
    model.train()
    with pytest.raises(ValueError, match=r"^model: call model\.eval\(\) first, it is in training mode"):
        decoder.generate(prompts(1, 9), max_new_tokens=8)
    model.eval()
    model.model.layers[1].train()
    with pytest.raises(ValueError, match=r"first, model\.layers\.1 is in training mode"):
        decoder.generate(prompts(1, 9), max_new_tokens=8)
    model.eval()
    assert torch.equal(decoder.generate(prompts(1, 9), max_new_tokens=8), before)


@pytest.mark.parametrize("several", [False, True])
def test_stops_at_the_end_token(model, decoder, several):
    ids = prompts(3, 9)
    free = decoder.generate(ids, max_new_tokens=20)[:, 9:]
    ends = [int(free[0, 3]), int(free[1, 6]), int(free[2, 9])] if several else int(free[0, 3])
    out = decoder.generate(ids, max_new_tokens=20, eos_token_id=ends, pad_token_id=1)
    assert torch.equal(out, expected(model, ids, max_new_tokens=20, eos_token_id=ends, pad_token_id=1))
    if several:
        assert out.shape[1] < 29, "it stopped early"


@pytest.mark.parametrize("steps_to_end", [1, 7, 8, 9])
def test_noticing_the_end_late_changes_nothing(model, monkeypatch, steps_to_end):
    ids = prompts(1, 4, seed=5)
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=100)
    free = decoder.generate(ids, max_new_tokens=steps_to_end + 1)[0, 4:].tolist()
    end = free[-1]
    expected = free[: free.index(end) + 1]
    monkeypatch.setattr(scheduler, "Readback", LateReadback)
    replays, replay = [], decoder.steps[2].replay
    monkeypatch.setattr(decoder.steps[2], "replay", lambda: replays.append(1) or replay())
    for _ in range(2):
        replays.clear()
        out = decoder.generate(ids, max_new_tokens=90, eos_token_id=end)
        assert out[0, 4:].tolist() == expected
        assert len(replays) <= steps_to_end + 2 * STEPS_PER_END_CHECK


def test_end_and_pad_tokens_of_the_generation_config():
    model = make_model("mixtral")
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=40)
    ids = prompts(2, 9)
    free = decoder.generate(ids, max_new_tokens=16)
    model.generation_config.eos_token_id = [int(free[0, 11]), int(free[1, 14])]
    model.generation_config.pad_token_id = None
    assert torch.equal(decoder.generate(ids, max_new_tokens=16), expected(model, ids, max_new_tokens=16))
    assert torch.equal(decoder.generate(ids, max_new_tokens=16, eos_token_id=()), free)


def test_fills_the_cache_to_its_end(model):
    decoder = GraphDecoder(model, max_length=16)
    ids = prompts(1, 10)
    assert torch.equal(decoder.generate(ids, max_new_tokens=6), expected(model, ids, max_new_tokens=6))


@pytest.mark.parametrize("build", [partial(make_model, "mixtral"), partial(build, "Qwen3NextForCausalLM")])
def test_nan_in_one_call_does_not_reach_the_next(build):
    model = build()
    decoder = GraphDecoder(model, max_length=40)
    ids = prompts(1, 9)
    before = decoder.generate(ids, max_new_tokens=8)
    weight = model.model.embed_tokens.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(NaNLogits, match=r"^model: its logits became NaN in sequences \[0\]"):
            decoder.generate(prompts(1, 30), max_new_tokens=8)
        weight.copy_(kept)
    assert torch.equal(decoder.generate(ids, max_new_tokens=8), before)


def test_inference_mode_and_grad_mode_mix(model):
    with torch.inference_mode():
        decoder = GraphDecoder(model, max_length=40)
        first = decoder.generate(prompts(1, 9), max_new_tokens=8)
    second = decoder.generate(prompts(1, 9), max_new_tokens=8)
    assert torch.equal(first, second) and not second.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_nothing_in_the_step_goes_through_the_host(name, monkeypatch):
    """What a capture would refuse: the length, the mask and the tokens may not come from Python."""
    decoder = GraphDecoder(make_model(name), max_length=40)
    step = decoder.steps[1]
    used = []

    def spy(owner, method):
        original = getattr(owner, method)

        def call(*args, **kw):
            if not sys._getframe(1).f_code.co_filename.endswith("reference.py"):  # in place of a kernel
                used.append(method)
            return original(*args, **kw)

        monkeypatch.setattr(owner, method, call)

    with torch.no_grad():
        step.start(1, 4, None, [], 0)
        for method in ("item", "tolist", "__bool__", "__int__", "__index__"):
            spy(torch.Tensor, method)
        spy(torch, "tensor")
        step.advance()
    assert used == []


def test_what_cannot_be_captured_says_so(model, monkeypatch):
    """With a capture that fails, as a real one leaves PyTorch's allocator and generators unusable."""
    decoder = GraphDecoder(model, batch_sizes=(1, 2), max_length=8)

    def capture(stream, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(decoding, "capture_stream", lambda device: None)
    monkeypatch.setattr(decoder.steps[2], "capture", capture)
    with pytest.raises(
        RuntimeError, match="of MixtralForCausalLM cannot be captured for batch size 2: .*not permitted"
    ):
        decoder._capture()


def test_stats(model):
    decoder = GraphDecoder(model, batch_sizes=(1, 4), max_length=40)
    assert decoder.stats() == Stats(0, 0, 0, 0.0, None, None, cache_bytes=0, graph_bytes=0)
    ids = prompts(3, 9)
    free = decoder.generate(ids, max_new_tokens=20)
    first = decoder.stats()
    assert (first.calls, first.new_tokens, first.steps) == (1, 60, 19)
    assert first.time_to_first_token > 0 and first.tokens_per_second > 0
    assert (
        first.cache_bytes == 2 * 2 * 4 * 2 * 40 * 16 * 4
    )  # layers, keys and values, rows, heads, columns, values, bytes

    end = int(free[1, 9 + 4])
    lengths = [row.index(end) + 1 if end in row else 20 for row in free[:, 9:].tolist()]
    decoder.generate(ids, max_new_tokens=20, eos_token_id=end)
    steps = decoder.stream(ids, max_new_tokens=20)
    for _ in range(5):
        next(steps)
    steps.close()
    with pytest.raises(ValueError):
        decoder.generate(ids, max_new_tokens=0)
    now = decoder.stats()
    assert now.calls == 3 and now.new_tokens == 60 + sum(lengths) + 15 and now.steps == 19 + max(lengths) - 1 + 4
    assert now.cache_bytes == first.cache_bytes
    decoder.generate(ids[:1], max_new_tokens=1)
    assert decoder.stats().cache_bytes == first.cache_bytes * 5 // 4, "the other batch size"


def test_times_are_those_of_the_last_calls(monkeypatch):
    times = itertools.count()
    monkeypatch.setattr(stats.time, "perf_counter", lambda: float(next(times)))
    records = stats.Records()
    assert records.stats(0, 0).tokens_per_second is None
    for seconds in [100] * 3 + [1] * stats.RECENT:
        record = stats.Record(torch.device("cpu"))
        times = itertools.count(next(times) + seconds - 1)
        record.first_token()
        times = itertools.count(next(times) + 1)
        record.end([5, 3])
        records.add(record)
    found = records.stats(0, 0)
    assert found.calls == 3 + stats.RECENT and found.new_tokens == 8 * found.calls
    assert found.time_to_first_token == 1.0 and found.tokens_per_second == 6 / 2.0


def test_closing_frees_the_caches(model):
    decoder = GraphDecoder(model, max_length=40)
    decoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        decoder.generate(prompts(1, 3), max_new_tokens=3)
    assert decoder.stats().cache_bytes == 0
    decoder.close()


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, r"^max_new_tokens: expected at least 1, got 0"),
        ({"max_new_tokens": 32}, ValueError, r"^max_new_tokens: 9 tokens of prompt and 32 new ones .* max_length, 40"),
        ({"input_ids": prompts(5, 3)}, ValueError, r"^input_ids: 5 sequences .* largest captured batch, 4"),
        ({"input_ids": prompts(1, 3).float()}, TypeError, r"^input_ids: expected integers, got torch.float32"),
        ({"input_ids": prompts(1, 3)[0]}, ValueError, r"^input_ids: expected shape \(batch, length\).* got \(3,\)"),
        ({"input_ids": prompts(1, 0)}, ValueError, r"^input_ids: .* got \(1, 0\)"),
        ({"attention_mask": torch.ones(2, 8)}, ValueError, r"^attention_mask: expected shape \(2, 9\), got \(2, 8\)"),
        ({"attention_mask": left_padded(prompts(2, 9), 0, 9)}, ValueError, r"^attention_mask: .* in the last column"),
        ({"attention_mask": left_padded(prompts(2, 9), 0, 3).flip(1)}, ValueError, "^attention_mask: .* last column"),
        ({"input_ids": padded(prompts(2, 9), 0, 3).flip(1)}, ValueError, "^attention_mask: .* last column"),
        ({"input_ids": None}, TypeError, r"^input_ids: expected a torch\.Tensor, got NoneType None"),
        ({"input_ids": [[3, 4, 5]]}, TypeError, r"^input_ids: expected a torch\.Tensor, got list \[\[3, 4, 5\]\]"),
        ({"attention_mask": [[1] * 9] * 2}, TypeError, r"^attention_mask: expected a torch\.Tensor, got list"),
        ({"max_new_tokens": 2.0}, TypeError, r"^max_new_tokens: expected an integer, got float 2\.0"),
        ({"eos_token_id": 3.0}, TypeError, r"^eos_token_id: expected an integer, got float 3\.0"),
        ({"eos_token_id": True}, TypeError, "^eos_token_id: expected an integer, got bool True"),
        ({"eos_token_id": "3"}, TypeError, "^eos_token_id: expected an integer, got str '3'"),
        ({"eos_token_id": [3, None]}, TypeError, "^eos_token_id: expected an integer, got NoneType None"),
        (
            {"eos_token_id": torch.tensor(3.0)},
            TypeError,
            "^eos_token_id: expected an integer, got a torch.float32 tens",
        ),
        (
            {"eos_token_id": torch.tensor(True)},
            TypeError,
            "^eos_token_id: expected an integer, got a torch.bool tensor",
        ),
        ({"eos_token_id": np.float32(3)}, TypeError, "^eos_token_id: expected an integer, got float32 "),
        ({"pad_token_id": [3]}, TypeError, r"^pad_token_id: expected an integer, got list \[3\]"),
        ({"eos_token_id": 128}, ValueError, r"^eos_token_id: expected tokens between 0 and 127, got \[128\]"),
        ({"pad_token_id": -1}, ValueError, r"^pad_token_id: .* got \[-1\]"),
    ],
)
def test_bad_calls(decoder, arguments, exception, message):
    with pytest.raises(exception, match=message):
        decoder.generate(**({"input_ids": prompts(2, 9), "max_new_tokens": 3} | arguments))


def test_bad_construction(model):
    with pytest.raises(TypeError, match=r"^batch_sizes: expected an integer, got float 1\.5"):
        GraphDecoder(model, batch_sizes=(1.5,), max_length=8)
    with pytest.raises(TypeError, match="^max_length: expected an integer, got NoneType None"):
        GraphDecoder(model, max_length=None)
    for sizes in ((), (0,), (-1, 2)):
        with pytest.raises(ValueError, match="^batch_sizes: expected one or more positive integers"):
            GraphDecoder(model, batch_sizes=sizes, max_length=8)
    with pytest.raises(ValueError, match="^max_length: expected at least 2, got 1"):
        GraphDecoder(model, max_length=1)
    with pytest.raises(TypeError, match="^model: expected a causal language model of transformers, got Linear"):
        GraphDecoder(torch.nn.Linear(2, 2), max_length=8)
    with pytest.raises(TypeError, match="^model: expected a causal language model, got MixtralModel"):
        GraphDecoder(model.model, max_length=8)


def test_models_that_are_refused():
    model = make_model("llama")
    model.train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        GraphDecoder(model, max_length=8)
    model.eval().set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'flex_attention'; GraphDecoder runs 'sdpa' and 'eager'"):
        GraphDecoder(model, max_length=8)
    model.set_attn_implementation("sdpa")
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"on one device, got \['cpu', 'meta'\]"):
        GraphDecoder(model, max_length=8)


def test_frequencies_that_the_host_computes_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=r"rotary_emb changes its frequencies on the host .*\{'dynamic'\}"):
        GraphDecoder(make_model("llama", rope_parameters=rope), max_length=8)


def test_decoders_are_not_copied():
    decoder = GraphDecoder(make_model("qwen3_moe"), max_length=16)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="^GraphDecoder cannot be copied or pickled"):
            copied(decoder)


def test_models_loaded_without_their_scales_are_refused():
    model = make_model("qwen3_moe")
    model.config.quantization_config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM has a quantization_config, but none .*load_model"):
        GraphDecoder(model, max_length=16)
    replace_linears(model)
    GraphDecoder(model, max_length=16)
