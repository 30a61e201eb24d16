"""`python -m tools.serve_clients`: 256 clients make 3000 requests to `fp8moe serve`; writes validation/serve.json.

A process serves a tiny Mixtral with random float32 weights on the CPU, with 64 slots. Each request is drawn from KINDS.
Texts are compared with the results of `generate` for one prompt at a time, status codes with OpenAI's. `growth` is the
ratio of the server's memory after all requests to its memory after SETTLED requests. `longest_halt_ms` is the longest
time between two parts of a stream whose client reads at once; it is listed beside the time of the decoder's longest
forward, which is a decode step or the prefill of a piece of prompts.

The experts are in float32, too: on a CPU GraphDecoder is not batch invariant, and FP8 rounding could change a token.
`python -m benchmarks serve_gpu` compares a model in FP8 on a GPU.
"""

import asyncio
import json
import multiprocessing
import random
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).resolve().parent.parent / "validation" / "serve.json"
PACKAGES = ("fp8moe", "torch", "transformers", "fastapi", "uvicorn")
CLIENTS, REQUESTS, SETTLED, SLOTS, MAX_LENGTH = 256, 3000, 500, 64, 256
PROMPTS, ANSWERS, TEXTS = (4, 150), (2, 60), 60  # shortest and longest prompt and answer in tokens; number of prompts
KINDS = {"whole": 6, "stream": 6, "slow": 1, "closed": 2, "stop": 2, "one": 2, "large": 1, "malformed": 1, "unknown": 1}
"""Kinds of requests, and how often each is drawn compared with the others."""
NAME = "tiny"


def prompts() -> list[tuple[str, int]]:
    """Draw prompts, and the number of new tokens for each."""
    draw = random.Random(0)
    letters = [chr(code) for code in range(33, 127)]
    return [("".join(draw.choices(letters, k=draw.randint(*PROMPTS))), draw.randint(*ANSWERS)) for _ in range(TEXTS)]


def serve(pipe: Any, longest: Any) -> None:
    """Send the expected texts and the port, then serve until SIGTERM.

    longest: a shared value that this function sets to the time of the longest forward.
    """
    import socket

    from fp8moe.commands.serve import make_decoder
    from fp8moe.decode.scheduler import Scheduler
    from fp8moe.serving import DecoderManager, make_app
    from fp8moe.serving.server import serve as run
    from tests.decode_models import tiny_mixtral
    from tests.tiny_tokenizer import tiny_tokenizer

    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer()  # one token per letter
    model = tiny_mixtral(vocab_size=len(tokenizer), max_position_embeddings=MAX_LENGTH)  # has no end token
    decoder = make_decoder(model, SLOTS, MAX_LENGTH)
    expected = []
    for prompt, new in prompts():
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        tokens = decoder.generate(ids, max_new_tokens=new)[0, ids.shape[1] :]
        expected.append([tokenizer.decode(some, skip_special_tokens=True) for some in (tokens, tokens[:1])])
    for size in decoder.batch_sizes:  # allocate the cache of every batch size
        list(decoder.run([{"input_ids": torch.tensor([5]), "max_new_tokens": 2}] * size))
    listener = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
    manager = DecoderManager(decoder)
    pipe.send((expected, listener.getsockname()[1]))
    advance = Scheduler.advance

    def timed(scheduler: Scheduler) -> list:
        begin = time.perf_counter()
        news = advance(scheduler)
        longest.value = max(longest.value, time.perf_counter() - begin)
        return news

    Scheduler.advance = timed  # type: ignore[method-assign]
    run(make_app(NAME, model, tokenizer, manager), manager, listener)


