"""The prefix of many prompts, read once: what a model's cache keeps of it."""

import weakref
from typing import Any

import torch
from torch import Tensor

from fp8moe.integrations.decode.cache import copy_rows, has_states
from fp8moe.integrations.decode.checks import check_prompt, check_tokens
from fp8moe.integrations.decode.model_state import ModelState
from fp8moe.integrations.decode.step import Step
from fp8moe.runtime.checks import check_tensor


class Prefix:
    """tokens (n,) int64, and the keys, values and states of a step after them, in a cache of exactly their length."""

    def __init__(self, decoder: Any, tokens: Tensor, step: Step):
        self.tokens = tokens
        self.length = len(tokens)
        self._decoder = weakref.ref(decoder)
        self.pads = step.way.rows and not has_states(step.cache)
        """Whether prompts that follow it in one batch may have different lengths."""
        self._cache = step.cache
        self._state = ModelState(decoder.model)

    def check(self, decoder: Any) -> None:
        """Raise ValueError if the decoder cannot continue it."""
        if self._decoder() is not decoder:
            raise ValueError("prefix: it was made by another GraphDecoder")
        if change := self._state.change(decoder.model):
            raise ValueError(f"prefix: {change} since it was made: make it again")

    def put(self, step: Step, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, int | None]:
        """Begin the rows of a started step with it. tokens, mask (B, T): the prompts that follow.

        Padding between the prefix and a prompt could not be hidden: the last tokens of the prefix take its place and
        are read again, in rows of their own lengths.

        Returns the tokens to read and the column where they begin, None where the rows differ in it.
        Raises ValueError for padding that is not on the left, or that the model cannot do without.
        """
        size, new = tokens.shape
        row = torch.arange(size, device=tokens.device)
        copy_rows(step.cache, size, row, self._cache, torch.zeros_like(row), self.length)
        if mask is None or mask.all():
            step.columns.fill_(self.length)
            return tokens, self.length
        name = type(step.model).__name__
        if (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ValueError("attention_mask: after a prefix expected zeros on the left only, got some between ones")
        if not self.pads:
            raise ValueError(f"prefix: {name} can continue it with prompts of one length only, without padding")
        padding = step.begin[:, None].clone()
        column = torch.arange(new, device=tokens.device)
        source = torch.where(column < padding, self.length - padding + column, self.length + column)
        joined = torch.cat([self.tokens.expand(size, -1), tokens], dim=1)
        step.columns.copy_((self.length - step.begin).clamp(min=0))
        step.begin.sub_(self.length).clamp_(min=0)
        step.mask.copy_(torch.arange(step.mask.shape[1], device=tokens.device) >= step.begin[:, None])
        return joined.gather(1, source.clamp(min=0)), None


def read_prefix(decoder: Any, input_ids: Tensor) -> Prefix:
    """For `decoder.prefix`, which checks that the decoder is ready: read (n,) or (1, n) integers once.

    Raises TypeError or ValueError for other tensors, for no room after it, and for a model that cannot go on from it.
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
    if not decoder.way.chunks:
        raise ValueError(
            f"model: {type(decoder.model).__name__} reads a prompt in one piece only, so it cannot continue a prefix"
        )
    tokens = ids.to(decoder.device, torch.int64)
    step = decoder.step_of(1, length)
    step.start(1, length, None, [], 0)
    step.prefill(tokens, None)
    return Prefix(decoder, tokens[0], step)
