"""Whole models of the benchmarks: their sizes, and what a step must read."""

import pytest
import torch

from benchmarks import decode, whole_models
from fp8moe import FP8Linear, GroupedExperts, PackedTensor, dequantize

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(whole_models.CONFIGS, "tiny", ("qwen3_moe", TINY))


SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 4,
    "num_local_experts": 8,
    "sliding_window": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
PARAMETERS = {"qwen3-30b-a3b": 30.5, "deepseek-v3": 671.0, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8}
"""In 10^9, as published."""


def shrink(name, monkeypatch):
    """The sizes of a model that are in SMALL, and all else as it is."""
    model_type, options = whole_models.CONFIGS[name]
    config = transformers.AutoConfig.for_model(model_type, **options)
    small = {key: min(value, found) for key, value in SMALL.items() if (found := getattr(config, key, None))}
    if model_type in ("deepseek_v3", "glm4_moe_lite"):
        small["num_key_value_heads"] = small["num_attention_heads"]
        del small["head_dim"]
    monkeypatch.setitem(whole_models.CONFIGS, name, (model_type, options | small))


@pytest.mark.parametrize("name", [name for name in whole_models.CONFIGS if name != "tiny"])
@pytest.mark.parametrize("experts", ["fp8", "mxfp4", None])
def test_every_model_is_built(name, experts, monkeypatch):
    shrink(name, monkeypatch)
    model = whole_models.build(name, experts=experts, device="cpu")
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    tied = model.config.tie_word_embeddings
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert all(b.eq(0).all() for key, b in model.named_buffers() if not key.endswith("inv_freq"))
    rotary = model.model.rotary_emb
    assert torch.equal(rotary.inv_freq, type(rotary)(model.config).inv_freq)
    kinds = {type(module) for module in model.modules()}
    assert (GroupedExperts in kinds) == (experts is not None) and not model.training
    assert (FP8Linear in kinds) == (experts is not None and not name.startswith("gpt-oss"))
    assert {m.weight_format for m in model.modules() if isinstance(m, GroupedExperts)} == {experts} - {None}
    tokens = torch.arange(10)[None]
    logits = model(tokens).logits
    assert logits.shape == (1, 10, 64) and logits.isfinite().all() and logits.std() > 0
    # Positions count: the same tokens in another order end otherwise.
    assert not torch.equal(model(tokens.flip(1).roll(-1)).logits[0, -1], logits[0, -1])


def test_experts_in_four_bits_have_the_spread_of_the_others():
    model = whole_models.build("tiny", experts="mxfp4", device="cpu")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    for name in ("gate_up_proj", "down_proj"):
        state = first.state_dict()
        values = dequantize(PackedTensor(state[name], state[f"{name}_scale"], "mxfp4"))
        assert values.std().item() == pytest.approx(whole_models.STD, rel=0.05)
        assert not torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_model_has_its_published_size(name):
    model_type, options = whole_models.CONFIGS[name]
    config = transformers.AutoConfig.for_model(model_type, **options)
    assert all(getattr(config, key) == value for key, value in options.items() if key != "rope_theta")
    config.update(whole_models.WHOLE.get(name, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], abs=0.06)


def test_buffers_of_unknown_values_are_refused(monkeypatch):
    def with_buffer(self, *args, **kwargs):
        tie_weights(self, *args, **kwargs)
        self.register_buffer("steps", torch.zeros(1))

    model_class = transformers.Qwen3MoeForCausalLM
    tie_weights = model_class.tie_weights
    monkeypatch.setattr(model_class, "tie_weights", with_buffer)
    with pytest.raises(ValueError, match="^steps: nothing says which values it has"):
        whole_models.build("tiny", device="cpu")


def test_floor_counts_the_experts_that_were_hit():
    model = whole_models.build("tiny", device="cpu")
    prompts = torch.arange(6)[None]
    hit = decode.experts_hit(model, prompts)
    assert [type(module) for module in hit] == [GroupedExperts] * 2 and set(hit.values()) == {2}
    experts = sum(p.nbytes for module in hit for p in module.parameters())
    others = sum(p.nbytes for p in model.parameters()) - experts - model.get_input_embeddings().weight.nbytes
    keys_and_values = 100 * 2 * 2 * 1 * 64 * 2  # tokens, layers, keys and values, heads, values, bytes
    assert decode.step_bytes(model, prompts, keys_and_values) == others + experts // 2 + keys_and_values


def test_floor_counts_the_tokens_in_a_window():
    config = transformers.AutoConfig.for_model("gpt_oss")
    assert decode.tokens_read(config, 100) == 100
    assert decode.tokens_read(config, 500) == (500 + 128) / 2
    assert decode.tokens_read(transformers.AutoConfig.for_model("deepseek_v3"), 500) == 500
