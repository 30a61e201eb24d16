"""GraphDecoder: greedy generation with a transformers model whose decode step is replayed from a CUDA graph."""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.integrations.fingerprint import Fingerprint

# Steps between two checks of whether every sequence has ended. A check does not stall the GPU: see `_Flag`.
CHECK_EVERY = 8
WARM_UP_RUNS = 3


class GraphDecoder:
    """Generates greedily with a causal language model of transformers, one CUDA graph replay per token.

    The decode step (one token per sequence: the model, argmax, end-of-sequence bookkeeping) is captured once for each
    of ``batch_sizes`` with a static cache; a step then costs the CPU one graph launch. The prompt is read eagerly into
    the same cache. Nothing in the step depends on host values: lengths, masks and expert routing are read on the
    device, so they may differ at every replay. A batch is padded up to the next captured size with copies of its first
    sequence, which choose the same experts and so read no further weights.

    Where the model is on a CPU the same step runs without a graph; the results are the same.

    Memory: each batch size has a cache of its own of ``max_length`` tokens a sequence, also for layers with a sliding
    window (the mask cuts the window); the graphs share one memory pool. Closing or deleting the decoder frees both.

    The graphs read the weights where they lay at the capture: after moving or changing them, make a new decoder;
    `generate` raises RuntimeError until then. Not safe to use from several threads.

    Args:
        model: a causal language model of transformers in eval mode, all of it on one device, with attention
            implementation "sdpa" or "eager" (for "eager" transformers 5.17 copies a constant from the host, which
            cannot be captured). On a GPU its experts need an implementation that can be captured, such as "fp8moe"
            (fp8moe.integrations.transformers.register); "eager" experts read the routing on the host.
        batch_sizes: of the captured steps; any smaller batch is served by the next larger one.
        max_length: most tokens of a sequence, prompt and answer together.
        capture: False runs the step without a graph on a GPU too.

    Raises:
        TypeError, ValueError: an argument is wrong, or the model cannot be captured; says why.
        RuntimeError: the capture itself failed.
    """

    @torch.inference_mode(False)  # whatever the caller's mode: what is kept here must stay writable outside it
    def __init__(self, model: Any, *, batch_sizes: Sequence[int] = (1,), max_length: int, capture: bool = True):
        if not isinstance(batch_sizes, Iterable):
            raise TypeError(f"batch_sizes: expected a sequence of integers, got {batch_sizes!r}")
        sizes = sorted(set(batch_sizes))
        if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
            raise ValueError(f"batch_sizes: expected one or more positive integers, got {tuple(batch_sizes)}")
        if max_length < 2:
            raise ValueError(f"max_length: expected at least 2, got {max_length}")
        self.device = _device(model)
        self.captured = capture and self.device.type == "cuda"
        _check_model(model, self.captured)
        self.model = model
        self.max_length = max_length
        self.batch_sizes = tuple(sizes)
        self._steps = {size: _Step(model, size, max_length, self.device) for size in sizes}
        self._flag = _Flag() if self.captured else None
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
        attention_mask: (B, L), 0 where a prompt is padded, or None for none.
        eos_token_id: a sequence ends after any of these tokens. None: those of ``model.generation_config``; (): none.
        pad_token_id: what follows the end of a sequence while others go on. None: that of ``model.generation_config``,
            else the first end token.
        Returns (B, L + n) int64 on the device of ``input_ids``; n is max_new_tokens, or less if every sequence ended.

        Other settings of ``model.generation_config`` are not applied.

        Raises TypeError or ValueError for wrong arguments: more than max_length tokens, more sequences than the largest
        captured batch, padding on the right. RuntimeError if the weights have changed since the capture, or the decoder
        is closed.
        """
        if not self._steps:
            raise RuntimeError("the decoder is closed")
        if self.captured and not self._weights.matches(self.model.parameters()):
            raise RuntimeError("the model's weights have moved or changed since the capture: make a new GraphDecoder")
        tokens, mask = self._check_prompt(input_ids, attention_mask, max_new_tokens)
        ends, pad = self._end_tokens(eos_token_id, pad_token_id)
        batch, length = tokens.shape
        step = self._steps[next(size for size in self.batch_sizes if size >= batch)]

        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            step.start(batch, length, mask, ends, pad)
            step.prefill(tokens, mask)
            self._decode(step, max_new_tokens - 1, bool(ends))
            new = step.result(batch)
        return torch.cat([input_ids.long(), new.to(input_ids.device)], dim=1)

    def close(self) -> None:
        """Free the graphs and the caches."""
        for step in getattr(self, "_steps", {}).values():
            step.release()
        self._steps = {}

    def __del__(self):
        self.close()

    def _decode(self, step: "_Step", count: int, may_end: bool) -> None:
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
        with torch.cuda.device(self.device), torch.no_grad():
            stream = _capture_stream(torch.cuda.current_device())
            # The largest first: the smaller ones then find room in the pool.
            for size in reversed(self.batch_sizes):
                try:
                    self._steps[size].capture(stream, pool)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"the decode step of {type(self.model).__name__} cannot be captured for batch size {size}: "
                        f"{error}"
                    ) from error

    def _check_prompt(self, ids: Tensor, mask: Tensor | None, new_tokens: int) -> tuple[Tensor, Tensor | None]:
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise TypeError(f"input_ids: expected integers, got {ids.dtype}")
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"input_ids: expected shape (batch, length), neither of them 0, got {tuple(ids.shape)}")
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
        if mask is not None:
            if mask.shape != ids.shape:
                raise ValueError(f"attention_mask: expected shape {tuple(ids.shape)}, got {tuple(mask.shape)}")
            mask = mask.to(self.device, torch.bool)
            if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
                raise ValueError("attention_mask: expected zeros on the left only (a tokenizer's padding_side='left')")
        return ids.to(self.device, torch.int64), mask

    def _end_tokens(self, eos: int | Iterable[int] | None, pad: int | None) -> tuple[list[int], int]:
        defaults = self.model.generation_config
        if eos is None:
            eos = defaults.eos_token_id if defaults.eos_token_id is not None else ()
        ends = [eos] if isinstance(eos, int) else [int(end) for end in eos]
        if pad is None:
            pad = defaults.pad_token_id
        if pad is None:
            pad = ends[0] if ends else 0
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        for name, tokens in (("eos_token_id", ends), ("pad_token_id", [pad])):
            if not all(0 <= token < vocabulary for token in tokens):
                raise ValueError(f"{name}: expected tokens between 0 and {vocabulary - 1}, got {tokens}")
        return ends, pad


class _Step:
    """The decode step of one batch size: its cache, the tensors that it reads and writes in place, and its graph.

    tokens, positions (B, 1): what the model reads. mask (B, max_length): False where the prompt is padded; the causal
    mask hides the columns that are still to come. generated (B, max_length): the first `count` columns are known.
    finished (B,).
    """

    def __init__(self, model: Any, size: int, max_length: int, device: torch.device):
        self.model = model
        self.size = size
        self.cache = _static_cache(model.config, max_length)
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        self.tokens = integers(size, 1)
        self.positions = integers(size, 1)
        self.mask = torch.ones(size, max_length, dtype=torch.bool, device=device)
        self.generated = integers(size, max_length)
        self.count = integers(1)
        self.finished = torch.zeros(size, dtype=torch.bool, device=device)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.is_end = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.pad = integers(())
        self.graph: torch.cuda.CUDAGraph | None = None

    def start(self, batch: int, length: int, mask: Tensor | None, ends: list[int], pad: int) -> None:
        """Set everything for a batch of prompts; rows from `batch` on are copies of row 0."""
        self.cache.reset()  # writes zeros: masked values are multiplied by 0, which would leave a NaN
        self.count.zero_()
        self.mask.fill_(True)
        if mask is None:
            self.positions.fill_(length - 1)
        else:
            self.mask[:, :length] = self.rows(mask)
            self.positions.copy_(self.mask[:, :length].sum(1, keepdim=True) - 1)
        self.is_end.zero_()
        if ends:
            self.is_end[ends] = True
        self.pad.fill_(pad)
        self.finished.zero_()
        self.finished[batch:] = True

    def prefill(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Read the prompts and choose the first new token of each."""
        length = tokens.shape[1]
        arguments = {}
        if mask is None:
            positions = torch.arange(length, device=tokens.device).expand(self.size, length)
        else:
            arguments["attention_mask"] = self.mask[:, :length].long()
            positions = (arguments["attention_mask"].cumsum(1) - 1).clamp(min=0)
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            arguments["logits_to_keep"] = 1
        self.accept(self.run(self.rows(tokens), positions, **arguments))

    def replay(self) -> None:
        """One more token for each sequence."""
        if self.graph is None:
            self.advance()
        else:
            self.graph.replay()

    def advance(self) -> None:
        self.positions.add_(1)
        self.accept(self.run(self.tokens, self.positions, attention_mask=self.mask))

    def run(self, tokens: Tensor, positions: Tensor, **arguments) -> Tensor:
        """The logits (B, vocabulary) after the last of `tokens`."""
        output = self.model(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, **arguments
        )
        return output.logits[:, -1]

    def accept(self, logits: Tensor) -> None:
        chosen = torch.where(self.finished, self.pad, logits.argmax(-1))
        self.finished.logical_or_(self.is_end[chosen])
        self.tokens.copy_(chosen[:, None])
        self.generated.index_copy_(1, self.count, self.tokens)
        self.count.add_(1)

    def rows(self, values: Tensor) -> Tensor:
        """(batch, ...) -> (size, ...): copies of row 0 below."""
        missing = self.size - len(values)
        return torch.cat([values, values[:1].expand(missing, *values.shape[1:])]) if missing else values

    def result(self, batch: int) -> Tensor:
        """The new tokens (batch, n), up to the end of the sequence that ended last."""
        count = int(self.count)
        new = self.generated[:batch, :count]
        ended = self.is_end[new]
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, count)
        return new[:, : int(lengths.max())].clone()

    def capture(self, stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):  # allocates the cache, compiles kernels, fills PyTorch's own workspaces
                self.start(self.size, 1, None, [], 0)
                self.advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on calling CUDA.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.advance()
        self.graph = graph

    def release(self) -> None:
        if self.graph is not None:
            self.graph.reset()
            self.graph = None


