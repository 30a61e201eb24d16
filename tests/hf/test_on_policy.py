"""fp8moe.hf.on_policy on the CPU: a trainer's log probabilities have the bits of a GraphDecoder that it refits."""

import copy
import threading

import pytest
import torch

import fp8moe
from fp8moe import hf
from fp8moe.decode import GraphDecoder
from fp8moe.hf import policy, replaced
from fp8moe.hf.packed_attention import attention_of
from tests.decode_models import tiny_gpt_oss
from tests.errors import relative_error
from tests.on_policy_cases import (
    KINDS,
    assert_equal_bits,
    build,
    decoder_of,
    generated,
    logprobs_of,
    to_fp8,
    trainer_of,
)
from tests.tiny_moe_models import MODELS
from tests.transformers_models import prompts

SERVED = (
    *("Dots1ForCausalLM", "Glm4MoeForCausalLM", "MellumForCausalLM", "MixtralForCausalLM"),
    *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "SolarOpenForCausalLM"),
)
LENGTHS = (70, 1, 9)  # more than a split of keys


@pytest.fixture(scope="module", autouse=True)
def registered():
    hf.register()


@pytest.fixture(scope="module")
def trainer():
    return trainer_of(build("qwen3_moe"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_prompts_and_answers(kind, dtype):
    trainer = trainer_of(build(kind, dtype), dtype)
    decoder = decoder_of(to_fp8(build(kind)), trainer, batch_sizes=(3,), max_length=80)
    assert_equal_bits(decoder, trainer, LENGTHS, 5)


def test_models_without_fp8_linears_and_transformers_experts():
    """Experts in bfloat16 run through experts_implementation="fp8moe" on both sides."""
    for kind in ("qwen3_moe", "llama"):
        model = build(kind, experts_implementation="fp8moe")
        trainer = build(kind, experts_implementation="fp8moe").train()
        with torch.no_grad():
            for value in trainer.parameters():
                value.mul_(1.1)
        decoder = decoder_of(model, trainer, batch_sizes=(3,), max_length=80)
        tokens, *_, whole = assert_equal_bits(decoder, trainer, LENGTHS, 3)
        logprobs_of(trainer, tokens, attention_mask=whole).mean().backward()
        assert all(value.grad is not None and value.grad.any() for value in trainer.parameters())


@pytest.mark.parametrize("name", SERVED)
def test_each_class(name):
    how = {"dtype": torch.bfloat16, "experts_implementation": "fp8moe"}
    trainer, model = MODELS[name].build(**how), MODELS[name].build(**how)
    decoder = decoder_of(model, trainer, batch_sizes=(3,), max_length=20)
    assert_equal_bits(decoder, trainer, (12, 5, 1), 4)


def test_steps_of_an_optimizer_and_other_changes():
    trainer = trainer_of(build("mixtral", torch.float32), torch.float32)
    decoder = decoder_of(to_fp8(build("mixtral")), trainer, max_length=20)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=1e-2)
    ids, seen = prompts(1, 6), []

    def assert_same():
        fp8moe.refit(decoder.model, trainer)
        tokens, expected = generated(decoder, ids, max_new_tokens=4)
        found = logprobs_of(trainer, tokens)
        assert torch.equal(found[:, -4:], expected)
        seen.append(expected)
        return found

    for _ in range(3):
        assert_same().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        trainer.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    assert_same()
    trainer.eval()
    with torch.no_grad():
        trainer.lm_head.weight.data = trainer.lm_head.weight.data * 2
        assert_same()
    trainer.load_state_dict(build_state(trainer))
    assert_same()
    assert len({values.sum().item() for values in seen}) == len(seen)


def test_frozen_weights():
    """FP8 linears and experts that are frozen, and experts in bfloat16, also where these change."""
    for name, how in (("FP8", {}), ("bfloat16", {"experts_implementation": "fp8moe"})):
        trainer, model = build("mixtral", **how), build("mixtral", **how)
        if name == "FP8":
            to_fp8(trainer), to_fp8(model)
        frozen = {name for name, _ in trainer.named_parameters() if "proj" in name}
        for path, value in trainer.named_parameters():
            value.requires_grad_(path not in frozen)
        with fp8moe.batch_invariant():
            decoder = GraphDecoder(model, max_length=20)
        for _ in range(2):
            tokens, expected = generated(decoder, prompts(1, 6), max_new_tokens=4)
            found = logprobs_of(trainer, tokens)
            assert torch.equal(found[:, -4:], expected)
            found.mean().backward()
            assert all((value.grad is None) == (path in frozen) for path, value in trainer.named_parameters())
            for each in (trainer, model):
                experts = each.model.layers[0].mlp.experts
                value = experts.down_proj if name == "bfloat16" else experts.down_proj_scale_inv
                with torch.no_grad():
                    value.mul_(2)


def test_no_tokens(trainer):
    with hf.on_policy(trainer):
        assert trainer(prompts(2, 6), logits_to_keep=torch.tensor([], dtype=torch.int64)).logits.shape == (2, 0, 128)


def test_buffers_that_change():
    """As the biases that balance the loads of experts do."""
    how = {"dtype": torch.bfloat16, "experts_implementation": "fp8moe"}
    trainer, model = (MODELS["Glm4MoeForCausalLM"].build(**how) for _ in range(2))
    decoder = decoder_of(model, trainer, max_length=20)
    seen = []
    for _ in range(3):
        fp8moe.refit(model, trainer)
        tokens, expected = generated(decoder, prompts(1, 6), max_new_tokens=4)
        assert torch.equal(logprobs_of(trainer, tokens)[:, -4:], expected)
        seen.append(logprobs_of(trainer, prompts(1, 9)).sum().item())
        for name, value in trainer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.randn(value.shape))
    assert len(set(seen)) == 3


