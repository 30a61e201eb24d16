"""Strings that end a sequence: looked for on the host, in the text of its tokens as they come."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from fp8moe.runtime.checks import describe

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for the first bytes of a character."""


class StopStrings:
    """Stop strings and the tokenizer that writes the text which they are looked for in."""

    def __init__(self, strings: Any, tokenizer: Any):
        """strings: one, or several. Raises TypeError or ValueError with the name of the argument that is wrong."""
        if isinstance(strings, str) or not isinstance(strings, Iterable):
            strings = [strings]
        several = [*strings]
        wrong = [string for string in several if not isinstance(string, str)]
        if wrong:
            raise TypeError(f"stop_strings: expected a string or several, got {describe(wrong[0])}")
        if not several or not all(several):
            raise ValueError(f"stop_strings: expected one or more strings, none of them empty, got {several}")
        if tokenizer is None:
            raise ValueError("stop_strings: they need tokenizer=, the tokenizer of the model")
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"tokenizer: expected a tokenizer of transformers, got {describe(tokenizer)}")
        self.strings = several
        self.tokenizer = tokenizer
        # A token adds a byte or more; decoders may leave out a space before the first one.
        self.window = 1 + max(len(string.encode()) for string in several)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Tail:
    """The last tokens of one sequence, as many as a stop string can take."""

    def __init__(self, stop: StopStrings, prompt: list[int]):
        self.stop = stop
        self.tokens = deque(prompt, maxlen=stop.window)

    def ends_with(self, token: int) -> bool:
        """Add a token: whether it completes a stop string, which may begin in the prompt.

        So does transformers' StopStringCriteria: some of the string is text of this token.
        """
        self.tokens.append(token)
        tokens = [*self.tokens]
        text = self.stop.text(tokens)
        found = [string for string in self.stop.strings if string in text]
        if not found:
            return False
        before = len(self.stop.text(tokens[:-1]).rstrip(_INCOMPLETE))
        return any(text.find(string, max(0, before - len(string) + 1)) >= 0 for string in found)
