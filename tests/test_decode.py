"""GraphDecoder without a graph: the CPU runs the same step that a GPU captures."""

from contextlib import nullcontext

import pytest
import torch

from fp8moe.integrations import decode
from fp8moe.integrations.decode import GraphDecoder
from tests.transformers_models import BASE, MLA, prompts, random_model

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


def left_padded(ids, *padding):
    mask = torch.ones_like(ids)
    for row, count in zip(mask, padding, strict=True):
        row[:count] = 0
    return mask


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


@pytest.mark.parametrize("several", [False, True])
def test_stops_at_the_end_token(model, decoder, several):
    ids = prompts(3, 9)
    free = decoder.generate(ids, max_new_tokens=20)[:, 9:]
    ends = [int(free[0, 3]), int(free[1, 6]), int(free[2, 9])] if several else int(free[0, 3])
    out = decoder.generate(ids, max_new_tokens=20, eos_token_id=ends, pad_token_id=1)
    assert torch.equal(out, expected(model, ids, max_new_tokens=20, eos_token_id=ends, pad_token_id=1))
    if several:
        assert out.shape[1] < 29, "it stopped early"


class LateFlag:
    """As on a GPU: what a look finds is known at the next one."""

    def __init__(self):
        self.seen = None

    def was_set_then_watch(self, finished):
        before, self.seen = self.seen, bool(finished.all())
        return bool(before)

    def forget(self):
        self.seen = None


@pytest.mark.parametrize("steps_to_end", [1, 7, 8, 9])
def test_noticing_the_end_late_changes_nothing(model, monkeypatch, steps_to_end):
    ids = prompts(1, 4, seed=5)
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=100)
    free = decoder.generate(ids, max_new_tokens=steps_to_end + 1)[0, 4:].tolist()
    end = free[-1]
    expected = free[: free.index(end) + 1]
    decoder._flag = LateFlag()
    replays, replay = [], decoder._steps[2].replay
    monkeypatch.setattr(decoder._steps[2], "replay", lambda: replays.append(1) or replay())
    for _ in range(2):
        replays.clear()
        out = decoder.generate(ids, max_new_tokens=90, eos_token_id=end)
        assert out[0, 4:].tolist() == expected
        assert len(replays) <= steps_to_end + 2 * decode.CHECK_EVERY


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


def test_nan_in_one_call_does_not_reach_the_next(model):
    model = make_model("mixtral")
    decoder = GraphDecoder(model, max_length=40)
    ids = prompts(1, 9)
    before = decoder.generate(ids, max_new_tokens=8)
    weight = model.model.embed_tokens.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
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
    step = decoder._steps[1]
    used = []

    def spy(owner, method):
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args, **kw: used.append(method) or original(*args, **kw))

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
    monkeypatch.setattr(decode, "_capture_stream", lambda device: None)
    monkeypatch.setattr(decoder._steps[2], "capture", capture)
    with pytest.raises(
        RuntimeError, match="of MixtralForCausalLM cannot be captured for batch size 2: .*not permitted"
    ):
        decoder._capture()


def test_closing_frees_the_caches(model):
    decoder = GraphDecoder(model, max_length=40)
    decoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        decoder.generate(prompts(1, 3), max_new_tokens=3)
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
        ({"attention_mask": left_padded(prompts(2, 9), 0, 9)}, ValueError, r"^attention_mask: .* on the left only"),
        ({"attention_mask": left_padded(prompts(2, 9), 0, 3).flip(1)}, ValueError, r"on the left only"),
        ({"eos_token_id": 128}, ValueError, r"^eos_token_id: expected tokens between 0 and 127, got \[128\]"),
        ({"pad_token_id": -1}, ValueError, r"^pad_token_id: .* got \[-1\]"),
    ],
)
def test_bad_calls(decoder, arguments, exception, message):
    with pytest.raises(exception, match=message):
        decoder.generate(**({"input_ids": prompts(2, 9), "max_new_tokens": 3} | arguments))


def test_bad_construction(model):
    for sizes in ((), (0,), (1.5,), (-1, 2)):
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


def test_linear_attention_is_refused():
    config = transformers.AutoConfig.for_model(
        "qwen3_next",
        **(SHAPE | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}),
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="layer 0 keeps a LinearAttentionLayer"):
        GraphDecoder(model, max_length=8)