def build_state(model):
    return {name: value * 0.9 for name, value in model.state_dict().items()}


# Gradients.


def gradients(model, run):
    """The gradients of run()'s mean, by parameter."""
    model.zero_grad()
    run().mean().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


def plain_logprobs(model, tokens):
    logits = model(tokens).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])


def test_gradients_of_a_model_in_float32_are_close_to_its_own():
    model, tokens = build("llama", torch.float32).train(), prompts(3, 12)
    expected = gradients(model, lambda: plain_logprobs(model, tokens))
    found = gradients(model, lambda: logprobs_of(model, tokens))
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 0.03, name


def test_gradients_are_close_to_those_with_the_generators_experts():
    """In bfloat16 and FP8, which round differently on both sides, but for the same experts."""
    model, tokens = trainer_of(build("mixtral")), prompts(3, 12)
    decoder = decoder_of(to_fp8(build("mixtral")), model, batch_sizes=(3,), max_length=20)
    with fp8moe.batch_invariant():
        _, routing = decoder.generate(tokens, max_new_tokens=1, return_routing=True)
    found = gradients(model, lambda: logprobs_of(model, tokens))
    with hf.replay_routing(model, routing):
        expected = gradients(model, lambda: plain_logprobs(model, tokens))
    own = gradients(model, lambda: plain_logprobs(model, tokens))
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 0.15, name
    router = "model.layers.1.mlp.gate.weight"
    assert relative_error(own[router], expected[router]) > 2 * relative_error(found[router], expected[router])


def test_gradients_repeat_with_checkpoints_and_without(trainer):
    tokens = prompts(3, 12)
    expected = gradients(trainer, lambda: logprobs_of(trainer, tokens))
    assert all(value.any() for value in expected.values())

    def assert_same(run=lambda: logprobs_of(trainer, tokens)):
        found = gradients(trainer, run)
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    assert_same()
    for reentrant in (False, True):
        trainer.gradient_checkpointing_enable({"use_reentrant": reentrant})
        try:
            assert_same()
            assert trainer.model.layers[0].gradient_checkpointing
        finally:
            trainer.gradient_checkpointing_disable()
    trainer.eval()
    assert_same()
    trainer.train()

    def in_micro_batches():
        parts = [logprobs_of(trainer, row[None]) for row in tokens]  # backwards come later, in any order
        return torch.cat(parts)

    found = gradients(trainer, in_micro_batches)
    assert all(relative_error(found[name], value) < 0.1 for name, value in expected.items())
    assert not replaced._held


