"""A real language model before and after its linears become FP8: text, perplexity, memory and speed side by side.

The passage that perplexity is measured on, data/passage.txt, is the beginning of Lewis Carroll's "Alice's Adventures in
Wonderland" (1865; chapter 1 and the first half of chapter 2), which is in the public domain.
"""

import math
import shutil
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8moe import config, smollm2
from fp8moe.kernels.backend import use_cuda
from fp8moe.layers.linear import replace_linears
from fp8moe.smollm2 import SetupError

WINDOW = 1024


@dataclass(frozen=True)
class Measurement:
    """What one version of the model did: its greedy answer, decode speed in tokens/s, perplexity of the passage."""

    text: str
    tokens_per_second: float
    perplexity: float


def run(prompt: str, *, new_tokens: int = 48, device: str = "auto", gguf: str | None = None) -> None:
    """Load the model, measure it in bfloat16 and in FP8, and print both.

    Raises:
        SetupError: a package, the model or the device is missing.
    """
    if new_tokens < 1:
        raise SetupError(f"--new-tokens is {new_tokens}; it must be at least 1")
    place = pick_device(device)
    model, tokenizer = smollm2.load(smollm2.find_gguf(gguf), config.settings.cache_dir)
    sizes = {name: tensor.nbytes for name, tensor in stored_tensors(model)}
    # CPUs without bfloat16 matrix units take five times longer in bfloat16, so there both versions compute in float32.
    model.to(place, torch.bfloat16 if place.type == "cuda" else torch.float32)

    before = measure(model, tokenizer, prompt, new_tokens, "bf16")
    replaced = set(replace_linears(model))
    after = measure(model, tokenizer, prompt, new_tokens, "FP8")

    backend = "cuda" if use_cuda(torch.empty(0, device=place)) else "reference"
    print(f"SmolLM2-135M-Instruct on {device_name(place)}: {len(replaced)} linears in FP8, backend {backend}")
    if place.type == "cpu":
        print("(on a CPU both versions compute in float32 from the weights that they store)")
    print(f"\nprompt: {prompt}\n")
    print(side_by_side(f"bf16\n\n{before.text}", f"FP8\n\n{after.text}"))
    print()
    linears = sum(size for name, size in sizes.items() if name.rpartition(".")[0] in replaced)
    fp8_linears = sum(tensor.nbytes for name in replaced for _, tensor in stored_tensors(model.get_submodule(name)))
    everything = sum(sizes.values())
    rest = everything - linears
    rows = [
        ("", "bf16", "FP8", "FP8 / bf16"),
        compare("perplexity of the passage", before.perplexity, after.perplexity, "{:.3f}"),
        compare("replaced linears, MB", linears / 1e6, fp8_linears / 1e6),
        compare("embedding (also lm_head), norms, MB", rest / 1e6, rest / 1e6),
        compare("all weights, MB", everything / 1e6, (rest + fp8_linears) / 1e6),
        compare("decode, tokens/s", before.tokens_per_second, after.tokens_per_second),
    ]
    print(table(rows))
    print(f"\nFP8 changes the perplexity by {after.perplexity / before.perplexity - 1:+.2%}.")


def compare(label: str, bf16: float, fp8: float, form: str = "{:.1f}") -> tuple[str, ...]:
    return label, form.format(bf16), form.format(fp8), f"{fp8 / bf16:.3f}"


def pick_device(name: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda": auto takes a GPU that PyTorch can use.

    Raises:
        SetupError: "cuda" without a GPU, or a backend that cannot run on the device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError("--device cuda, but PyTorch finds no usable GPU here: use --device cpu")
    device = torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
    try:
        use_cuda(torch.empty(0, device=device))
    except RuntimeError as error:
        raise SetupError(str(error)) from error
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Named parameters and buffers that a checkpoint holds; tied ones once."""
    seen = set()
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, prompt: str, new_tokens: int, label: str) -> Measurement:
    """Answer the prompt greedily and score the passage."""
    device = model.device
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    start = chat["input_ids"].to(device)
    end = tokenizer.eos_token_id
    list(generate(model, start, 2, end))  # compiles kernels, so that the next run measures only decoding

    answer, clock = [], []
    for token in progress(generate(model, start, new_tokens, end), new_tokens, f"{label}: text"):
        answer.append(token)
        clock.append(time.perf_counter())
    # The first token includes reading the prompt.
    speed = (len(answer) - 1) / (clock[-1] - clock[0]) if len(answer) > 1 else math.nan

    tokens = tokenizer(passage(), return_tensors="pt")["input_ids"][0].to(device)
    windows = [window for window in tokens.split(WINDOW) if len(window) > 1]
    score = perplexity(model, progress(windows, len(windows), f"{label}: perplexity"))
    return Measurement(tokenizer.decode(answer, skip_special_tokens=True).strip(), speed, score)


def passage() -> str:
    """The text that perplexity is measured on: 3383 tokens for SmolLM2."""
    return resources.files("fp8moe").joinpath("data/passage.txt").read_text(encoding="utf-8")


def progress(steps: Iterable, total: int, label: str) -> Iterable:
    from tqdm import tqdm

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


def side_by_side(left: str, right: str) -> str:
    """Two texts as two columns that fill the terminal."""
    width = max(30, (min(shutil.get_terminal_size().columns, 120) - 3) // 2)

    def wrap(text: str) -> list[str]:
        return [line for part in text.splitlines() for line in textwrap.wrap(part, width) or [""]]

    pairs = zip_longest(wrap(left), wrap(right), fillvalue="")
    return "\n".join(f"{a:<{width}} | {b}".rstrip() for a, b in pairs)


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows of cells with aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "   ".join(cells).rstrip()

    return "\n".join(line(row) for row in rows)
