"""The arguments of GraphDecoder.generate: checked, and in the form in which a step takes them."""

import ctypes
import inspect
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fp8moe.decode.prefill import Prefix
from fp8moe.decode.step import NAMES, PENALTIES, Sampling, vocabulary
from fp8moe.decode.transfers import to_device
from fp8moe.runtime.checks import check_tensor, describe

NEAR_ZERO = 1e-5
"""Temperatures below it are greedy."""


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """The arguments of `GraphDecoder.generate`, which documents them, as they came."""

    input_ids: Tensor
    max_new_tokens: int
    attention_mask: Tensor | None = None
    eos_token_id: int | Iterable[int] | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | Iterable[int] | None = None
    streamer: Any = None
    stop_strings: str | Iterable[str] | None = None
    tokenizer: Any = None
    prefix: Prefix | None = None
    return_logprobs: bool = False

    @classmethod
    def bind(cls, **kwargs: Any) -> Self:
        """Take arguments by name. Raises TypeError that names one which is unknown or missing."""
        inspect.signature(cls).bind(**kwargs)  # its messages name the argument and not this class
        return cls(**kwargs)


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
        """Add a token and return whether it completes a stop string, which may begin in the prompt.

        So does transformers' StopStringCriteria: some of the string is text of this token.
        """
        self.tokens.append(token)
        tokens = [*self.tokens]
        text = self.stop.text(tokens)
        matches = [string for string in self.stop.strings if string in text]
        if not matches:
            return False
        before = len(self.stop.text(tokens[:-1]).rstrip(_INCOMPLETE))
        return any(text.find(string, max(0, before - len(string) + 1)) >= 0 for string in matches)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call whose arguments are right.

    given: input_ids as they came. tokens (B, L) int64, mask (B, L) bool or None: on the model's device. new_tokens: at
    most. ends, pad: tokens, pad is None where there is none. samplings: one for each sequence.
    """

    given: Tensor
    tokens: Tensor
    mask: Tensor | None
    new_tokens: int
    ends: list[int]
    pad: int | None
    samplings: list[Sampling]
    stop: StopStrings | None
    streamer: Any
    prefix: Prefix | None
    return_logprobs: bool
    streamer_has_prompts: bool = False

    def tails(self) -> list[Tail | None]:
        """Return the last tokens of each sequence so far, with those of a prefix: stop strings may begin in them."""
        if self.stop is None:
            return [None] * len(self.tokens)
        window = self.stop.window
        before = [] if self.prefix is None else self.prefix.tokens[-window:].tolist()
        last = self.given[:, -window:] if self.mask is None else self.tokens.masked_fill(~self.mask, -1)
        return [Tail(self.stop, before + [token for token in prompt if token >= 0]) for prompt in last.tolist()]


def parse(decoder: Any, arguments: GenerateArguments, generation_config: Any) -> Call:
    """Check the arguments of ``decoder.generate``; what is None comes from the generation config, as it says there.

    Raises TypeError or ValueError with the name of the argument that is wrong.
    """
    ids, mask = arguments.input_ids, arguments.attention_mask
    check_prompt(ids, mask)
    _check_config(generation_config, sampling=arguments.do_sample)
    check_tokens(ids, decoder.model)
    batch = len(ids)
    new_tokens = integer("max_new_tokens", arguments.max_new_tokens)
    ends, pad = end_tokens(vocabulary(decoder.model), arguments.eos_token_id, arguments.pad_token_id, generation_config)
    samplings = parse_sampling(
        arguments, generation_config, batch, lambda count: decoder.ranks.first(random_seeds(count), decoder.device)
    )
    strings = arguments.stop_strings
    if strings is None:
        strings = getattr(generation_config, "stop_strings", None)
    stop = None if strings is None else StopStrings(strings, arguments.tokenizer)
    if stop is not None and batch > 1 and pad is None:
        raise ValueError("stop_strings: in a batch they need pad_token_id, which follows the end of a sequence")
    streamer = arguments.streamer
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer: expected put and end, as transformers' BaseStreamer has, got {describe(streamer)}")
    prefix = arguments.prefix
    if prefix is not None:
        if not isinstance(prefix, Prefix):
            raise TypeError(f"prefix: expected what GraphDecoder.prefix returns, got {describe(prefix)}")
        prefix.check(decoder)
    _check_room(decoder, ids, new_tokens, prefix)
    tokens, mask = _prompt(decoder, ids, mask, None if pad in ends else pad)
    return Call(
        given=ids,
        tokens=tokens,
        mask=mask,
        new_tokens=new_tokens,
        ends=ends,
        pad=pad,
        samplings=samplings,
        stop=stop,
        streamer=streamer,
        prefix=prefix,
        return_logprobs=arguments.return_logprobs,
    )


_UNSERVED = {
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), (None, [], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), (None, 0)),
    "encoder_no_repeat_ngram_size": (None, 0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (None, 1.0)),
    **dict.fromkeys(("watermarking_config", "penalty_alpha", "dola_layers", "constraints", "force_words_ids"), (None,)),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), (None, False)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (None, 1)),
    "max_time": (None,),
}
"""Settings of a generation config that the decoder does not apply, each with the values that change no token."""

_UNSERVED_SAMPLING = {
    "typical_p": (None, 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (None, 0.0)),
    "top_h": (None,),
}


def _check_config(generation_config: Any, *, sampling: bool) -> None:
    """Raise ValueError for a setting of the generation config that would change tokens, and that is not applied."""
    for name, neutral in (_UNSERVED | (_UNSERVED_SAMPLING if sampling else {})).items():
        value = getattr(generation_config, name, None)
        if value not in neutral:
            raise ValueError(
                f"generation_config.{name}: GraphDecoder does not apply {_shown(value)}; set it to None in "
                "model.generation_config to go on without it"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_prefix(decoder: Any, input_ids: Any) -> Tensor:
    """Return the tokens (1, n) int64 of ``decoder.prefix``, on the model's device.

    Raises TypeError or ValueError for other tensors, for no room after them, and for a model that cannot go on from
    them.
    """
    check_tensor("input_ids", input_ids)
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    check_prompt(ids, None)
    check_tokens(ids, decoder.model)
    if len(ids) > 1:
        raise ValueError(f"input_ids: expected one prefix, got a batch of {len(ids)}")
    length = ids.shape[1]
    if length > decoder.max_length - 2:
        raise ValueError(f"input_ids: {length} tokens leave no room for others in max_length, {decoder.max_length}")
    if not decoder.capabilities.chunked_prefill:
        raise ValueError(
            f"model: {type(decoder.model).__name__} reads a prompt in one piece only, so it cannot continue a prefix"
        )
    return ids.to(decoder.device, torch.int64)


def end_tokens(size: int, eos: Any, pad: Any, defaults: Any) -> tuple[list[int], int | None]:
    """Return the end tokens and the pad token, None where there is neither. size: of the vocabulary."""
    eos = defaults.eos_token_id if eos is None else eos
    ends = [] if eos is None else integers("eos_token_id", eos)
    pad = defaults.pad_token_id if pad is None else pad
    pad = integer("pad_token_id", pad) if pad is not None else ends[0] if ends else None
    for name, tokens in (("eos_token_id", ends), ("pad_token_id", [] if pad is None else [pad])):
        if not all(0 <= token < size for token in tokens):
            raise ValueError(f"{name}: expected tokens between 0 and {size - 1}, got {tokens}")
    return ends, pad


def check_prompt(ids: Any, mask: Any) -> None:
    check_tensor("input_ids", ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TypeError(f"input_ids: expected integers, got {ids.dtype}")
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids: expected shape (batch, length), neither of them 0, got {tuple(ids.shape)}")
    if mask is not None:
        check_tensor("attention_mask", mask)
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask: expected shape {tuple(ids.shape)}, got {tuple(mask.shape)}")


def check_tokens(ids: Tensor, model: Any) -> None:
    """Raise ValueError for tokens that the model does not have; of tokens on a GPU nothing is read."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is None or ids.device.type != "cpu":
        return
    ids = ids.long()
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise ValueError(f"input_ids: expected tokens between 0 and {size - 1}, got {wrong[0]}")


