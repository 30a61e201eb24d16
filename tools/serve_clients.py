"""`python -m tools.serve_clients`: many clients of `fp8moe serve` at once; the result is validation/serve.json.

Serves a tiny Mixtral with random weights over HTTP on the CPU, with 64 slots. Each client asks for 16 to 512 tokens,
greedily; three of four clients stream. Every tenth client leaves before its answer is complete. The texts that clients
receive are compared with the texts that `generate` gives, one prompt at a time. When all clients have gone, memory and
open requests are counted.

The model is entirely in float32. GraphDecoder is batch invariant only on a GPU, and with FP8 experts rounding would
occasionally decide between two tokens. `python -m benchmarks serve_gpu` makes the same comparison for an FP8 model, on
a GPU.
"""

import asyncio
import gc
import json
import random
import socket
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import uvicorn
from openai import AsyncOpenAI

from fp8moe.commands.serve import make_decoder
from fp8moe.serving import DecoderManager, make_app
from tests.decode_models import tiny_mixtral
from tests.tiny_tokenizer import tiny_tokenizer

FILE = Path(__file__).resolve().parent.parent / "validation" / "serve.json"
PACKAGES = ("fp8moe", "torch", "transformers", "fastapi", "uvicorn", "openai")
CLIENTS, GOES_EVERY, SLOTS, MAX_LENGTH = 64, 10, 64, 1024
PROMPTS, ANSWERS = (4, 400), (16, 512)  # (shortest, longest) prompt and answer, in tokens
NAME = "tiny"


def requests() -> list[tuple[str, int]]:
    """Draw the requests: (prompt, number of tokens to ask for)."""
    draw = random.Random(0)
    letters = [chr(code) for code in range(33, 127)]
    return [("".join(draw.choices(letters, k=draw.randint(*PROMPTS))), draw.randint(*ANSWERS)) for _ in range(CLIENTS)]


def goes(index: int) -> bool:
    """Return whether the client number `index` leaves before its answer is complete."""
    return index % GOES_EVERY == GOES_EVERY - 1


async def ask(client: AsyncOpenAI, index: int, prompt: str, new: int) -> str | None:
    """Send a client's request; return the text received. None if the client left while waiting for a whole answer."""
    how: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": new}
    if index % 2 and index % 4 == 1:
        call = asyncio.create_task(client.completions.create(**how))
        if goes(index):
            await asyncio.sleep(0.5)
            call.cancel()
            return None
        return (await call).choices[0].text
    text, parts = "", await client.completions.create(**how, stream=True)
    async for part in parts:
        text += part.choices[0].text
        if goes(index) and len(text) >= new:  # after half of the tokens: the text has a space between two tokens
            await parts.close()
            break
    return text


async def ask_all(url: str) -> list[str | None]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        return await asyncio.gather(*(ask(client, index, *request) for index, request in enumerate(requests())))


def tensor_bytes() -> int:
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return sum({found.untyped_storage().data_ptr(): found.untyped_storage().nbytes() for found in tensors}.values())


def run() -> dict[str, Any]:
    """Serve a model to all clients; return the content of validation/serve.json."""
    tokenizer = tiny_tokenizer()  # makes one token of each letter
    model = tiny_mixtral(vocab_size=len(tokenizer), max_position_embeddings=MAX_LENGTH)  # the model has no end token
    decoder = make_decoder(model, SLOTS, MAX_LENGTH)
    expected = []
    for prompt, new in requests():
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        tokens = decoder.generate(ids, max_new_tokens=new)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(tokens, skip_special_tokens=True))
    for size in decoder.batch_sizes:  # allocate the caches of all batch sizes
        list(decoder.run([{"input_ids": torch.tensor([5]), "max_new_tokens": 2}] * size))
    manager = DecoderManager(decoder)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(NAME, model, tokenizer, manager), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    before, calls = tensor_bytes(), decoder.stats()
    begin = time.monotonic()
    texts = asyncio.run(ask_all(f"http://127.0.0.1:{listener.getsockname()[1]}/v1"))
    seconds = time.monotonic() - begin
    with decoder.turn():  # entering waits until the last cancelled request has ended
        left, after = len(manager._open), tensor_bytes()
    new = decoder.stats().new_tokens - calls.new_tokens
    server.should_exit = True
    thread.join()
    gone = [index for index in range(CLIENTS) if goes(index)]
    pairs = [*zip(texts, expected, strict=True)]
    return {
        "clients": CLIENTS,
        "streams": sum(index % 4 != 1 for index in range(CLIENTS)),
        "tokens_asked": sum(most for _, most in requests()),
        "tokens_generated": new,
        "seconds": round(seconds, 1),
        "equal": sum(text == whole for index, (text, whole) in enumerate(pairs) if index not in gone),
        "gone": len(gone),
        "beginnings": sum(
            pairs[i][0] is None or len(pairs[i][0]) > 0 and pairs[i][1].startswith(pairs[i][0]) for i in gone
        ),
        "requests_left": left,
        "threads_left": int(manager._thread.is_alive()),
        "tensor_bytes": [before, after],
    }


def main() -> None:
    """Serve the clients and write validation/serve.json."""
    torch.set_num_threads(1)
    found = run()
    versions = {name: metadata.version(name) for name in PACKAGES}
    FILE.write_text(json.dumps({"versions": versions, **found}, indent=1) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
