"""Many requests of different lengths over the slots of one decoder, with `GraphDecoder.run` and with the server."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import torch

import fp8moe
from benchmarks.decode import random_prompts, step_seconds, without_fa3
from benchmarks.report import Bar, Benchmark, Option
from benchmarks.whole_models import CONFIGS, build
from fp8moe.decode import GraphDecoder

COUNT, CLIENTS = 1000, 64
GOES_EVERY = 10  # one of this many clients leaves early
SLOTS = 64
SIZES = (4, 16, SLOTS)  # the smaller batch sizes serve the last requests
PROMPTS, ANSWERS = (16, 2048), (16, 512)  # shortest and longest length in tokens
STEADY_PROMPT = 512
MODEL = Option(next(iter(CONFIGS)), tuple(CONFIGS))


def lengths(count: int) -> list[tuple[int, int]]:
    """Draw lengths of prompts and answers, uniform in their logarithm, always with the same seed."""
    draw = random.Random(0)
    return [
        tuple(round(math.exp(draw.uniform(*map(math.log, ends)))) for ends in (PROMPTS, ANSWERS)) for _ in range(count)
    ]


def make_decoder(model: Any) -> GraphDecoder:
    """Make the decoder that serves all requests."""
    return GraphDecoder(model, batch_sizes=SIZES, max_length=PROMPTS[1] + ANSWERS[1])


def make_requests(model: Any, count: int) -> list[dict]:
    """Make requests with random prompts; `lengths` draws the lengths of prompts and answers."""
    return [
        {"input_ids": random_prompts(model, 1, prompt)[0], "max_new_tokens": answer, "eos_token_id": ()}
        for prompt, answer in lengths(count)
    ]


def run_all(decoder: GraphDecoder, requests: Sequence[dict]) -> list[Any]:
    """Run all requests; return the tokens of each."""
    return [tokens for _, tokens in decoder.run(requests)]


def clocked(call: Callable[[], list], asked: int) -> tuple[float, int]:
    """Return the seconds and tokens of a call. RuntimeError unless it generated as many tokens as were asked for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    new = sum(map(len, call()))
    torch.cuda.synchronize()
    if new != asked:
        raise RuntimeError(f"{asked} tokens were asked for, {new} came")
    return time.perf_counter() - begin, new


def measure_requests(model: str = MODEL.default, requests: int = COUNT) -> Iterator[dict]:
    """Measure new tokens/s, prefill included. `of_steady`: ratio to the rate of decode with full batches."""
    built = build(model)
    asked = make_requests(built, requests)
    with without_fa3():
        decoder = make_decoder(built)
        steady = SLOTS / step_seconds(decoder, random_prompts(built, SLOTS, STEADY_PROMPT))
        run_all(decoder, asked[: 2 * SLOTS])  # compiles kernels for the batch sizes in use
        seconds, new = clocked(lambda: run_all(decoder, asked), sum(one["max_new_tokens"] for one in asked))
        decoder.close()
    tokens = {"prompt_tokens": sum(len(one["input_ids"]) for one in asked), "new_tokens": new}
    row = {"what": "requests", "requests": requests, "slots": SLOTS, "seconds": seconds, **tokens}
    yield row | {"tokens_s": new / seconds, "steady_tokens_s": steady, "of_steady": new / seconds / steady}


TOKENS = ("prompt_tokens", "new_tokens", "tokens_s", "steady_tokens_s", "of_steady")
REQUESTS = Benchmark(
    "requests",
    measure_requests,
    ("requests", "slots", "seconds", *TOKENS),
    [Bar("new tokens/s of many requests, over full batches", "of_steady", 0.6, 0.72, at_least=True)],
    {"model": MODEL, "requests": Option(COUNT)},
)


