"""GraphDecoder: greedy generation with a transformers model whose decode step is replayed from a CUDA graph."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8moe.integrations.decode.attention import NAME as FLASH
from fp8moe.integrations.decode.checks import check_eval, check_model, check_prompt, device_of, integer, integers
from fp8moe.integrations.decode.flag import EndFlag
from fp8moe.integrations.decode.probe import check_step
from fp8moe.integrations.decode.step import Step, capture_stream, vocabulary
from fp8moe.integrations.fingerprint import Fingerprint

# Steps between two checks of whether every sequence has ended. A check does not stall the GPU: see `EndFlag`.
CHECK_EVERY = 8


class GraphDecoder:
    """Generates greedily with a causal language model of transformers, one CUDA graph replay per token.

    The decode step (one token per sequence: the model, argmax, end-of-sequence bookkeeping) is captured once for each
    of ``batch_sizes`` with a static cache; a step then costs the CPU one graph launch. The prompt is read eagerly into
    the same cache. Nothing in the step depends on host values: lengths, masks and expert routing are read on the
    device, so they may differ at every replay. A batch is padded up to the next captured size with copies of its first
    sequence, which choose the same experts and so read no further weights.

    Where the model is on a CPU the same step runs without a graph; the results are the same.

    On a GPU flash attention reads the cache where it lies, without a mask and without repeating the key heads, if it
    serves the model: 16-bit dtypes, keys and values of one size up to 256, no soft cap, sinks or position bias, no
    masks but causal and sliding ones. Otherwise the model's own attention does. ``attention`` is "flash", or which
    other it is and why.

    Memory: each batch size has a cache of its own of ``max_length`` tokens a sequence, also for layers with a sliding
    window (the mask cuts the window); the graphs share one memory pool. Closing or deleting the decoder frees both.

    The graphs read the weights where they lay at the capture: after moving or changing them, make a new decoder;
    `generate` raises RuntimeError until then. Threads may share a decoder: their calls take turns.

    Args:
        model: a causal language model of transformers in eval mode, all of it on one device, with attention
            implementation "sdpa" or "eager" (for "eager" transformers 5.17 copies a constant from the host, which
            cannot be captured). On a GPU its experts need an implementation that can be captured, such as "fp8moe"
            (fp8moe.integrations.transformers.register); "eager" experts read the routing on the host.
        batch_sizes: of the captured steps; any smaller batch is served by the next larger one.
        max_length: most tokens of a sequence, prompt and answer together.
        capture: False runs the step without a graph on a GPU too.

    Raises:
        TypeError, ValueError: an argument is wrong, or the model cannot be captured; says why. The model reads a few
            tokens to see that its step, with a static cache, gives the logits that it gives without a cache.
        RuntimeError: the capture itself failed.
    """

    @torch.inference_mode(False)  # whatever the caller's mode: what is kept here must stay writable outside it
    def __init__(self, model: Any, *, batch_sizes: Sequence[int] = (1,), max_length: int, capture: bool = True):
        if not isinstance(batch_sizes, Iterable):
            raise TypeError(f"batch_sizes: expected a sequence of integers, got {batch_sizes!r}")
        sizes = sorted({integer("batch_sizes", size) for size in batch_sizes})
        if not sizes or sizes[0] < 1:
            raise ValueError(f"batch_sizes: expected one or more positive integers, got {tuple(batch_sizes)}")
        self.max_length = integer("max_length", max_length)
        if self.max_length < 2:
            raise ValueError(f"max_length: expected at least 2, got {max_length}")
        self.device = device_of(model)
        self.captured = capture and self.device.type == "cuda"
        check_model(model, self.captured)
        self.model = model
        self.batch_sizes = tuple(sizes)
        self._lock = threading.Lock()
        with self._on_device():
            flash = self._choose_attention()
        self._steps = {size: Step(model, size, self.max_length, self.device, flash) for size in sizes}
        self._flag = EndFlag() if self.captured else None
        if self.captured:
            self._capture()
        self._weights = Fingerprint(model.parameters())

    @torch.inference_mode(False)
    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """The prompts, each followed by its greedy continuation: what ``model.generate(do_sample=False)`` returns.

        input_ids: (B, L) integers. Shorter prompts are padded on the left.
        attention_mask: (B, L), 0 where a prompt is padded. None: where it has the pad token, if that is no end token;
            otherwise none is padded.
        eos_token_id: a sequence ends after any of these tokens. None: those of ``model.generation_config``; (): none.
        pad_token_id: what follows the end of a sequence while others go on. None: that of ``model.generation_config``,
            else the first end token.
        Integers may be of any kind: Python's, numpy's, tensors of one element.
        Returns (B, L + n) int64 on the device of ``input_ids``; n is max_new_tokens, or less if every sequence ended.

        Other settings of ``model.generation_config`` are not applied.

        Raises TypeError or ValueError for wrong arguments: more than max_length tokens, more sequences than the largest
        captured batch, padding on the right; ValueError if the model is in training mode. RuntimeError if the weights
        have changed since the capture, or the decoder is closed.
        """
        ends, pad = self._end_tokens(eos_token_id, pad_token_id)
        new_tokens = integer("max_new_tokens", max_new_tokens)
        tokens, mask = self._prompt(input_ids, attention_mask, new_tokens, None if pad in ends else pad)
        batch, length = tokens.shape
        with self._lock, self._on_device():
            if not self._steps:
                raise RuntimeError("the decoder is closed")
            check_eval(self.model)
            if self.captured and not self._weights.matches(self.model.parameters()):
                raise RuntimeError(
                    "the model's weights have moved or changed since the capture: make a new GraphDecoder"
                )
            step = self._steps[next(size for size in self.batch_sizes if size >= batch)]
            step.start(batch, length, mask, ends, 0 if pad is None else pad)
            step.accept(step.prefill(tokens, mask))
            self._decode(step, new_tokens - 1, bool(ends))
            new = step.result(batch)
        return torch.cat([input_ids.long(), new.to(input_ids.device)], dim=1)

    def close(self) -> None:
        """Free the graphs and the caches."""
        with self._lock:
            self._release()

    def __del__(self):
        self._release()

    def _release(self) -> None:
        for step in getattr(self, "_steps", {}).values():  # the constructor may have raised
            step.release()
        self._steps = {}

    def _on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _choose_attention(self) -> str | None:
        """Check the step with the model's own attention, then take flash attention if it serves the model too."""
        check_step(self.model, self.device, self.captured)
        own = self.model.config.get_text_config(decoder=True)._attn_implementation
        self.attention = f"{own}: on a GPU only"
        if self.device.type == "cuda":
            try:
                check_step(self.model, self.device, self.captured, FLASH)
            except ValueError as error:
                self.attention = f"{own}: {error}"
            else:
                self.attention = "flash"
        return FLASH if self.attention == "flash" else None

    def _decode(self, step: Step, count: int, may_end: bool) -> None:
        for number in range(1, count + 1):
            step.replay()
            if not may_end:
                continue
            if self._flag is None:
                if step.finished.all():
                    return
            elif number % CHECK_EVERY == 0 and self._flag.was_set_then_watch(step.finished):
                self._flag.forget()
                return
        if self._flag is not None:
            self._flag.forget()

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        with self._on_device(), torch.no_grad():
            stream = capture_stream(torch.cuda.current_device())
            # The largest first: the smaller ones then find room in the pool.
            for size in reversed(self.batch_sizes):
                try:
                    self._steps[size].capture(stream, pool)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"the decode step of {type(self.model).__name__} cannot be captured for batch size {size}: "
                        f"{error}"
                    ) from error

    def _prompt(
        self, ids: Tensor, mask: Tensor | None, new_tokens: int, padding: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """The prompts and their mask on the model's device; without a mask, tokens `padding` are masked."""
        check_prompt(ids, mask)
        batch, length = ids.shape
        if new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {new_tokens}")
        if length + new_tokens > self.max_length:
            raise ValueError(
                f"max_new_tokens: {length} tokens of prompt and {new_tokens} new ones are more than max_length, "
                f"{self.max_length}"
            )
        if batch > self.batch_sizes[-1]:
            raise ValueError(
                f"input_ids: {batch} sequences are more than the largest captured batch, {self.batch_sizes[-1]}"
            )
        ids = ids.to(self.device, torch.int64)
        if mask is not None:
            mask = mask.to(self.device, torch.bool)
        elif padding is not None and (ids == padding).any():
            mask = ids != padding
        if mask is not None and not mask[:, -1].all():
            raise ValueError(
                "attention_mask: expected ones in the last column, as of prompts padded on the left (a tokenizer's "
                "padding_side='left')"
            )
        if mask is not None and self.attention == "flash" and (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ValueError(
                "attention_mask: expected zeros on the left only, got some between ones (without attention_mask, "
                "tokens that are pad_token_id count as zeros)"
            )
        return ids, mask

    def _end_tokens(self, eos: Any, pad: Any) -> tuple[list[int], int | None]:
        """The end tokens and the pad token, None where there is neither."""
        defaults = self.model.generation_config
        eos = defaults.eos_token_id if eos is None else eos
        ends = [] if eos is None else integers("eos_token_id", eos)
        pad = defaults.pad_token_id if pad is None else pad
        pad = integer("pad_token_id", pad) if pad is not None else ends[0] if ends else None
        size = vocabulary(self.model)
        for name, tokens in (("eos_token_id", ends), ("pad_token_id", [] if pad is None else [pad])):
            if not all(0 <= token < size for token in tokens):
                raise ValueError(f"{name}: expected tokens between 0 and {size - 1}, got {tokens}")
        return ends, pad
