"""One request of a GraphDecoder: the checked arguments of generate, stream, run or `fp8moe serve`, and its progress.

`parse` and `parse_one` make a `Request` from arguments; the scheduler runs it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

import torch
from torch import Tensor

from fp8moe.decode.prefix import Prefix
from fp8moe.decode.sampling import Sampling, integer, integers, parse_sampling, random_seeds
from fp8moe.decode.step import vocabulary
from fp8moe.decode.transfers import Readback, to_device
from fp8moe.hf.routing import Recorder
from fp8moe.runtime.checks import check_tensor, describe


class Options(TypedDict, total=False):
    """The arguments of `GraphDecoder.generate` other than the prompts; `generate` documents them."""

    max_new_tokens: Required[int]
    attention_mask: Tensor | None
    eos_token_id: int | Iterable[int] | None
    pad_token_id: int | None
    do_sample: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    seed: int | Iterable[int] | None
    streamer: Any
    stop_strings: str | Iterable[str] | None
    tokenizer: Any
    prefix: Prefix | None
    return_logprobs: bool
    return_routing: bool


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The character that tokenizers decode an incomplete UTF-8 sequence to."""


class StopStrings:
    """Stop strings, and the tokenizer that decodes the text to search for them."""

    def __init__(self, strings: Any, tokenizer: Any):
        """Check the arguments. strings: one string or several. Raises TypeError or ValueError for a wrong argument."""
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
        # A stop string spans at most as many tokens as it has bytes, since each token decodes to at least one byte.
        # Four more are kept: at most three of a character that began before them, and a space that decoding may drop.
        self.window = 4 + max(len(string.encode()) for string in several)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Tail:
    """The last tokens of one sequence, as many as a stop string can span."""

    def __init__(self, stop: StopStrings, prompt: list[int]):
        self.stop = stop
        self.tokens = deque(prompt, maxlen=stop.window)

    def ends_with(self, token: int) -> bool:
        """Add a token and return whether it completes a stop string, which may begin in the prompt.

        As in transformers' StopStringCriteria, at least a part of the string must be text of this token.
        """
        self.tokens.append(token)
        tokens = [*self.tokens]
        text = self.stop.text(tokens)
        if INCOMPLETE in text and len(tokens) == self.stop.window:
            # The window may begin within a character. Some decoders then replace complete characters behind it, too.
            later = (tokens[skip:] for skip in range(4))
            tokens = min(later, key=lambda some: self.stop.text(some).count(INCOMPLETE))
            text = self.stop.text(tokens)
        matches = [string for string in self.stop.strings if string in text]
        if not matches:
            return False
        # An incomplete character has at most three tokens, so one of these texts ends with a whole one.
        earlier = [self.stop.text(tokens[:-drop]) for drop in range(1, 5)]
        before = len(next((one for one in earlier if not one.endswith(INCOMPLETE)), earlier[-1]))
        return any(text.find(string, max(0, before - len(string) + 1)) >= 0 for string in matches)