def test_gradients_of_padding_are_zero(trainer):
    tokens = prompts(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, 7:] = 0
    embedded = trainer.get_input_embeddings()(tokens).detach().requires_grad_()
    with hf.on_policy(trainer):
        logits = trainer(inputs_embeds=embedded, attention_mask=mask).logits
    logits[mask.bool()].float().log_softmax(-1)[:, 3].sum().backward()
    assert not embedded.grad[mask == 0].any() and embedded.grad[mask == 1].any(-1).all()


# Where it runs.


def test_grad_modes_wrappers_and_autocast(trainer):
    tokens = prompts(2, 9)
    expected = logprobs_of(trainer, tokens)
    with torch.no_grad():
        assert torch.equal(logprobs_of(trainer, tokens), expected)
    with torch.inference_mode():
        assert torch.equal(logprobs_of(trainer, tokens), expected)
    with torch.autocast("cpu", torch.bfloat16):
        found = logprobs_of(trainer, tokens)
    assert torch.equal(found, expected)
    found.mean().backward()
    assert torch.equal(logprobs_of(torch.compile(trainer, backend="eager"), tokens), expected)
    with hf.on_policy(trainer), hf.on_policy(trainer):
        assert trainer(tokens, labels=tokens).loss.isfinite()
        assert torch.equal(trainer(tokens, logits_to_keep=1).logits[:, 0], trainer(tokens).logits[:, -1])
    assert not replaced._held and not fp8moe.runtime.config.settings.batch_invariant


def test_outside_of_the_block_nothing_changes(trainer):
    tokens = prompts(2, 9)
    before = trainer(tokens).logits
    logprobs_of(trainer, tokens)
    assert torch.equal(trainer(tokens).logits, before)
    assert "forward" not in vars(trainer.model) and trainer.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_other_threads_run_the_model_as_it_is(trainer):
    """Also where blocks of two threads end in another order than they began."""
    tokens, began, ends = prompts(2, 9), threading.Event(), threading.Event()
    plain, expected, found = trainer(tokens).logits, logprobs_of(trainer, tokens), []

    def run():
        found.append(trainer(tokens).logits)
        with hf.on_policy(trainer):
            found.append(trainer(tokens).logits.float().log_softmax(-1))
            with attention_of(trainer.config):
                began.set()
                ends.wait()

    thread = threading.Thread(target=run)
    with hf.on_policy(trainer), attention_of(trainer.config):
        thread.start()
        assert began.wait(60)
    ends.set()
    thread.join()
    assert torch.equal(found[0], plain)
    assert torch.equal(found[1][:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1), expected)
    assert trainer.config._attn_implementation == "sdpa" and torch.equal(trainer(tokens).logits, plain)


def test_a_model_that_is_cast_between_two_blocks():
    for experts in ({}, {"experts_implementation": "fp8moe"}):
        trainer, tokens = build("mixtral", **experts), prompts(2, 9)
        trainer = trainer.train() if experts else trainer_of(trainer)
        logprobs_of(trainer, tokens)
        trainer.float()
        assert torch.equal(logprobs_of(trainer, tokens), logprobs_of(copy.deepcopy(trainer), tokens))


def test_weights_that_change_before_the_backward():
    trainer = trainer_of(build("llama"))
    loss = logprobs_of(trainer, prompts(1, 5)).mean()
    with torch.no_grad():
        trainer.model.layers[0].input_layernorm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# What is refused.