class Clients:
    """The clients, and what they recorded: descriptions of wrong answers, and times between parts of streams."""

    def __init__(self, expected: list[list[str]], port: int, pid: int):
        self.expected, self.port, self.pid = expected, port, pid
        self.wrong: list[str] = []
        self.halts: list[float] = []
        self.counts = dict.fromkeys(KINDS, 0)
        self.sizes: list[int] = []
        self.left = REQUESTS

    async def run(self) -> None:
        draw = random.Random(1)
        await asyncio.gather(*(self.client(random.Random(draw.random())) for _ in range(CLIENTS)))

    async def client(self, draw: random.Random) -> None:
        while self.left > 0:
            self.left -= 1
            kind = draw.choices([*KINDS], [*KINDS.values()])[0]
            index = draw.randrange(TEXTS)
            try:
                await asyncio.wait_for(self.ask(kind, index, draw), 300)
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            self.counts[kind] += 1
            self.sizes.append(int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096)

    async def ask(self, kind: str, index: int, draw: random.Random) -> None:
        (prompt, new), (expected, first) = prompts()[index], self.expected[index]
        body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": new}
        if kind == "large":
            body["prompt"] = prompt * (4 * 2**20 // len(prompt))
        if kind == "unknown":
            body["beams"] = 3
        if kind == "one":
            body["max_tokens"], expected = 1, first
        if kind == "stop":
            body["stop"] = expected[len(expected) // 2 : len(expected) // 2 + 3]
            expected = expected[: expected.find(body["stop"])]
        body["stream"] = stream = kind in ("stream", "slow", "closed") or (
            kind in ("one", "stop") and draw.random() < 0.5
        )
        data = b"{" if kind == "malformed" else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            wanted = {"large": 413, "malformed": 400, "unknown": 400}.get(kind, 200)
            if status != wanted:
                raise ValueError(f"status {status}")
            if wanted != 200 or not stream:
                answer = json.loads((await reader.read()).split(b"\r\n\r\n", 1)[1])
                text = "" if wanted != 200 else answer["choices"][0]["text"]
                if text != ("" if wanted != 200 else expected):
                    raise ValueError("another text")
                return
            text, last, leaves = "", None, draw.randint(1, 20)
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    break
                if not line.startswith(b"data: "):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                now = time.monotonic()
                if last is not None and kind == "stream":
                    self.halts.append(now - last)
                last = now
                if kind == "closed" and len(text) >= leaves:
                    expected = expected[: len(text)]
                    break
                if kind == "slow":
                    await asyncio.sleep(0.05)
            if text != expected:
                raise ValueError("another text")
        finally:
            writer.close()


def run() -> dict[str, Any]:
    """Serve a model to all clients; return the content of validation/serve.json."""
    context = multiprocessing.get_context("spawn")
    (here, there), longest = context.Pipe(), context.Value("d", 0.0)
    server = context.Process(target=serve, args=(there, longest), daemon=True)
    server.start()
    expected, port = here.recv()
    clients = Clients(expected, port, server.pid)
    begin = time.monotonic()
    asyncio.run(clients.run())
    seconds = time.monotonic() - begin
    metrics = asyncio.run(get(port, "/metrics"))

    def metric(name: str) -> float:
        return float(re.search(rf"^fp8moe_{name} (\S+)", metrics, re.MULTILINE)[1])

    alive = server.is_alive()
    server.terminate()
    server.join()
    return {
        **{"clients": CLIENTS, "requests": REQUESTS, "kinds": clients.counts, "seconds": round(seconds, 1)},
        **{"wrong": clients.wrong[:20], "wrong_count": len(clients.wrong), "alive": alive},
        "answers_left": metric("answers_running") + metric("answers_waiting"),
        "growth": round(clients.sizes[-1] / clients.sizes[SETTLED] - 1, 4),
        "longest_halt_ms": round(1e3 * max(clients.halts)),
        "longest_forward_ms": round(1e3 * longest.value),
    }


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return text


def main() -> None:
    """Write validation/serve.json."""
    found = run()
    versions = {name: metadata.version(name) for name in PACKAGES}
    FILE.write_text(json.dumps({"versions": versions, **found}, indent=1) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