@dataclass(eq=False, kw_only=True)
class Request:
    """Prompts that begin together: their checked arguments, and the progress of their sequences.

    key: identifies the request in `News`. given: the caller's prompts (B, L); the result repeats them if with_prompts.
    tokens (B, L) int64, mask (B, L) bool or None: the prompts on the model's device. new_tokens: limit per sequence.
    ends, pad: end tokens, and the pad token or None. samplings: one for each sequence.
    tails: one `Tail` for each sequence if there are stop strings, otherwise Nones.
    recorder: what records the experts of the tokens, None if they are not requested.
    stepwise: whether each step's tokens (B,), or a tuple with logprobs and routing if requested, are `News` too.
    cancelled: report no result, and free the rows before the next step; any thread may set this at any time.

    rows: the request's rows in the decode step. made: an upper bound on the new tokens of a sequence. end: a column
    that no sequence reaches. seen: for each sequence, the number of new tokens that were looked at one by one.
    stopped: sequences that a stop string ended. finish_reasons: for each sequence, once the result is known: "stop"
    after an end token or a stop string, even if this comes with the last token allowed; None after NaN logits;
    otherwise "length". shown: the mask of ``given``. routing: what has been copied of the experts of its tokens.
    """

    key: Any
    given: Tensor
    tokens: Tensor
    mask: Tensor | None
    new_tokens: int
    ends: list[int]
    pad: int | None
    samplings: list[Sampling]
    tails: list[Tail | None]
    streamer: Any
    prefix: Prefix | None
    return_logprobs: bool
    recorder: Recorder | None
    with_prompts: bool = True
    stepwise: bool = False
    cancelled: bool = False
    rows: list[int] = field(default_factory=list)
    made: int = 0
    end: int = 0
    seen: list[int] = field(init=False)
    shown: Tensor | None = field(init=False)
    stopped: set[int] = field(default_factory=set)
    finish_reasons: list[str | None] = field(default_factory=list)
    routing: Readback = field(init=False)

    def __post_init__(self) -> None:
        self.seen = [0] * len(self.tokens)
        self.shown = self.mask
        self.routing = Readback(self.tokens.device)

    @property
    def is_followed(self) -> bool:
        """Return whether new tokens must be looked at one by one: for a stream, a streamer or stop strings."""
        return self.stepwise or self.streamer is not None or self.tails[0] is not None

    @property
    def length(self) -> int:
        """Return how many columns the prompts take, including those of the prefix."""
        return self.before + self.tokens.shape[1]

    @property
    def before(self) -> int:
        """Return how many columns the prefix takes."""
        return 0 if self.prefix is None else self.prefix.length

    def reads(self, new: int) -> int:
        """Return how many tokens are read for ``new`` ones: prefix, ``given`` with padding, new ones but the last."""
        return self.before + self.given.shape[1] + new - 1

    def end_stream(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


def parse(
    decoder: Any, input_ids: Tensor, options: Mapping[str, Any], generation_config: Any, key: Any = None
) -> Request:
    """Check arguments of ``decoder.generate`` and make a request; defaults are those that `generate` documents.

    Raises TypeError or ValueError with the name of the argument that is wrong.
    """
    _check_names(options)
    mask = options.get("attention_mask")
    check_prompt(input_ids, mask)
    _check_config(generation_config, sampling=options.get("do_sample", False))
    check_tokens(input_ids, decoder.model)
    batch = len(input_ids)
    new_tokens = integer("max_new_tokens", options["max_new_tokens"])
    given_ends, given_pad = options.get("eos_token_id"), options.get("pad_token_id")
    ends, pad = end_tokens(vocabulary(decoder.model), given_ends, given_pad, generation_config)
    samplings = parse_sampling(
        options, generation_config, batch, lambda count: decoder.ranks.first(random_seeds(count), decoder.device)
    )
    strings = options.get("stop_strings")
    if strings is None:
        strings = getattr(generation_config, "stop_strings", None)
    stop = None if strings is None else StopStrings(strings, options.get("tokenizer"))
    if stop is not None and batch > 1 and pad is None:
        raise ValueError("stop_strings: in a batch they need pad_token_id, which follows the end of a sequence")
    streamer = options.get("streamer")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer: expected put and end, as transformers' BaseStreamer has, got {describe(streamer)}")
    prefix = options.get("prefix")
    if prefix is not None:
        if not isinstance(prefix, Prefix):
            raise TypeError(f"prefix: expected what GraphDecoder.prefix returns, got {describe(prefix)}")
        prefix.check(decoder)
    _check_room(decoder, input_ids, new_tokens, prefix)
    tokens, mask = _prompt(decoder, input_ids, mask, None if pad in ends else pad)
    return Request(
        key=key,
        given=input_ids,
        tokens=tokens,
        mask=mask,
        new_tokens=new_tokens,
        ends=ends,
        pad=pad,
        samplings=samplings,
        tails=[None] * batch if stop is None else _tails(stop, input_ids if mask is None else tokens, mask, prefix),
        streamer=streamer,
        prefix=prefix,
        return_logprobs=options.get("return_logprobs", False),
        recorder=decoder.recorder if options.get("return_routing") else None,
    )


def parse_one(
    decoder: Any, arguments: Any, key: Any, generation_config: Any = None, *, stops_in_answer: bool = False
) -> Request:
    """Check the arguments of one request of ``decoder.run``, and cut off padding.

    generation_config: supplies settings that are not given; None: the model's. stops_in_answer: search stop strings in
    the answer's text only; otherwise they may begin in the prompt. Raises TypeError or ValueError as `parse` does.
    """
    if not isinstance(arguments, Mapping):
        raise TypeError(f"requests: expected dicts of generate's arguments, got {describe(arguments)}")
    _check_names(arguments, "input_ids")
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        raise ValueError(f"input_ids: expected one prompt of shape (length,), got {describe(ids)}")
    options = {name: value for name, value in arguments.items() if name != "input_ids"}
    if isinstance(mask, Tensor):
        options["attention_mask"] = mask[None]
    request = parse(decoder, ids[None], options, generation_config or decoder.model.generation_config, key)
    request.with_prompts = False
    if stops_in_answer and (tail := request.tails[0]) is not None:
        tail.tokens.clear()
    if request.mask is not None:
        check_zeros_on_the_left(request.mask)
        padding = int((~request.mask).sum())
        request.tokens, request.mask = request.tokens[:, padding:], None
    return request


def _check_names(options: Mapping[str, Any], *more: str) -> None:
    """Raise TypeError for an unknown or missing argument. more: names that are required in addition to `Options`."""
    unknown = [name for name in options if name not in (*more, *Options.__annotations__)]
    if unknown:
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    missing = [name for name in (*more, *Options.__required_keys__) if name not in options]
    if missing:
        raise TypeError(f"missing a required argument: {missing[0]!r}")


def _tails(stop: StopStrings, tokens: Tensor, mask: Tensor | None, prefix: Prefix | None) -> list[Tail | None]:
    """Return a `Tail` for each prompt.

    It is made of the last tokens of the prefix and the prompt, since a stop string may begin in either.
    """
    before = [] if prefix is None else prefix.tokens[-stop.window :].tolist()
    last = tokens if mask is None else tokens.masked_fill(~mask, -1)
    prompts = last[:, -stop.window :].tolist()
    return [Tail(stop, before + [token for token in prompt if token >= 0]) for prompt in prompts]


UNSERVED = {
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
"""Settings of a generation config that the decoder does not apply, each with the values at which it has no effect."""

_UNSERVED_SAMPLING = {
    "typical_p": (None, 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (None, 0.0)),
    "top_h": (None,),
}


def _check_config(generation_config: Any, *, sampling: bool) -> None:
    """Raise ValueError for a setting of the generation config that would change tokens but is not applied."""
    for name, neutral in (UNSERVED | (_UNSERVED_SAMPLING if sampling else {})).items():
        value = getattr(generation_config, name, None)
        # True is equal to 1, but asks for something.
        if value is True or value not in neutral:
            raise ValueError(
                f"generation_config.{name}: GraphDecoder does not apply {_shown(value)}; set it to None in "
                "model.generation_config to go on without it"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_prefix(decoder: Any, input_ids: Any) -> Tensor:
    """Check the input_ids of ``decoder.prefix`` and return them as (1, n) int64 on the model's device.

    Raises TypeError or ValueError for other tensors, if the prefix leaves no room, and for a model that cannot continue
    a prefix.
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
    """Return the end tokens, and the pad token or None. size: the vocabulary's. defaults: a generation config."""
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
    """Raise ValueError for tokens that the model does not have. Tokens on a GPU are not read, so not checked."""
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
    """Raise ValueError if a mask (B, L) bool has zeros between ones. The last column is known to be ones."""
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "attention_mask: expected zeros on the left only, got some between ones (without attention_mask, "
            "tokens that are pad_token_id count as zeros)"
        )


def _prompt(decoder: Any, ids: Tensor, mask: Tensor | None, padding: int | None) -> tuple[Tensor, Tensor | None]:
    """Move prompts and their mask to the model's device. padding: the token to mask if there is no mask, or None.

    Prompts on the host are checked before they are moved: reading from the device would wait for its queued work.
    """
    if mask is not None:
        mask = mask.to(ids.device, torch.bool)
    elif padding is not None:
        mask = ids != padding
    if mask is not None and mask.all():  # what most tokenizers give of one prompt
        mask = None
    if mask is not None and not mask[:, -1].all():
        raise ValueError(
            "attention_mask: expected ones in the last column, as of prompts padded on the left (a tokenizer's "
            "padding_side='left')"
        )
    if mask is not None and decoder.attention == "flash":
        check_zeros_on_the_left(mask)
    return to_device(ids.long(), decoder.device), None if mask is None else to_device(mask, decoder.device)
