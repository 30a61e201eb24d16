"""on_policy on the kernels: the bits of a trainer, and of prompts and steps of a GraphDecoder with CUDA graphs."""

import pytest
import torch

import fp8moe
from fp8moe import hf
from tests.errors import relative_error
from tests.on_policy_cases import assert_equal_bits, build, decoder_of, generated, logprobs_of, to_fp8, trainer_of
from tests.transformers_models import prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = {
    **{"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048},
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    hf.register()


def model(dtype=torch.bfloat16, **how):
    return build("qwen3_moe", dtype, DEVICE, sizes=SIZES, **how)


@pytest.fixture(scope="module")
def trainer():
    return trainer_of(model())


@pytest.fixture(scope="module")
def decoder(trainer):
    return decoder_of(to_fp8(model()), trainer, batch_sizes=(1, 3, 16), max_length=320)


@pytest.mark.parametrize("lengths", [(1,), (70, 1, 9), (64, 65, 300, *range(1, 14))])
def test_bits_of_prompts_and_answers(decoder, trainer, lengths):
    assert_equal_bits(decoder, trainer, lengths, 12)


def test_a_trainer_in_float32():
    trainer = trainer_of(model(torch.float32), torch.float32)
    decoder = decoder_of(to_fp8(model()), trainer, batch_sizes=(3,), max_length=100)
    assert_equal_bits(decoder, trainer, (70, 1, 9), 12)


def test_linears_in_bfloat16():
    trainer = model(experts_implementation="fp8moe").train()
    decoder = decoder_of(model(experts_implementation="fp8moe"), trainer, batch_sizes=(3,), max_length=100)
    assert_equal_bits(decoder, trainer, (70, 1, 9), 12)


def test_after_steps_of_an_optimizer(decoder, trainer):
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    for _ in range(2):
        fp8moe.refit(decoder.model, trainer)
        tokens, expected = generated(decoder, prompts(3, 20, device=DEVICE), max_new_tokens=8, eos_token_id=())
        found = logprobs_of(trainer, tokens)
        assert torch.equal(found[:, -8:], expected)
        found.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_repeat_and_are_close_to_those_with_the_generators_experts(decoder, trainer):
    tokens = prompts(3, 130, device=DEVICE)
    fp8moe.refit(decoder.model, trainer)
    with fp8moe.batch_invariant():
        _, routing = decoder.generate(tokens, max_new_tokens=1, return_routing=True)

    def gradients(run):
        trainer.zero_grad()
        run().mean().backward()
        return {name: value.grad.clone() for name, value in trainer.named_parameters()}

    def plain():
        logits = trainer(tokens).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])

    found = gradients(lambda: logprobs_of(trainer, tokens))
    again = gradients(lambda: logprobs_of(trainer, tokens))
    with hf.replay_routing(trainer, routing):
        expected = gradients(plain)
    for name, value in expected.items():
        assert torch.equal(found[name], again[name]), name
        assert relative_error(found[name], value) <= 0.15, name


def test_a_vocabulary_whose_rows_sum_in_other_orders_is_refused():
    odd = build("llama", device=DEVICE, sizes={"vocab_size": 2047})
    with pytest.raises(ValueError, match="log_softmax of 2047 logits.*expected a multiple of 4"), hf.on_policy(odd):
        pass