def _check_room(decoder: Any, ids: Tensor, new_tokens: int, prefix: Prefix | None) -> None:
    batch, length = ids.shape
    if new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {new_tokens}")
    before = 0 if prefix is None else prefix.length
    if before + length + new_tokens > decoder.max_length:
        beginning = f"{before} tokens of prefix, {length}" if before else f"{length} tokens"
        raise ValueError(
            f"max_new_tokens: {beginning} of prompt and {new_tokens} new ones are more than max_length, "
            f"{decoder.max_length}"
        )
    if batch > decoder.batch_sizes[-1]:
        raise ValueError(
            f"input_ids: {batch} sequences are more than the largest captured batch, {decoder.batch_sizes[-1]}"
        )


def check_zeros_on_the_left(mask: Tensor) -> None:
    """Raise ValueError for a mask (B, L) bool with zeros between ones."""
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "attention_mask: expected zeros on the left only, got some between ones (without attention_mask, "
            "tokens that are pad_token_id count as zeros)"
        )


def _prompt(decoder: Any, ids: Tensor, mask: Tensor | None, padding: int | None) -> tuple[Tensor, Tensor | None]:
    """Put the prompts and their mask on the model's device; without a mask, tokens `padding` are masked.

    What is on the host is checked there: reading it on the device would wait for all that is queued.
    """
    if mask is not None:
        mask = mask.to(ids.device, torch.bool)
    elif padding is not None and (ids == padding).any():
        mask = ids != padding
    if mask is not None and not mask[:, -1].all():
        raise ValueError(
            "attention_mask: expected ones in the last column, as of prompts padded on the left (a tokenizer's "
            "padding_side='left')"
        )
    if mask is not None and decoder.attention == "flash":
        check_zeros_on_the_left(mask)
    return to_device(ids.long(), decoder.device), None if mask is None else to_device(mask, decoder.device)


