"""Decode the tokens of an answer to text, end it at stop strings, and separate reasoning and tool calls from it."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template, response_events_to_chunks
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_parsing import ResponseParser

from fp8moe.decode.request import INCOMPLETE
from fp8moe.serving.fields import Asked


class Part(NamedTuple):
    """A piece of an answer; `kind` is the field of a chat message that it belongs to."""

    kind: str
    value: Any


class Increments:
    """Decodes tokens one by one to the text that each adds to that of the tokens before it.

    With tokenizers that fall back to bytes, an invalid byte spoils the text of the bytes before it, too; text that was
    returned before stays.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool):
        self._decoder, self._skip = tokenizer.backend_tokenizer, skip_special_tokens
        self._tokens: list[int] = []  # those that added the last text, then those since
        self._count, self._before = 0, ""  # of those that added the last text: how many, and their text

    def add(self, token: int) -> str:
        """Return the text that a token adds; none while a character is incomplete."""
        self._tokens.append(token)
        added = self.rest()
        if added.endswith(INCOMPLETE):
            return ""
        if added:
            del self._tokens[: self._count]
            self._count, self._before = len(self._tokens), self._text(self._tokens)
        return added

    def rest(self) -> str:
        """Return the text of an incomplete character, which may be the end of an answer."""
        text, known = self._text(self._tokens), len(self._before)
        return text[known:] if text.startswith(self._before) else self._text(self._tokens[self._count :])

    def _text(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip)


class TokenText(NamedTuple):
    """A token of an answer: what it adds to the text, where in the text, and its bytes.

    The last token of a character of several adds the character, the others nothing. A special token is shown by its
    name, also where the text leaves it out.
    """

    string: str
    offset: int
    data: bytes


class TokenTexts:
    """Tells, of the tokens of one answer, the text and the bytes of each."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool):
        self._tokenizer, self._length = tokenizer, 0
        self._increments = Increments(tokenizer, skip_special_tokens)
        decoder = tokenizer.backend_tokenizer.decoder
        byte_level = decoder is not None and decoder.decode(["Ġ"]) == " "
        self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()} if byte_level else {}
        self._added = tokenizer.added_tokens_decoder

    def add(self, token: int) -> TokenText:
        string, offset = self._increments.add(token), self._length
        self._length += len(string)
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if token in self._added:
            data = name.encode()
        elif self._byte_of.keys() >= {*name}:
            data = bytes(self._byte_of[letter] for letter in name)
        elif re.fullmatch("<0x[0-9A-F]{2}>", name):
            data = bytes.fromhex(name[3:5])
        else:
            data = (string.lstrip(INCOMPLETE) or name.replace("▁", " ")).encode()
        special = token in self._added and self._added[token].special
        return TokenText(string or (name if special else ""), offset, data)


class Text:
    """Decodes the tokens of one answer to text, as they arrive.

    The text ends before the first stop string; its last characters are held back while they may begin a stop string.
    For chat models with a response template, a parser separates `reasoning_content` and `tool_calls` from the text.
    """

    def __init__(self, asked: Asked, model: Any, tokenizer: Any):
        template = None if asked.text is None else get_response_template(tokenizer, model)
        self._parser = template and ResponseParser(template, prefix=asked.text, tools=asked.tools)
        self._stops, self._longest = asked.stops, max(map(len, asked.stops), default=0)
        self._increments = Increments(tokenizer, asked.skip_special_tokens and not self._parser)
        self._held, self.stopped = "", False
        self._calls = 0
        self._first = self._parser.initial_events if self._parser else []

    def read(self, tokens: list[int], last: bool) -> list[Part]:
        """Decode further tokens; return the parts of the answer that they add. last: the answer ends with them."""
        text = self._held + "".join(map(self._increments.add, tokens)) + (self._increments.rest() if last else "")
        if self.stopped:
            return []
        found = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) if last or not self._stops else max(0, len(text) - self._longest + 1)
        text, self._held = text[:end], text[end:]
        return [*self._parts(text, last or self.stopped)]

    def _parts(self, text: str, last: bool) -> Iterator[Part]:
        if self._parser is None:
            if text:
                yield Part("content", text)
            return
        events, self._first = self._first + self._parser.feed(text), []
        if last:
            with suppress(ValueError, RuntimeError):  # the answer ends inside a tool call: leave that call out
                events += self._parser.finalize()[1]
        for chunk in response_events_to_chunks(events):
            if isinstance(chunk, ToolCall):
                function = {"name": chunk.name, "arguments": chunk.arguments}
                yield Part("tool_calls", {"index": self._calls, "type": "function", "function": function})
                self._calls += 1
            else:
                yield Part("reasoning_content" if isinstance(chunk, ReasoningText) else "content", str(chunk))
