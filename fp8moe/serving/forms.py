"""Answers in OpenAI's formats: whole answers, the events of a stream, and errors."""

import asyncio
import base64
import io
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
from torch import Tensor

from fp8moe.serving.answers import Part, Text, TokenText, TokenTexts
from fp8moe.serving.fields import Asked
from fp8moe.serving.manager import Answer, Piece

Ended = Callable[[Answer], None]
Texts = list[tuple[Answer, Text]]


async def _read(answer: Answer, text: Text, ended: Ended) -> AsyncIterator[tuple[list[Part], Piece]]:
    """Yield (parts, piece) for each piece of an answer: the parts of the text that the piece adds, and the piece."""
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                yield text.read(piece.tokens, piece.reason is not None), piece
    finally:
        ended(answer)


async def _together(generators: list[AsyncIterator]) -> AsyncIterator[tuple[int, Any]]:
    """Run several generators concurrently; yield (index of the generator, item) as soon as an item comes."""
    queue: asyncio.Queue = asyncio.Queue()

    async def follow(index: int, generator: Any) -> None:
        try:
            async with aclosing(generator):
                async for item in generator:
                    queue.put_nowait((index, item))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(follow(*one)) for one in enumerate(generators)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Form(ABC):
    """Formats the answers to one request: as one object (`whole`), or as a stream (`first`, then `chunk`)."""

    whole_kind = chunk_kind = ""

    def __init__(self, name: str, tokenizer: Any, skip_special_tokens: bool):
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self._tokens = defaultdict[int, TokenTexts](lambda: TokenTexts(tokenizer, skip_special_tokens))

    async def whole(self, texts: Texts, ended: Ended) -> dict[str, Any]:
        found: list[tuple[list[Part], list[int], list[float], str]] = [([], [], [], "")] * len(texts)
        routed: list[dict[str, str]] = [{}] * len(texts)
        async with aclosing(_together([_read(*one, ended) for one in texts])) as pieces:
            async for index, (parts, piece) in pieces:
                before = found[index]
                found[index] = (before[0] + parts, before[1] + piece.tokens, before[2] + piece.logprobs, piece.reason)
                if piece.routing is not None:
                    routed[index] = {"routed_experts": _in_base64(piece.routing)}
        choices = [self.choice(index, *one) | routed[index] for index, one in enumerate(found)]
        return self._head | {"object": self.whole_kind, "choices": choices, "usage": usage_of(texts)}

    def chunk(self, choices: list[dict], **more: Any) -> str:
        return f"data: {json.dumps(self._head | {'object': self.chunk_kind, 'choices': choices} | more)}\n\n"

    @abstractmethod
    def choice(self, index: int, parts: list[Part], tokens: list[int], logprobs: list[float], reason: str) -> dict:
        """Return the entry of `choices` for the whole answer to prompt number `index`."""

    @abstractmethod
    def change(self, index: int, parts: list[Part], piece: Piece, reason: str | None) -> dict:
        """Return the entry of `choices` for a piece of the answer to prompt number `index`."""

    def first(self, index: int) -> str:
        return ""

    def _texts(self, index: int, piece: Piece) -> list[TokenText]:
        return [*map(self._tokens[index].add, piece.tokens)]


class CompletionForm(Form):
    whole_kind = chunk_kind = "text_completion"

    def choice(self, index: int, parts: list[Part], tokens: list[int], logprobs: list[float], reason: str) -> dict:
        return self.change(index, parts, Piece(tokens, logprobs, None), reason)

    def change(self, index: int, parts: list[Part], piece: Piece, reason: str | None) -> dict:
        text = "".join(part.value for part in parts)
        told = self._logprobs(index, piece) if piece.logprobs else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}

    def _logprobs(self, index: int, piece: Piece) -> dict:
        texts = self._texts(index, piece)
        strings, offsets = [text.string for text in texts], [text.offset for text in texts]
        return {"tokens": strings, "token_logprobs": piece.logprobs, "top_logprobs": None, "text_offset": offsets}


class ChatForm(Form):
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, parts: list[Part], tokens: list[int], logprobs: list[float], reason: str) -> dict:
        message: dict[str, Any] = {"role": "assistant", "content": ""} | self._fields(parts)
        for call in message.get("tool_calls", ()):
            del call["index"]
        told = self._logprobs(index, Piece(tokens, logprobs, None))
        reason = "tool_calls" if "tool_calls" in message else reason
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    def change(self, index: int, parts: list[Part], piece: Piece, reason: str | None) -> dict:
        return {
            **{"index": index, "delta": self._fields(parts), "logprobs": self._logprobs(index, piece)},
            "finish_reason": reason,
        }

    def first(self, index: int) -> str:
        return self.chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def _fields(self, parts: list[Part]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for kind, value in parts:
            if kind == "tool_calls":
                fields.setdefault(kind, []).append(value | {"id": f"call_{uuid.uuid4().hex}"})
            else:
                fields[kind] = fields.get(kind, "") + value
        return fields

    def _logprobs(self, index: int, piece: Piece) -> dict | None:
        if not piece.logprobs:
            return None
        pairs = zip(self._texts(index, piece), piece.logprobs, strict=True)
        told = [
            {"token": text.string, "logprob": value, "bytes": [*text.data], "top_logprobs": []} for text, value in pairs
        ]
        return {"content": told}


def _in_base64(values: Tensor) -> str:
    """Return the bytes of a file of NumPy's format npy, in base64."""
    file = io.BytesIO()
    np.save(file, values.numpy())
    return base64.b64encode(file.getvalue()).decode()


def usage_of(texts: Texts) -> dict[str, int]:
    prompt, new = (sum(getattr(answer, name) for answer, _ in texts) for name in ("prompt_tokens", "tokens"))
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def streamed(form: Form, texts: Texts, asked: Asked, ended: Ended) -> AsyncIterator[str]:
    """Yield the events of a stream. If an error ends the stream, the error is the last event before [DONE]."""
    if any(first := [form.first(index) for index in range(len(texts))]):
        yield "".join(first)
    called = set()
    try:
        async with aclosing(_together([_read(*one, ended) for one in texts])) as pieces:
            async for index, (parts, piece) in pieces:
                called |= {index for part in parts if part.kind == "tool_calls"}
                reason = "tool_calls" if piece.reason and index in called else piece.reason
                if parts or reason or piece.logprobs:
                    yield form.chunk([form.change(index, parts, piece, reason)])
        if asked.usage:
            yield form.chunk([], usage=usage_of(texts))
    except Exception as error:
        told = str(error)
        if not isinstance(error, RuntimeError):  # not one that the decoder reports
            logging.getLogger(__name__).exception("a stream has failed")
            told = f"{type(error).__name__}: {told}"
        yield f"data: {json.dumps(error_of(told, 500))}\n\n"
    yield "data: [DONE]\n\n"


def error_of(message: str, status: int) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    if len(message) > 1000:
        message = f"{message[:997]}..."
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = {401: "invalid_api_key", 404: "model_not_found"}.get(status)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
