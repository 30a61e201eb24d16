"""Trainers in FP8, generators of the same sizes, and what both say of the same tokens, for tests of `on_policy`."""

import torch

import fp8moe
from fp8moe import hf
from fp8moe.decode import GraphDecoder
from fp8moe.layers import GroupedExperts, replace_linears
from tests.transformers_models import BASE, left_padded, prompts, random_model

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32},
    **{"max_position_embeddings": 512, "initializer_range": 0.1},
}
KINDS = {
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8, "sliding_window": 9},
    "qwen3": {},
    "llama": {},
}


def build(kind, dtype=torch.bfloat16, device="cpu", **how):
    """The same model for the same arguments, in eval mode, without FP8."""
    return random_model(kind, BASE | SIZES | KINDS[kind] | how.pop("sizes", {}), dtype=dtype, **how).to(device)


def to_fp8(model, master_dtype=None, experts=True):
    """Put linears and, if asked for, experts in FP8 into the model, with masters or frozen."""
    replace_linears(model, skip=("lm_head",), master_dtype=master_dtype)
    for layer in model.model.layers if experts else ():
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts, master_dtype=master_dtype)
    return model


def trainer_of(model, dtype=torch.bfloat16, experts=True):
    """Masters of this dtype, and other weights than those that `build` has made."""
    generator = torch.Generator(model.device).manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator, device=value.device).to(value.dtype) * 0.02)
    return to_fp8(model, dtype, experts).train()


def decoder_of(generator, trainer, **how):
    """A decoder in batch_invariant() with the trainer's weights."""
    with fp8moe.batch_invariant():
        decoder = GraphDecoder(generator, **how)
    fp8moe.refit(generator, trainer)
    return decoder


def generated(decoder, ids, mask=None, **how):
    with fp8moe.batch_invariant():
        return decoder.generate(ids, attention_mask=mask, return_logprobs=True, **how)


def logprobs_of(model, tokens, **inputs):
    """The log probabilities (B, T - 1) that a model in on_policy gives each token but the first."""
    with hf.on_policy(model):
        logits = model(tokens, **inputs).logits
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def assert_equal_bits(decoder, trainer, lengths, new):
    """Answers to prompts of these lengths: what the decoder and the trainer say of each token, in batches and alone."""
    device, longest = trainer.device, max(lengths)
    ids = prompts(len(lengths), longest, device=device)
    mask = left_padded(ids, *(longest - length for length in lengths))
    whole = torch.cat([mask, mask.new_ones(len(lengths), new)], 1)
    for how in ({}, {"do_sample": True, "seed": 3, "temperature": 1.0}):
        tokens, expected = generated(decoder, ids, mask, max_new_tokens=new, eos_token_id=(), **how)
        found = logprobs_of(trainer, tokens, attention_mask=whole)
        assert torch.equal(found[:, -new:], expected)
        rows = [row[longest - length :] for row, length in zip(tokens, lengths, strict=True)]
        positions = torch.cat([torch.arange(len(row), device=device) for row in rows])[None]
        packed = logprobs_of(trainer, torch.cat(rows)[None], position_ids=positions)[0]
        end = 0
        for row, answer in zip(rows, expected, strict=True):
            end += len(row)
            assert torch.equal(packed[end - 1 - new : end - 1], answer)
        assert torch.equal(logprobs_of(trainer, rows[-1][None])[0, -new:], expected[-1])
    return tokens, expected, whole
