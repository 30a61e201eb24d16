"""The measurements of one version of a model: its text, its perplexity, and its decode speed.

passage.txt, on which perplexity is measured, is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland"
(1865; chapter 1 and the first half of chapter 2), which is in the public domain.
"""

import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.demo.progress import passes
from examples.demo.report import Count, Measurement, weights
from fp8moe.decode import GraphDecoder
from fp8moe.hf import versions
from fp8moe.runtime.backend import use_cuda

WINDOW = 1024
GRAPH_RUNS = 5


def runs_kernels(device: torch.device) -> bool:
    return use_cuda(torch.empty(0, device=device))


def encode(tokenizer: Any, prompt: str) -> Tensor:
    """Return the prompt as the user's turn of a conversation, (1, T)."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, question: Tensor, tokens: Tensor, new_tokens: int, label: str) -> Measurement:
    """Answer the question (1, T) greedily and score the passage ``tokens`` (T,)."""
    end = tokenizer.eos_token_id
    with passes(model, 2 + new_tokens, f"{label}: text"):
        list(generate(model, question, 2, end))  # compiles kernels, so that the next run measures only decoding
        answer, clock = [], []
        for token in generate(model, question, new_tokens, end):
            answer.append(token)
            clock.append(time.perf_counter())
    # The first token includes reading the prompt.
    speed = (len(answer) - 1) / (clock[-1] - clock[0]) if len(answer) > 1 else math.nan
    # The reference reads the routing on the host, which a graph cannot hold.
    graphs = decode_with_graphs(model, question, new_tokens) if runs_kernels(question.device) else None
    return Measurement(
        label=label,
        text=tokenizer.decode(answer, skip_special_tokens=True).strip(),
        perplexity=perplexity_of_passage(model, tokens, label),
        tokens_per_second=speed,
        graph_tokens_per_second=graphs and graphs[0],
        graph_tokens_equal=graphs and Count(equal_tokens(answer, graphs[1]), len(answer)),
        weights=weights(model),
    )


@torch.inference_mode()
def perplexity_of_passage(model: Any, tokens: Tensor, label: str) -> float:
    """Return the perplexity of the passage ``tokens`` (T,), in windows."""
    windows = [window for window in tokens.split(WINDOW) if len(window) > 1]
    with passes(model, len(windows), f"{label}: perplexity"):
        return perplexity(model, windows)


def passage() -> str:
    """Return the text for perplexity: 3383 tokens for SmolLM2."""
    return Path(__file__).with_name("passage.txt").read_text(encoding="utf-8")


def generate(model: Any, tokens: Tensor, count: int, end: int | None) -> Iterator[int]:
    """Yield up to `count` greedy tokens after `tokens` (1, T), one by one, stopping before `end`."""
    name = versions.cache_name(model.forward)
    cache = None
    for _ in range(count):
        output = model(input_ids=tokens, use_cache=True, **{name: cache})
        cache = output[name]
        tokens = output.logits[:, -1:].argmax(-1)
        token = tokens.item()
        if token == end:
            return
        yield token


def decode_with_graphs(model: Any, question: Tensor, count: int) -> tuple[float, list[int]]:
    """Tokens/s and the tokens of greedy decoding by `GraphDecoder`: exactly `count`, whatever ends the text.

    Of some runs the fastest counts, less what reading the prompt takes.
    """
    decoder = GraphDecoder(model, max_length=question.shape[1] + count)

    def run(count: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        tokens = decoder.generate(question, max_new_tokens=count, eos_token_id=())[0, question.shape[1] :].tolist()
        return time.perf_counter() - start, tokens

    prompts = [run(1) for _ in range(GRAPH_RUNS)]
    answers = [run(count) for _ in range(GRAPH_RUNS)]
    decoder.close()
    speed = (count - 1) / (min(answers)[0] - min(prompts)[0]) if count > 1 else math.nan
    return speed, answers[0][1]


def equal_tokens(answer: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two texts in tokens."""
    pairs = zip(answer, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(other)))


def perplexity(model: Any, windows: Iterable[Tensor]) -> float:
    """exp of the mean negative log-likelihood of every token but each window's first, given those before it there.

    windows: (T,) int64 tensors of at least two tokens on the model's device. Log-likelihoods are summed in float32.
    """
    total, count = 0.0, 0
    for window in windows:
        logits = model(input_ids=window[None]).logits[0, :-1].float()
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return math.exp(total / count)
