"""Upcycling: the mixture of experts computes what the dense model does, in float32 and from its FP8 checkpoint."""

import pytest
import torch
from torch import nn

from examples.demo.upcycle import quantize, upcycle
from fp8moe import FP8Linear, GroupedExperts
from fp8moe.hf import load_model
from fp8moe.layers.linear import replace_linears
from fp8moe.weights import inspect_checkpoint, save_fp8_checkpoint
from tests.errors import refused

TOKENS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(3))


def make_llama(**changes):
    """Settings that differ from the defaults of both LlamaConfig and MixtralConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 0.003},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "max_position_embeddings": 300},
        **{"tie_word_embeddings": True, "hidden_act": "silu", "initializer_range": 0.3, "eos_token_id": 5},
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def relative_error(actual, expected):
    return (torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)).item()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "hidden_act": "gelu"},
        {"num_key_value_heads": None, "head_dim": None, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}},
    ],
    ids=["plain", "untied, gelu", "defaults", "scaled rope"],
)
@torch.inference_mode()
def test_function_is_unchanged(changes, implementation):
    model = make_llama(**changes)
    moe = upcycle(model)
    moe.set_experts_implementation(implementation)
    assert relative_error(moe(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits) < 1e-5


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (5, 3)])
@torch.inference_mode()
def test_any_number_of_experts(num_experts, top_k):
    model = make_llama()
    moe = upcycle(model, num_experts=num_experts, top_k=top_k)
    assert relative_error(moe(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits) < 1e-5


@torch.inference_mode()
def test_routing_varies():
    moe = upcycle(make_llama())
    chosen = []
    for layer in moe.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, arguments, output: chosen.append(output[2]))
    moe(input_ids=TOKENS)
    assert len(chosen) == 3
    for experts in chosen:
        assert experts.shape == (80, 2)
        shares = experts.flatten().bincount(minlength=8) / experts.numel()
        assert (shares > 0).sum() >= 7
        assert shares.max() < 0.5
    assert not torch.equal(chosen[0], chosen[1])


def test_seed_chooses_the_routers():
    model = make_llama()
    first, same, other = (upcycle(model, seed=seed).model.layers[1].mlp.gate.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_takes_no_memory_for_the_experts():
    model = make_llama().bfloat16()
    moe = upcycle(model)
    assert moe.dtype == torch.bfloat16
    assert moe.lm_head.weight is moe.model.embed_tokens.weight
    for dense, layer in zip(model.model.layers, moe.model.layers, strict=True):
        assert layer.mlp.experts.down_proj.data_ptr() == dense.mlp.down_proj.weight.data_ptr()
        assert layer.mlp.experts.gate_up_proj.untyped_storage().nbytes() == 2 * 80 * 48 * 2


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_are_refused(changes):
    refused(ValueError, "without biases", upcycle, make_llama(**changes))


def test_other_models_are_refused():
    refused(ValueError, "MixtralForCausalLM", upcycle, upcycle(make_llama()))


def test_modules_are_kept_by_the_last_part_of_their_name():
    moe = upcycle(make_llama())
    quantize(moe, ["experts"])
    kinds = {type(module) for name, module in moe.named_modules() if name.endswith("experts")}
    assert GroupedExperts not in kinds and len(kinds) == 1
    assert type(moe.model.layers[0].self_attn.q_proj) is FP8Linear


@torch.inference_mode()
def test_fp8_checkpoint_computes_what_the_dense_fp8_model_does(tmp_path):
    keep = ["model.layers.0.*", "v_proj"]
    model = make_llama()
    exact = model(input_ids=TOKENS).logits
    moe = upcycle(model)
    quantize(moe, keep)
    save_fp8_checkpoint(moe, tmp_path)
    assert not inspect_checkpoint(tmp_path).problems
    loaded = load_model(tmp_path, dtype=torch.float32)
    kinds = [type(layer.mlp.experts) for layer in loaded.model.layers]
    assert kinds[0] is not GroupedExperts
    assert kinds[1:] == [GroupedExperts] * 2
    attention = loaded.model.layers[1].self_attn
    assert type(attention.v_proj) is nn.Linear
    assert type(attention.q_proj) is FP8Linear
    assert type(loaded.model.layers[0].self_attn.q_proj) is nn.Linear

    replace_linears(model, skip=("lm_head", *keep))
    dense = model(input_ids=TOKENS).logits
    rounding = relative_error(dense, exact)
    assert 0.01 < rounding < 0.3
    # Sums in another order: now and then an activation is rounded the other way.
    assert relative_error(loaded(input_ids=TOKENS).logits, dense) < rounding / 2
