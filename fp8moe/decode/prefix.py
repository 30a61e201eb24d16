"""A prefix that many prompts share, which is prefilled once."""

import weakref
from typing import Any

import torch
from torch import Tensor

from fp8moe.decode.cache import copy_rows, has_states
from fp8moe.decode.use import ModelState
from fp8moe.hf.routing import Recorder


class Prefix:
    """A prefix of prompts: its tokens (n,) int64, and a cache of n columns with their keys, values and states.

    The first prompts whose routing is recorded read it once more, to record its own.

    pads: whether prompts of different lengths may follow the prefix in one batch.
    """

    def __init__(self, decoder: Any, tokens: Tensor):
        """Prefill a cache with the prefix. tokens: (1, n) int64, on the model's device."""
        self.tokens = tokens[0]
        self.length = tokens.shape[1]
        self._decoder = weakref.ref(decoder)
        self._state = ModelState(decoder.model)
        self._read(None)
        self.pads = decoder.capabilities.ragged and not has_states(self._cache)

    def _read(self, recorder: Recorder | None) -> None:
        """Prefill the cache, and record the routing of the prefix if there is a recorder."""
        step = self._decoder().step_of(1, self.length)
        step.start(1, self.length, None, [], 0)
        step.record(recorder)
        step.prefill(self.tokens[None], None)
        self._cache, self._routing = step.cache, step.routing

    def check(self, decoder: Any) -> None:
        """Raise ValueError if the decoder cannot continue the prefix."""
        if self._decoder() is not decoder:
            raise ValueError("prefix: it was made by another GraphDecoder")
        if change := self._state.change(decoder.model):
            raise ValueError(f"prefix: {change} since it was made: make it again")

    def put(self, step: Any, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, int | None]:
        """Copy the prefix into all rows of a step, after `Step.start`. tokens, mask (B, T): the prompts that follow.

        Padding between the prefix and a prompt could not be masked. Instead, the last tokens of the prefix are computed
        again in place of the padding, and rows begin at different columns.

        Returns the tokens to prefill and the column where they begin; the column is None if it differs between rows.
        Raises ValueError for padding that is not on the left, or if the model cannot have rows of different lengths.
        """
        if step.recorder is not None:
            if self._routing is None:
                self._read(step.recorder)
            step.routing[:, : self.length] = self._routing
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
