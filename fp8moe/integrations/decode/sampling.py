"""How the tokens of a sequence are chosen and what text ends it: a row of the sampling op's state, stop strings."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.sampling import IN_PROMPT, SamplingState
from fp8moe.runtime.checks import describe

PENALTIES = ("repetition_penalty", "presence_penalty")  # these change greedy decoding too
NAMES = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)


@dataclass(frozen=True)
class Sampling:
    """Parameters of one sequence, with the values that `SamplingState` gives them. The default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0


def empty_state(size: int, vocabulary: int, device: torch.device) -> SamplingState:
    """The state of `size` greedy sequences without a prompt."""

    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    greedy = Sampling()
    return SamplingState(
        **{name: filled(getattr(greedy, name), torch.float32) for name in NAMES if name != "top_k"},
        top_k=filled(greedy.top_k, torch.int32),
        seed=filled(greedy.seed, torch.int64),
        step=filled(0, torch.int64),
        seen=torch.zeros(size, vocabulary, dtype=torch.uint8, device=device),
    )


def write(state: SamplingState, row: int, sampling: Sampling, prompt_ids: Tensor, mask: Tensor | None = None) -> None:
    """Begin a sequence in a row: its parameters, and its prompt as the tokens that were seen.

    prompt_ids (L,), mask (L,): False where the prompt is padded. Waits for nothing on the device.
    """
    for name in (*NAMES, "seed"):
        getattr(state, name)[row].fill_(getattr(sampling, name))
    state.step[row].zero_()
    vocabulary = state.seen.shape[1]
    # The last column takes the padding, and tokens that the model reads but has no logits for.
    ids = prompt_ids.clamp(max=vocabulary)
    if mask is not None:
        ids = ids.masked_fill(~mask, vocabulary)
    seen = torch.zeros(vocabulary + 1, dtype=torch.uint8, device=ids.device)
    state.seen[row].copy_(seen.index_fill_(0, ids, IN_PROMPT)[:vocabulary])


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