class _Flag:
    """Tells at each check what the check before it saw: waiting for that copy never leaves the GPU without work."""

    def __init__(self):
        self.value = torch.zeros((), dtype=torch.bool, pin_memory=True)
        self.copied = torch.cuda.Event()
        self.watching = False

    def was_set_then_watch(self, finished: Tensor) -> bool:
        """Whether the tensor of the previous call was all True; if not, start copying whether this one is."""
        if self.watching:
            self.copied.synchronize()
            if self.value.item():
                return True
        self.value.copy_(finished.all(), non_blocking=True)
        self.copied.record()
        self.watching = True
        return False

    def forget(self) -> None:
        self.watching = False


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all decoders: cuBLAS keeps a workspace for every stream that it was called on."""
    return torch.cuda.Stream(device)


def _device(model: Any) -> torch.device:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a causal language model of transformers, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"model: expected all of it on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def _check_model(model: Any, captured: bool) -> None:
    name = type(model).__name__
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise TypeError(f"model: expected a causal language model, got {name}")
    if model.training:
        raise ValueError("model: call model.eval() first")
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"model: its attention implementation is {attention!r}; GraphDecoder runs 'sdpa' and 'eager' "
            "(model.set_attn_implementation('sdpa'))"
        )
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", ())
        kinds = set(kinds.values() if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else [])
        if kinds & {"dynamic", "longrope"}:
            raise ValueError(f"model: {path} changes its frequencies on the host as the sequence grows ({kinds})")
        if captured and _is_experts(module) and module.config._experts_implementation == "eager":
            raise ValueError(
                f"model: {path} runs the experts implementation 'eager', which reads the routing on the host and "
                "cannot be captured; call fp8moe.integrations.transformers.register() and "
                "model.set_experts_implementation('fp8moe')"
            )


def _is_experts(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation made its forward."""
    return hasattr(module, "has_gate") and hasattr(getattr(module, "config", None), "_experts_implementation")


def _static_cache(config: Any, max_length: int) -> Any:
    """A StaticCache whose layers all hold `max_length` tokens.

    transformers' sliding-window layers count tokens on the host, which a graph cannot follow. Full-length layers take
    their place, and the mask limits attention to the window.
    """
    from transformers import StaticCache, cache_utils

    try:
        cache = StaticCache(config=config, max_cache_len=max_length)
    except KeyError as error:
        raise ValueError(f"model: transformers has no static cache for its layers of type {error}") from error
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    for index, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.StaticSlidingWindowLayer and "chunked_attention" not in kinds:
            cache.layers[index] = cache_utils.StaticLayer(max_cache_len=max_length)
        elif type(layer) not in (cache_utils.StaticLayer, getattr(cache_utils, "StaticIndexedLayer", None)):
            raise ValueError(
                f"model: layer {index} keeps a {type(layer).__name__}; GraphDecoder serves full, sliding-window and "
                "indexed attention, not chunked or linear attention (Mamba and the like)"
            )
    return cache
