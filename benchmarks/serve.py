"""What serving costs beside `GraphDecoder.run`: `python -m benchmarks.serve [--model M] [--requests N] [--clients N]`.

The requests of `benchmarks/requests.py`, all of them open from the start, through the manager of `fp8moe serve` on one
event loop, without HTTP: `of_run` is the rate of new tokens over that of `run` with the same decoder. Then clients with
prompts of their own in a batch-invariant decoder, some of which go early: `equal` counts those with the tokens that
`generate` gives alone, or the first of these.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import fp8moe
from benchmarks import command
from benchmarks.decode import random_prompts
from benchmarks.report import Threshold, format_kinds
from benchmarks.requests import ANSWERS, PROMPTS, SIZES, SLOTS, lengths
from benchmarks.whole_models import CONFIGS, build
from fp8moe.decode import GraphDecoder

REQUESTS, CLIENTS = 1000, 64
GOES_EVERY = 10  # of the clients one goes early
LIMIT = 0.9
COLUMNS = {
    "serve": ("how", "requests", "slots", "seconds", "new_tokens", "tokens_s", "of_run"),
    "clients": ("clients", "gone", "equal", "left"),
}


def word_tokenizer(model: Any) -> Any:
    """A tokenizer with a word for each token of a model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(model.config.vocab_size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")))


class Clients:
    """Ask a manager of fp8moe serve, as the handlers of transformers serve do."""

    def __init__(self, model: Any, decoder: GraphDecoder):
        from fp8moe.serving import DecoderManager

        self.model, self.tokenizer, self.manager = model, word_tokenizer(model), DecoderManager(decoder)

    def _arguments(self, prompt: list[int], new: int) -> tuple:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=new, do_sample=False)
        return self.model, self.tokenizer, {"input_ids": prompt}, config, ""

    async def whole(self, prompt: list[int], new: int) -> list[int]:
        _, _, tokens = await self.manager.generate_non_streaming(*self._arguments(prompt, new))
        return tokens

    async def stream(self, prompt: list[int], new: int, goes_after: int | None = None) -> list[int]:
        """Returns the tokens that came. goes_after: so many of them."""
        queue, streamer = self.manager.generate_streaming(*self._arguments(prompt, new))
        tokens: list[int] = []
        while (text := await queue.get()) is not None:
            if not isinstance(text, str):
                raise RuntimeError(text.msg)
            tokens += [int(word[1:]) for word in text.split()]
            if goes_after is not None and len(tokens) >= goes_after:
                streamer.cancel()
                break
        return tokens


async def _together(calls: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*calls)


def measure(model: Any, count: int = REQUESTS) -> list[dict]:
    """Rows of `run`, of whole answers and of streams."""
    decoder = GraphDecoder(model, batch_sizes=SIZES, max_length=PROMPTS[1] + ANSWERS[1])
    requests = [(random_prompts(model, 1, prompt)[0], answer) for prompt, answer in lengths(count)]
    asked = sum(answer for _, answer in requests)
    arguments = [{"input_ids": ids, "max_new_tokens": answer, "eos_token_id": ()} for ids, answer in requests]
    sum(len(tokens) for _, tokens in decoder.run(arguments[: 2 * SLOTS]))  # compiles for the sizes that come
    clients = Clients(model, decoder)
    lists = [(ids.tolist(), answer) for ids, answer in requests]
    rows = []
    for how, call in {
        "run": lambda: [tokens for _, tokens in decoder.run(arguments)],
        "whole": lambda: asyncio.run(_together([clients.whole(*request) for request in lists])),
        "stream": lambda: asyncio.run(_together([clients.stream(*request) for request in lists])),
    }.items():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        new = sum(map(len, call()))
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
        if new != asked:
            raise RuntimeError(f"{how}: {asked} tokens were asked for, {new} came")
        row = {"what": "serve", "how": how, "requests": count, "slots": SLOTS, "seconds": spent}
        rows.append(
            row | {"new_tokens": new, "tokens_s": new / spent, "of_run": rows[0]["seconds"] / spent if rows else 1}
        )
    clients.manager.stop()
    decoder.close()
    return rows


@fp8moe.batch_invariant()
def check(model: Any, count: int = CLIENTS) -> dict:
    """A row: how many of the clients got what `generate` gives alone, and how many requests are left at the end."""
    decoder = GraphDecoder(model, batch_sizes=SIZES, max_length=PROMPTS[1] + ANSWERS[1])
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
    left = len(clients.manager._open)
    clients.manager.stop()
    decoder.close()
    return {"what": "clients", "clients": count, "gone": sum(gone), "equal": equal, "left": left}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("serve", "what serving costs beside GraphDecoder.run")
    parser.add_argument("--model", choices=CONFIGS, default=next(iter(CONFIGS)))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    args = parser.parse_args(argv)
    gpu = command.start()
    model = build(args.model)
    rows = [*measure(model, args.requests), check(model, args.clients)]
    thresholds = [
        Threshold(f"new tokens/s of serve ({row['how']}), over run", row["of_run"], LIMIT, at_least=True)
        for row in rows[1:-1]
    ]
    share = rows[-1]["equal"] / args.clients
    thresholds.append(Threshold("clients that got the tokens of generate", share, 1.0, at_least=True))
    made = command.result(gpu, rows, thresholds, model=args.model)
    command.finish(args.out / "serve.json", made, *format_kinds(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