def test_forwards_that_are_refused_before_a_layer_runs(trainer, monkeypatch):
    tokens = prompts(2, 6)
    gap = torch.ones_like(tokens)
    gap[1, 3] = 0
    for expected, inputs in {
        "^output_router_logits: on_policy": {"output_router_logits": True},
        "^output_hidden_states: on_policy": {"output_hidden_states": True},
        "at row 0, column 0": {"position_ids": torch.arange(4, 10)[None]},
        "at row 1, column 4": {"attention_mask": gap},
        r"^attention_mask: on_policy expects shape \(2, 6\)": {"attention_mask": torch.ones(2, 1, 6, 6)},
        r"^position_ids: on_policy expects shape \(2, 6\)": {"position_ids": torch.arange(6).expand(3, 2, 6)},
        "^position_ids: on_policy expects them for packed": {"cu_seq_lens_q": torch.tensor([0, 6])},
    }.items():
        with hf.on_policy(trainer), pytest.raises(ValueError, match=expected):
            monkeypatch.setattr(policy._Part, "run", lambda *given: pytest.fail("a layer ran"))
            trainer(tokens, **inputs)
    for empty in ((0, 6), (2, 0)):
        with hf.on_policy(trainer), pytest.raises(ValueError, match=r"^input_ids: on_policy expects at least one tok"):
            trainer(torch.zeros(empty, dtype=torch.int64))
    with hf.on_policy(trainer), pytest.raises(ValueError, match=r"^cache: on_policy|^past_key_values: on_policy"):
        trainer.generate(tokens, max_new_tokens=2)
    trainer.config.attention_dropout = 0.1
    try:
        with hf.on_policy(trainer), pytest.raises(ValueError, match="^attention_dropout: on_policy expects 0"):
            trainer(tokens)
    finally:
        trainer.config.attention_dropout = 0.0


def test_a_model_of_several_threads_is_refused(trainer):
    with pytest.raises(ValueError, match="got DataParallel"), hf.on_policy(torch.nn.DataParallel(trainer)):
        pass


def test_other_blocks_are_refused(trainer):
    routing = torch.zeros(2, 6, 1, 2, dtype=torch.int16)
    for block in (hf.record_routing(trainer), hf.replay_routing(trainer, routing)):
        with block, pytest.raises(RuntimeError, match="on_policy.*block of replay_routing"), hf.on_policy(trainer):
            pass
    together = pytest.raises(RuntimeError, match="on_policy cannot be open together")
    with hf.on_policy(trainer), together, hf.record_routing(trainer):
        pass
    assert not replaced._held


def with_adapters():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))


def with_a_hook():
    model = trainer_of(build("llama"))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out)
    return model


def with_other_experts():
    return build("mixtral", experts_implementation="eager")


REFUSED = {
    "GptOssForCausalLM.*layers.0: the attention GptOssAttention has sinks": tiny_gpt_oss,
    "DeepseekV3ForCausalLM.*layers.0: the attention DeepseekV3Attention is not known": "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM.*Gemma4TextScaledWordEmbedding": "Gemma4ForCausalLM",
    "BeamForCausalLM.*soft caps": "BeamForCausalLM",
    "layers.0: its experts MixtralExperts run by 'eager'; expected": with_other_experts,
    r"layers.1.mlp \(LlamaMLP\) has hooks or another forward": with_a_hook,
    r"LlamaForCausalLM cannot run in on_policy: layers.0: self_attn.q_proj": with_adapters,
}


@pytest.mark.parametrize("expected", REFUSED)
def test_models_that_are_refused_by_name(expected):
    make = REFUSED[expected]
    if make is with_adapters:
        pytest.importorskip("peft")
    if isinstance(make, str):
        if make not in MODELS:
            pytest.skip(f"the installed transformers has no {make}")
        make = MODELS[make].build
    with pytest.raises(ValueError, match=expected), hf.on_policy(make()):
        pytest.fail("the block was entered")
    assert not replaced._held


def test_wrong_arguments():
    wrong = pytest.raises(TypeError, match="model: expected a model of transformers, got Linear")
    with wrong, hf.on_policy(torch.nn.Linear(2, 2)):
        pass
