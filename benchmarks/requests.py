"""Many requests of different lengths over the slots of one GraphDecoder: `python -m benchmarks.requests [--model M]`.

`of_steady` is the rate of new tokens over that of full batches of SLOTS sequences (`benchmarks/decode.py`), prompts
read in between included. Lengths are spread evenly in their logarithm; prompts are random, weights too.
"""

import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import command
from benchmarks.decode import random_prompts, step_seconds
from benchmarks.report import Threshold, format_table
from benchmarks.whole_models import CONFIGS, build
from fp8moe.decode import GraphDecoder

REQUESTS = 1000
SLOTS = 64
SIZES = (4, 16, SLOTS)  # the smaller ones for the last requests
PROMPTS, ANSWERS = (16, 2048), (16, 512)  # shortest and longest
STEADY_PROMPT = 512
LIMIT, AIM = 0.6, 0.72
COLUMNS = ("requests", "slots", "seconds", "prompt_tokens", "new_tokens", "tokens_s", "steady_tokens_s", "of_steady")


def lengths(count: int) -> Iterator[tuple[int, int]]:
    """Of prompts and answers."""
    draw = random.Random(0)
    for _ in range(count):
        yield tuple(round(math.exp(draw.uniform(*map(math.log, bounds)))) for bounds in (PROMPTS, ANSWERS))


def measure(model: Any, count: int = REQUESTS) -> dict:
    decoder = GraphDecoder(model, batch_sizes=SIZES, max_length=PROMPTS[1] + ANSWERS[1])
    steady = SLOTS / step_seconds(decoder, random_prompts(model, SLOTS, STEADY_PROMPT))
    requests = [
        {"input_ids": random_prompts(model, 1, prompt)[0], "max_new_tokens": answer, "eos_token_id": ()}
        for prompt, answer in lengths(count)
    ]
    warm = sum(len(tokens) for _, tokens in decoder.run(requests[: 2 * SLOTS]))  # compiles for the sizes that come
    torch.cuda.synchronize()
    begin = time.perf_counter()
    new = sum(len(tokens) for _, tokens in decoder.run(requests))
    torch.cuda.synchronize()
    spent = time.perf_counter() - begin
    decoder.close()
    asked = sum(request["max_new_tokens"] for request in requests)
    if new != asked or not warm:
        raise RuntimeError(f"{asked} tokens were asked for, {new} came")
    return {
        **{"what": "requests", "requests": count, "slots": SLOTS, "seconds": spent},
        **{"prompt_tokens": sum(len(request["input_ids"]) for request in requests), "new_tokens": new},
        **{"tokens_s": new / spent, "steady_tokens_s": steady, "of_steady": new / spent / steady},
    }


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    return [
        Threshold("new tokens/s of many requests, over full batches", row["of_steady"], LIMIT, aim=AIM, at_least=True)
        for row in rows
    ]


def run() -> dict:
    """What `tools.validate` records."""
    gpu = command.start()
    rows = [measure(build(next(iter(CONFIGS))))]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("requests", "many requests over the slots of a decoder")
    parser.add_argument("--model", choices=CONFIGS, default=next(iter(CONFIGS)))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    args = parser.parse_args(argv)
    gpu = command.start()
    rows = [measure(build(args.model), args.requests)]
    made = command.result(gpu, rows, thresholds(rows), model=args.model)
    command.finish(args.out / "requests.json", made, format_table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
