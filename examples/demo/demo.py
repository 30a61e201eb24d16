"""A real language model in bfloat16, in FP8 and as an FP8 mixture of experts: text, perplexity, memory and speed.

The passage that perplexity is measured on, data/passage.txt, is the beginning of Lewis Carroll's "Alice's Adventures in
Wonderland" (1865; chapter 1 and the first half of chapter 2), which is in the public domain.
"""

import math
import time
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from examples.demo import report as demo_report
from examples.demo import smollm2
from examples.demo.report import Measurement
from examples.demo.smollm2 import SetupError
from fp8moe.layers.linear import replace_linears
from fp8moe.runtime import config
from fp8moe.runtime.backend import use_cuda

WINDOW = 1024
GRAPH_RUNS = 5


def run(prompt: str, *, new_tokens: int = 48, device: str = "auto", gguf: str | None = None) -> None:
    """Load the model, measure its three versions one after the other, and print them side by side.

    Raises:
        SetupError: a package, the model or the device is missing.
    """
    if new_tokens < 1:
        raise SetupError(f"--new-tokens is {new_tokens}; it must be at least 1")
    place = pick_device(device)
    dense = smollm2.prepare(smollm2.find_gguf(gguf), config.settings.cache_dir)
    mixture = smollm2.prepare_mixture(dense)
    from fp8moe.integrations.transformers import load_model

    # CPUs without bfloat16 matrix units take five times longer in bfloat16, so there all versions compute in float32.
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    model, tokenizer = smollm2.load(dense)
    model.to(place, dtype)
    question = encode(tokenizer, prompt).to(place)
    tokens = tokenizer(passage(), return_tensors="pt")["input_ids"][0].to(place)

    def measured(model: Any, label: str) -> Measurement:
        return measure(model, tokenizer, question, tokens, new_tokens, label)

    columns = [measured(model, "bf16")]
    layers = model.config.num_hidden_layers
    replace_linears(model, skip=("lm_head", *smollm2.kept_in_bf16(layers)))
    columns.append(measured(model, "FP8"))
    del model
    columns.append(measured(load_model(mixture, dtype=dtype, device=place), "FP8 MoE"))

    print(f"SmolLM2-135M-Instruct on {device_name(place)}, backend {'cuda' if runs_kernels(place) else 'reference'}\n")
    print(demo_report.legend(layers, mixture))
    if place.type == "cpu":
        print("\n(on a CPU all of them compute in float32 from the weights that they store)")
    print(f"\nprompt: {prompt}\n")
    print(demo_report.side_by_side([f"{column.label}\n\n{column.text}" for column in columns]))
    print()
    print(demo_report.results(columns))


def pick_device(name: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda": auto takes a GPU that PyTorch can use.

    Raises:
        SetupError: "cuda" without a GPU, or a backend that cannot run on the device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError("--device cuda, but PyTorch finds no usable GPU here: use --device cpu")
    device = torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
    try:
        runs_kernels(device)
    except RuntimeError as error:
        raise SetupError(str(error)) from error
    return device


def runs_kernels(device: torch.device) -> bool:
    return use_cuda(torch.empty(0, device=device))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def encode(tokenizer: Any, prompt: str) -> Tensor:
    """The prompt as the user's turn of a conversation: (1, T)."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, question: Tensor, tokens: Tensor, new_tokens: int, label: str) -> Measurement:
    """Answer the question (1, T) greedily and score the passage ``tokens`` (T,)."""
    end = tokenizer.eos_token_id
    list(generate(model, question, 2, end))  # compiles kernels, so that the next run measures only decoding

    answer, clock = [], []
    for token in progress(generate(model, question, new_tokens, end), new_tokens, f"{label}: text"):
        answer.append(token)
        clock.append(time.perf_counter())
    # The first token includes reading the prompt.
    speed = (len(answer) - 1) / (clock[-1] - clock[0]) if len(answer) > 1 else math.nan
    # The reference reads the routing on the host, which a graph cannot hold.
    graphs = decode_with_graphs(model, question, new_tokens) if runs_kernels(question.device) else None

    windows = [window for window in tokens.split(WINDOW) if len(window) > 1]
    return Measurement(
        label=label,
        text=tokenizer.decode(answer, skip_special_tokens=True).strip(),
        perplexity=perplexity(model, progress(windows, len(windows), f"{label}: perplexity")),
        tokens_per_second=speed,
        graph_tokens_per_second=graphs and graphs[0],
        graph_tokens_equal=graphs and demo_report.Count(equal_tokens(answer, graphs[1]), len(answer)),
        weights=demo_report.weights(model),
    )


def passage() -> str:
    """The text that perplexity is measured on: 3383 tokens for SmolLM2."""
    return resources.files("fp8moe").joinpath("data/passage.txt").read_text(encoding="utf-8")


def progress(steps: Iterable, total: int, label: str) -> Iterable:
    return tqdm(steps, total=total, desc=label, leave=False, disable=None)


def generate(model: Any, tokens: Tensor, count: int, end: int | None) -> Iterator[int]:
    """Up to `count` greedy tokens after `tokens` (1, T), stopping before `end`. One yield a token, once it is known."""
    cache = None
    for _ in range(count):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens = output.logits[:, -1:].argmax(-1)
        token = tokens.item()
        if token == end:
            return
        yield token


def decode_with_graphs(model: Any, question: Tensor, count: int) -> tuple[float, list[int]]:
    """Tokens/s and the tokens of greedy decoding by `GraphDecoder`: exactly `count`, whatever ends the text.

    Of some runs the fastest counts, less what reading the prompt takes.
    """
    from fp8moe.integrations.decode import GraphDecoder

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
    """How many tokens the two share before they part."""
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
