"""A small mixture of experts learns a toy task by policy gradient: it trains in float32 and generates in FP8.

Every step refits the FP8 model with the weights that the last one has made, lets a `GraphDecoder` of it write answers,
and trains on these. The advantage of an answer is its reward among those to the same prompt (GRPO: DeepSeekMath,
arXiv:2402.03300, section 4.1); each batch is used once and there is no reference model, so that nothing is to be
clipped and no divergence to be added.

The two models hold the same policy but for rounding, and the one that is trained is not quite the one that has written
the answers. Its gradient is therefore weighted with the ratio of both probabilities of a token, cut at `MOST_WEIGHT`
(truncated importance sampling: Ionides, 2008). With "replay" the trainer takes the experts that the generator took;
with "on-policy" it has linears and experts in FP8, too, and both give a token the same probability, bit by bit.

Shapes: B = PROMPTS * GROUP sequences of PROMPT + ANSWER tokens.
"""

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

import fp8moe
from examples.demo.upcycle import quantize
from fp8moe import GroupedExperts, hf, replace_linears
from fp8moe.decode import GraphDecoder
from fp8moe.runtime.progress import progress

PROMPTS, GROUP = 8, 8  # prompts of a step, and answers to each prompt
PROMPT, ANSWER = 2, 6  # tokens
SIZES = {
    **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
    **{"max_position_embeddings": PROMPT + ANSWER, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
LEVELS = ("replay", "on-policy")
LEARNING_RATE = 3e-3
MOST_WEIGHT = 2.0


class Step(NamedTuple):
    """reward: mean of the answers. apart, most_apart: mean and largest difference of the logarithms of the
    probabilities that trainer and generator give a token of the answers."""

    reward: float
    apart: float
    most_apart: float


def make_trainer(seed: int, device: torch.device, level: str | None = None) -> Any:
    """Return a Mixtral model with random weights in float32; for "on-policy" linears and experts run in FP8."""
    torch.manual_seed(seed)
    config = MixtralConfig(**SIZES)
    # A loop over the experts runs in float32 on any device.
    trainer = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").to(device)
    if level == "on-policy":
        replace_linears(trainer, master_dtype=torch.float32)
        for layer in trainer.model.layers:
            layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts, master_dtype=torch.float32)
    return trainer


def make_generator(trainer: Any, level: str | None = None) -> Any:
    """Return a model with the trainer's weights: linears and experts in FP8, the rest in bfloat16, or float32 on a CPU.

    For "on-policy" the rest is in bfloat16 on a CPU, too.
    """
    in_bfloat16 = level == "on-policy" or trainer.device.type == "cuda"
    how = {"dtype": torch.bfloat16 if in_bfloat16 else torch.float32, "experts_implementation": "eager"}
    generator = AutoModelForCausalLM.from_config(copy.deepcopy(trainer.config), **how).to(trainer.device).eval()
    generator.load_state_dict(trainer.state_dict())
    quantize(generator)
    return generator


def rewards_of(tokens: Tensor) -> Tensor:
    """Return the share of an answer's tokens that are odd after even or even after odd: (B, T) -> (B,)."""
    odd = tokens % 2
    return (odd[:, PROMPT:] != odd[:, PROMPT - 1 : -1]).float().mean(1)


def advantages_of(rewards: Tensor) -> Tensor:
    """Normalize rewards by mean and standard deviation of the answers to the same prompt: (B,) -> (B,)."""
    groups = rewards.view(PROMPTS, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def train(steps: int, seed: int, device: torch.device, level: str | None = None) -> list[Step]:
    """Measurements of each step, before its update. level: one of LEVELS, or None.

    On a GPU, and for "on-policy", the decoder is batch invariant: what it says of a token does not depend on the other
    sequences.
    """
    trainer = make_trainer(seed, device, level)
    generator = make_generator(trainer, level)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=LEARNING_RATE)
    draw = torch.Generator().manual_seed(seed)
    measured = []
    with fp8moe.batch_invariant(device.type == "cuda" or level == "on-policy"):
        decoder = GraphDecoder(generator, batch_sizes=(PROMPTS * GROUP,), max_length=PROMPT + ANSWER)
        for _ in progress(range(steps), total=steps, label=f"seed {seed}", unit=" steps"):
            fp8moe.refit(generator, trainer.state_dict())
            prompts = torch.randint(SIZES["vocab_size"], (PROMPTS, PROMPT), generator=draw).repeat_interleave(GROUP, 0)
            tokens, logprobs, *routing = decoder.generate(
                prompts.to(device),
                max_new_tokens=ANSWER,
                do_sample=True,
                temperature=1.0,
                seed=torch.randint(2**62, (PROMPTS * GROUP,), generator=draw),
                return_logprobs=True,
                return_routing=level == "replay",
            )
            if level == "on-policy":
                block = hf.on_policy(trainer)
            else:
                block = hf.replay_routing(trainer, *routing) if routing else nullcontext()
            with block:
                logits = trainer(tokens[:, :-1]).logits[:, PROMPT - 1 :]
            measured.append(update(trainer, optimizer, logits, tokens, logprobs))
    return measured


def update(trainer: Any, optimizer: torch.optim.Optimizer, logits: Tensor, tokens: Tensor, logprobs: Tensor) -> Step:
    """Take a step of the optimizer.

    logits: of the answers, (B, ANSWER, V), by the trainer. tokens: (B, T). logprobs: of the answers, (B, ANSWER), by
    the generator.
    """
    trained = logits.float().log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
    rewards = rewards_of(tokens)
    difference = trained.detach() - logprobs
    weights = difference.exp().clamp(max=MOST_WEIGHT)
    loss = -(weights * advantages_of(rewards)[:, None] * trained).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    measured = rewards.mean(), difference.abs().mean(), difference.abs().max()
    return Step(*(float(f"{value.item():.5g}") for value in measured))  # what is not equal stays above 0