def integer(name: str, value: Any) -> int:
    """Return an int from any integer: Python's, numpy's, a tensor of one element."""
    try:
        if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an integer, got {describe(value)}")


def integers(name: str, values: Any) -> list[int]:
    """Return ints from one integer of any kind, or several."""
    return [integer(name, value) for value in (values if _are_several(values) else [values])]


def _are_several(values: Any) -> bool:
    return isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0


def number(name: str, value: Any) -> float:
    """Return a float from any real number: Python's, numpy's, a tensor of one element."""
    try:
        if not isinstance(value, bool | str | bytes) and getattr(value, "dtype", None) is not torch.bool:
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a complex tensor
        pass
    raise TypeError(f"{name}: expected a number, got {describe(value)}")


_SEEDS = range(-(2**63), 2**63)


def random_seeds(batch: int) -> list[int]:
    """Draw seeds from PyTorch's default generator, so that torch.manual_seed makes them repeatable."""
    return torch.randint(_SEEDS.start, _SEEDS.stop - 1, (batch,)).tolist()


def parse_sampling(
    arguments: GenerateArguments,
    generation_config: Any,
    batch: int,
    draw: Callable[[int], list[int]] = random_seeds,
) -> list[Sampling]:
    """Return the parameters of each sequence, from do_sample, seed and the arguments NAMES; None: not given.

    With do_sample what is not given comes from the generation config, and is off where that says nothing either.
    Without it only the repetition penalty does, as for transformers. draw: makes so many seeds where none is given.

    Raises TypeError or ValueError with the name of an argument (or generation_config.NAME) that is wrong, or that would
    change nothing because do_sample is False.
    """
    if not isinstance(arguments.do_sample, bool):
        raise TypeError(f"do_sample: expected True or False, got {describe(arguments.do_sample)}")
    given = {name: getattr(arguments, name) for name in NAMES}
    values = {name: _checked(name, value) for name, value in given.items() if value is not None}
    seeds = None if arguments.seed is None else _seeds(arguments.seed, batch)
    if not arguments.do_sample:
        for name, value in values.items():
            if name not in PENALTIES and value not in _WITHOUT_EFFECT[name]:
                raise ValueError(f"{name}: {value:g} has no effect without sampling; pass do_sample=True")
    for name in NAMES if arguments.do_sample else ("repetition_penalty",):
        default = getattr(generation_config, name, None)
        if name not in values and default is not None and (name, default) != ("top_k", 0):  # there 0 means off
            values[name] = _checked(f"generation_config.{name}", default)
    if not arguments.do_sample:
        return [Sampling(**{name: value for name, value in values.items() if name in PENALTIES})] * batch
    values = {"temperature": 1.0} | values
    return [Sampling(**values, seed=seed) for seed in seeds or draw(batch)]


def _checked(name: str, value: Any) -> float | int:
    """Return the value as SamplingState has it; a temperature near 0 as 0."""
    argument = name.rpartition(".")[2]
    if argument == "top_k":
        value = integer(name, value)
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
        return min(value, torch.iinfo(torch.int32).max)
    rounded = ctypes.c_float(number(name, value)).value  # as the kernel reads it: tiny values are 0, huge ones infinite
    holds, expected = _RANGES[argument]
    if not holds(rounded):
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return 0.0 if argument == "temperature" and rounded < NEAR_ZERO else rounded


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "a finite number of at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a finite number above 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
}
_WITHOUT_EFFECT = {"temperature": (0.0, 1.0), "top_k": (1,), "top_p": (1.0,), "min_p": (0.0,)}
"""Values with which a greedy sequence is what they ask for."""


def _seeds(seed: Any, batch: int) -> list[int]:
    """Return a seed for each sequence."""
    seeds = integers("seed", seed)
    if not _are_several(seed):
        seeds = seeds * batch
    if len(seeds) != batch:
        raise ValueError(f"seed: expected an integer, or one for each of {batch} sequences, got {len(seeds)}")
    wrong = next((value for value in seeds if value not in _SEEDS), None)
    if wrong is not None:
        raise ValueError(f"seed: expected an integer of 64 bits, got {wrong}")
    return seeds
