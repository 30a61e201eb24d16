"""The arguments of GraphDecoder.generate: checked, and in the form in which a step takes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8moe.integrations.decode.checks import check_prompt, check_tokens, integer, integers
from fp8moe.integrations.decode.prefix import Prefix
from fp8moe.integrations.decode.sampling import Sampling, parameters, random_seeds
from fp8moe.integrations.decode.step import vocabulary
from fp8moe.integrations.decode.stop_strings import StopStrings, Tail
from fp8moe.integrations.decode.transfer import moved
from fp8moe.runtime.checks import describe


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
        """Of each sequence the last tokens so far, in which stop strings may begin: those of a prefix too."""
        if self.stop is None:
            return [None] * len(self.tokens)
        window = self.stop.window
        before = [] if self.prefix is None else self.prefix.tokens[-window:].tolist()
        last = self.tokens[:, -window:] if self.mask is None else self.tokens.masked_fill(~self.mask, -1)
        return [Tail(self.stop, before + [token for token in prompt if token >= 0]) for prompt in last.tolist()]


def parse(decoder: Any, arguments: Mapping[str, Any], generation_config: Any) -> Call:
    """Check the arguments of ``decoder.generate``; what is None comes from the generation config, as it says there.

    Raises TypeError or ValueError with the name of the argument that is wrong.
    """
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    check_prompt(ids, mask)
    check_tokens(ids, decoder.model)
    batch = len(ids)
    new_tokens = integer("max_new_tokens", arguments["max_new_tokens"])
    ends, pad = end_tokens(
        vocabulary(decoder.model), arguments["eos_token_id"], arguments["pad_token_id"], generation_config
    )
    samplings = parameters(
        arguments, generation_config, batch, lambda count: decoder.ranks.first(random_seeds(count), decoder.device)
    )
    strings, tokenizer = arguments["stop_strings"], arguments["tokenizer"]
    stop = None if strings is None else StopStrings(strings, tokenizer)
    if stop is not None and batch > 1 and pad is None:
        raise ValueError("stop_strings: in a batch they need pad_token_id, which follows the end of a sequence")
    streamer = arguments["streamer"]
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer: expected put and end, as transformers' BaseStreamer has, got {describe(streamer)}")
    prefix = arguments["prefix"]
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
        return_logprobs=arguments["return_logprobs"],
    )


def end_tokens(size: int, eos: Any, pad: Any, defaults: Any) -> tuple[list[int], int | None]:
    """The end tokens and the pad token, None where there is neither; size: of the vocabulary."""
    eos = defaults.eos_token_id if eos is None else eos
    ends = [] if eos is None else integers("eos_token_id", eos)
    pad = defaults.pad_token_id if pad is None else pad
    pad = integer("pad_token_id", pad) if pad is not None else ends[0] if ends else None
    for name, tokens in (("eos_token_id", ends), ("pad_token_id", [] if pad is None else [pad])):
        if not all(0 <= token < size for token in tokens):
            raise ValueError(f"{name}: expected tokens between 0 and {size - 1}, got {tokens}")
    return ends, pad


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


def _prompt(decoder: Any, ids: Tensor, mask: Tensor | None, padding: int | None) -> tuple[Tensor, Tensor | None]:
    """The prompts and their mask on the model's device; without a mask, tokens `padding` are masked.

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
    if mask is not None and decoder.attention == "flash" and (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "attention_mask: expected zeros on the left only, got some between ones (without attention_mask, "
            "tokens that are pad_token_id count as zeros)"
        )
    return moved(ids.long(), decoder.device), None if mask is None else moved(mask, decoder.device)