class Clients:
    """Clients that pass requests directly to the manager of `fp8moe serve`, without HTTP."""

    def __init__(self, model: Any, decoder: GraphDecoder):
        from fp8moe.serving import DecoderManager

        self.model, self.manager = model, DecoderManager(decoder)

    async def ask(self, prompt: list[int], new: int, stream: bool, leaves_after: int | None = None) -> list[int]:
        """Return the tokens that one client received. leaves_after: the client leaves after that many tokens."""
        from fp8moe.serving.fields import Asked

        options = {"max_new_tokens": new, "eos_token_id": ()}
        asked = Asked([prompt], options, self.model.generation_config, [], None, None, stream, False, True)
        tokens: list[int] = []
        async with aclosing(self.manager.start(prompt, asked, None).pieces()) as pieces:
            async for piece in pieces:
                tokens += piece.tokens
                if leaves_after is not None and len(tokens) >= leaves_after:
                    break
        return tokens

    async def whole(self, prompt: list[int], new: int) -> list[int]:
        """Return the tokens of a whole answer."""
        return await self.ask(prompt, new, stream=False)

    async def stream(self, prompt: list[int], new: int, leaves_after: int | None = None) -> list[int]:
        """Return the tokens of a stream."""
        return await self.ask(prompt, new, stream=True, leaves_after=leaves_after)


async def _together(calls: Iterable[Any]) -> list[Any]:
    return await asyncio.gather(*calls)


def measure_serving(model: Any, count: int) -> Iterator[dict]:
    """Yield a row each for `GraphDecoder.run`, the server's whole answers and its streams.

    All requests start at the same time.
    """
    decoder = make_decoder(model)
    requests = make_requests(model, count)
    clients = Clients(model, decoder)
    lists = [(request["input_ids"].tolist(), request["max_new_tokens"]) for request in requests]
    ways: dict[str, Callable[[], list]] = {"run": lambda: run_all(decoder, requests)}
    for how in (clients.whole, clients.stream):
        ways[how.__name__] = lambda how=how: asyncio.run(_together([how(*request) for request in lists]))
    first = None
    for how, call in ways.items():
        # The first run captures prefill graphs. Their lengths depend on which short prompts are prefilled together.
        call()
        seconds, new = clocked(call, sum(answer for _, answer in lists))
        first = first or seconds
        row = {"what": "serve", "how": how, "requests": count, "slots": SLOTS, "seconds": seconds}
        yield row | {"new_tokens": new, "tokens_s": new / seconds, "of_run": first / seconds}
    clients.manager.stop()
    decoder.close()


@fp8moe.batch_invariant()
def check_clients(model: Any, count: int) -> dict:
    """Count the clients that got the right tokens, and the requests that are still open.

    The right tokens are those of `generate`. A client that left early should have the first of these tokens.
    """
    decoder = make_decoder(model)
    prompts = [random_prompts(model, 1, 8 + 7 * index % 400)[0] for index in range(count)]
    answers = [answer for _, answer in lengths(count)]
    expected = [
        decoder.generate(ids[None], max_new_tokens=answer, eos_token_id=())[0, len(ids) :].tolist()
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    clients, calls, gone = Clients(model, decoder), [], []
    for index, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        gone.append(index % GOES_EVERY == 0)
        if index % 2 and not gone[-1]:
            calls.append(clients.whole(ids.tolist(), answer))
        else:
            calls.append(clients.stream(ids.tolist(), answer, answer // 2 if gone[-1] else None))
    got = asyncio.run(_together(calls))
    equal = sum(
        tokens == wanted[: len(tokens)] and (early or len(tokens) == len(wanted))
        for tokens, wanted, early in zip(got, expected, gone, strict=True)
    )
    left = len(clients.manager.open)
    clients.manager.stop()
    decoder.close()
    return {"what": "clients", "clients": count, "gone": sum(gone), "equal": equal, "left": left}


def serve(model: str = MODEL.default, requests: int = COUNT, clients: int = CLIENTS) -> Iterator[dict]:
    """Measure the server compared with `GraphDecoder.run`, and check that it gives the same tokens."""
    built = build(model)
    yield from measure_serving(built, requests)
    yield check_clients(built, clients)


SERVE = Benchmark(
    "serve_gpu",
    serve,
    {
        "serve": ("how", "requests", "slots", "seconds", "new_tokens", "tokens_s", "of_run"),
        "clients": ("clients", "gone", "equal", "left"),
    },
    [
        Bar(
            "new tokens/s of serve ({how}), over run", "of_run", 0.9, where={"how": ("whole", "stream")}, at_least=True
        ),
        Bar(
            *("clients that got the tokens of generate", lambda row: row["equal"] / row["clients"], 1.0),
            **{"where": {"what": "clients"}, "at_least": True},
        ),
    ],
    {"model": MODEL, "requests": Option(COUNT), "clients": Option(CLIENTS)},
)
