"""Decode the tokens of an answer to text, end it at stop strings, and separate reasoning and tool calls from it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser

from fp8moe.serving.fields import Asked


class Part(NamedTuple):
    """A piece of an answer; `kind` is the field of a chat message that it belongs to."""

    kind: str
    value: Any


class Text:
    """Decodes the tokens of one answer to text, as they arrive.

    The text ends before the first stop string; its last characters are held back while they may begin a stop string.
    For chat models with a response template, a parser separates `reasoning_content` and `tool_calls` from the text.
    """

    def __init__(self, asked: Asked, model: Any, tokenizer: Any):
        template = None if asked.text is None else get_response_template(tokenizer, model)
        self._parser = template and ResponseParser(template, prefix=asked.text, tools=asked.tools)
        self._stops, self._longest = asked.stops, max(map(len, asked.stops), default=0)
        self._tokenizer, self._skip = tokenizer, asked.skip_special_tokens and not self._parser
        self._stream = DecodeStream([], skip_special_tokens=self._skip)
        self._tokens: list[int] = []
        self._length = 0  # number of characters decoded so far
        self._held, self.stopped = "", False
        self._calls = 0
        self._first = self._parser.initial_events if self._parser else []

    def read(self, tokens: list[int], last: bool) -> list[Part]:
        """Decode further tokens; return the parts of the answer that they add. last: the answer ends with them."""
        text = self._decode(tokens, last)
        if self.stopped:
            return []
        text = self._held + text
        found = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) if last or not self._stops else max(0, len(text) - self._longest + 1)
        text, self._held = text[:end], text[end:]
        return [*self._parts(text, last or self.stopped)]

    def _decode(self, tokens: list[int], last: bool) -> str:
        """Return the text of further tokens. last: the answer ends with them, so include an incomplete character."""
        self._tokens += tokens
        steps = (self._stream.step(self._tokenizer.backend_tokenizer, token) for token in tokens)
        text = "".join(step for step in steps if step)
        self._length += len(text)
        if last:
            # the same options as those of the DecodeStream
            how = {"skip_special_tokens": self._skip, "clean_up_tokenization_spaces": False}
            rest = self._tokenizer.decode(self._tokens, **how)[self._length :]
            text, self._length = text + rest, self._length + len(rest)
        return text

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
