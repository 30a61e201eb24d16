"""The output layer in FP8 on the GPU: whole decoders, with and without graphs."""

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder
from fp8moe.hf import register
from tests.decode.test_decode_fp8_cache import forced_logits
from tests.gpu.test_decode import make_model
from tests.gpu.test_fp8_cache import steps_after, tokens_of
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_decoder_equals_its_uncaptured_steps(name, fuse):
    model = make_model(name)
    how = {"batch_sizes": (1, 3), "max_length": 64, "output_dtype": FP8, "fuse": fuse}
    captured, eager = GraphDecoder(model, **how), GraphDecoder(model, **how, capture=False)
    assert captured.captured and captured.capabilities.output is not None
    # None of these lengths has a graph for its prefill, which then has the same shapes in both decoders.
    for length, pads in ((7, None), (20, (5, 0, 13)), (33, None)):
        ids = prompts(3, length, seed=length, device=DEVICE)
        mask = None if pads is None else left_padded(ids, *pads).bool()
        for got, wanted in zip(
            *(steps_after(decoder.steps[3], ids, mask) for decoder in (captured, eager)), strict=True
        ):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_logits_are_close_to_those_of_the_own_layer(name):
    model = make_model(name)
    ids = prompts(3, 30, seed=1, device=DEVICE)
    fp8, own = (
        forced_logits(GraphDecoder(model, batch_sizes=(3,), max_length=64, output_dtype=dtype), ids)
        for dtype in (FP8, None)
    )
    assert 0 < (fp8 - own).norm() <= 0.06 * own.norm()


def test_a_refit_reaches_the_graphs():
    model, other = (make_model("qwen3_moe") for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(torch.rand(128, 1, device=DEVICE).bfloat16())
    how = {"max_length": 64, "output_dtype": FP8}
    ids = prompts(1, 9, device=DEVICE)
    decoder = GraphDecoder(model, **how)
    before = tokens_of(decoder, ids)
    fp8moe.refit(model, other)
    after, fresh = tokens_of(decoder, ids), tokens_of(GraphDecoder(other, **how), ids)
    assert torch.equal(after[0], fresh[0]) and torch.equal(after[1], fresh[1])
    assert not torch.equal(after[1], before[1])


def test_batch_invariant_prompts_requests_and_steps():
    """A token has the same bits in prompts, beside others, and decoded."""
    register()
    model = make_model("qwen3_moe")
    with fp8moe.batch_invariant():
        decoder = GraphDecoder(model, batch_sizes=(1, 2), max_length=256, output_dtype=FP8)
        ids = prompts(1, 140, seed=2, device=DEVICE)
        tokens, logprobs = tokens_of(decoder, ids)
        longer = tokens_of(decoder, tokens[:, :146])
        assert torch.equal(longer[0][:, :152], tokens) and torch.equal(longer[1][:, :6], logprobs[:, 6:])
        asked = {"max_new_tokens": 12, "eos_token_id": (), "return_logprobs": True}
        requests = [{"input_ids": row, **asked} for row in (prompts(1, 9, device=DEVICE)[0], ids[0])]
        new, bits = dict(decoder.run(requests))[1]
        assert torch.equal(new, tokens[0, 140:]) and torch.equal(bits, logprobs[0])
