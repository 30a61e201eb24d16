"""GraphDecoder: generation with a transformers model whose decode step is replayed from a CUDA graph."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, NoReturn, SupportsIndex, Unpack

import torch
from torch import Tensor, nn

from fp8moe.decode import custom_generate
from fp8moe.decode.attention import NAME as FLASH
from fp8moe.decode.cache import bytes_of_a_row, has_states
from fp8moe.decode.memory import free_memory
from fp8moe.decode.output import OutputLayer, bytes_of_copy
from fp8moe.decode.prefill import MOST_GRAPH_TOKENS, compile_for_prompts
from fp8moe.decode.prefix import Prefix
from fp8moe.decode.probe import (
    check_batch_invariance,
    check_cache_dtype,
    check_model,
    check_output_dtype,
    device_of,
    find_capabilities,
)
from fp8moe.decode.request import Options, Request, parse, parse_prefix
from fp8moe.decode.sampling import integer
from fp8moe.decode.scheduler import ROWS_PER_NEWCOMER, Result, decode, run
from fp8moe.decode.stats import Records, Stats, cache_bytes, pool_bytes
from fp8moe.decode.step import PLAIN, Capabilities, Step, capture_stream
from fp8moe.decode.use import ModelState, check_eval, ranks_of
from fp8moe.hf.fused import FusedModule, find_fused
from fp8moe.hf.routing import Recorder, check_outside
from fp8moe.layers.wrapped import check_not_around, unwrapped
from fp8moe.quant.formats import ceil_div
from fp8moe.runtime import config
from fp8moe.runtime.checks import describe
from fp8moe.runtime.settings import standard_device
from fp8moe.weights.closing import refits_of


class _Turn(NamedTuple):
    """One thread's turn. over: a queue that gets an element when the turn ends; other threads wait for this element."""

    thread: int
    over: SimpleQueue


class _Turns:
    """Gives turns to threads, one at a time. A thread with a turn, as in a suspended generator, gets no other turn.

    A KeyboardInterrupt at any line leaves no turn behind: a single operation takes the turn and records the owner, and
    the turn is ended twice, because an interrupt may stop the first attempt.
    """

    def __init__(self) -> None:
        self._owner: dict[str, _Turn] = {}  # empty while nobody has the turn

    @contextmanager
    def next(self) -> Iterator[None]:
        """Wait for a turn of this thread. Raises RuntimeError if the thread already has a turn."""
        mine = _Turn(threading.get_ident(), SimpleQueue())
        try:
            try:
                while (owner := self._owner.setdefault("turn", mine)) is not mine:
                    if owner.thread == mine.thread:
                        raise RuntimeError(
                            "the decoder is at work: this thread has a stream or run of it that has not ended; finish "
                            "it or close it first"
                        )
                    with suppress(Empty):
                        # The timeout helps if a thread was interrupted after get, and so did not put the element back.
                        owner.over.put(owner.over.get(timeout=1))
                yield
            finally:
                self._end(mine)
        finally:
            self._end(mine)

    def _end(self, mine: _Turn) -> None:
        if self._owner.get("turn") is mine:
            del self._owner["turn"]
        mine.over.put(None)


class GraphDecoder:
    """Generates with a causal language model of transformers, one CUDA graph replay per token.

    The decode step (one token per sequence: running the model, choosing the token, end-of-sequence bookkeeping) is
    captured once for each of ``batch_sizes`` with a static cache; a step then costs the CPU one graph launch. Prompts
    are prefilled into the same cache, eagerly or, if short, with graphs of their own (`short_prompts`). Nothing in the
    step depends on host values: lengths, masks, expert routing and sampling parameters are read on the device,
    so they may differ at every replay. A batch is padded up to the next captured size with copies of its first
    sequence, which choose the same experts and so read no further weights.

    On a CPU the same step runs without a graph; the results are the same.

    On a GPU, flash attention reads the cache in place, without a mask and without repeating the key heads, if it
    supports the model: 16-bit dtypes, keys and values of one size up to 256, no soft cap or position bias, and only
    causal and sliding-window masks; heads may have sinks. Otherwise the model's own attention runs. ``attention`` is
    "flash", or the name of the model's own attention and the reason for it. Prompts run in FlashAttention-3 where
    fa3-fwd is installed and takes them; `fp8moe.hf.report` says in which layers.

    Memory: each batch size has its own cache of ``max_length`` tokens per sequence, also for layers with a sliding
    window, of which attention reads only the window; the graphs share one memory pool. Closing or deleting the decoder
    frees both.

    A decoder made inside `fp8moe.batch_invariant`, or with FP8MOE_BATCH_INVARIANT=1, gives a sequence the same tokens
    and logprobs whatever else is in its batch, and a token the same logprobs in a prompt and in an answer; it must be
    called inside, too. This needs attention that reads the cache, which then runs on a CPU too, and no sinks. Logprobs
    are those that PyTorch's log_softmax gives for the logits in float32.
    torch.autocast has no effect on a decoder.

    The graphs read weights at the addresses that they had at the capture: `fp8moe.refit` writes new ones there. If you
    move or change weights in another way, `generate` raises RuntimeError; make a new decoder. Threads may share a
    decoder: their calls take turns. A stream or run holds its turn until it ends or is closed.

    ``model.generate(..., custom_generate=decoder)`` works too: see `__call__`.

    If several ranks hold the model together, by tensor or expert parallelism, each makes a decoder, and all make the
    same calls with the same prompts and arguments. They get the same tokens and end at the same step. A rank that
    leaves a stream or run early leaves the others waiting.

    Args:
        model: a causal language model of transformers in eval mode. torch.compile, DistributedDataParallel or peft may
            wrap it; the decoder's ``model`` is the one inside. All of it must be on one device, with attention
            implementation "sdpa" or "eager" (for "eager" transformers 5.17 copies a constant from the host, which
            cannot be captured). On a GPU its experts need an implementation that can be captured, such as "fp8moe"
            (fp8moe.hf.register); "eager" experts read the routing on the host.
        batch_sizes: the batch sizes of the captured steps; a smaller batch is served by the next larger step.
        max_length: most tokens of a sequence, prompt and answer together.
        capture: False runs the step without a graph on a GPU too.
        fuse: whether the decoder runs the model's modules other than experts in fp8moe's kernels, where their code is
            known, as after `fp8moe.hf.optimize`. ``fused`` lists these modules. Outside of the decoder the model stays
            as it is, except that FP8 weights of projections that read the same input become adjacent in memory.
        prefill_chunk: columns of a batch of prompts to prefill at a time. This bounds the memory for prefill, and the
            time that streams of other requests wait: they get a step after each chunk. None: chosen from the free
            memory; while requests stream, chunks have at most 8192 tokens on a GPU and 256 on a CPU. Models that cannot
            prefill after cached tokens, such as some with linear attention, prefill a prompt in one piece.
        cache_dtype: torch.float8_e4m3fn keeps keys and values in FP8, with a float32 scale for each token and head, in
            half of the memory; attention then reads half of the bytes in a step. Every token, in a prompt too, attends
            to keys and values as they are kept. Layers with a sliding window keep the model's dtype. This needs flash
            attention, which then runs on a CPU too, and heads of a multiple of 16 values. None: the model's dtype.
        output_dtype: torch.float8_e4m3fn computes logits by an FP8 copy of the output layer, made as by `FP8Linear`:
            steps read half of its bytes, and the copy takes memory. The model keeps its own layer, and embeddings tied
            to it stay as they are. This needs an nn.Linear of multiples of 8 and 16. None: the model's own layer.

    Raises:
        TypeError, ValueError: an argument is wrong, or the model cannot be captured; the message says why. The check
            runs a few tokens through the decode step, with a static cache: their logits must be the same as without a
            cache.
        RuntimeError: the capture itself failed, the call is in a block of `fp8moe.hf.replay_routing` for the model, or
            fa3-fwd is installed but cannot be imported.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("GraphDecoder cannot be copied or pickled: its graphs are those of one process; make another")

    @torch.inference_mode(False)  # tensors made here must be writable outside of inference mode
    def __init__(
        self,
        model: Any,
        *,
        batch_sizes: Sequence[int] = (1,),
        max_length: int,
        capture: bool = True,
        fuse: bool = True,
        prefill_chunk: int | None = None,
        cache_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ):
        if not isinstance(batch_sizes, Iterable):
            raise TypeError(f"batch_sizes: expected a sequence of integers, got {batch_sizes!r}")
        sizes = sorted({integer("batch_sizes", size) for size in batch_sizes})
        if not sizes or sizes[0] < 1:
            raise ValueError(f"batch_sizes: expected one or more positive integers, got {tuple(batch_sizes)}")
        self.max_length = integer("max_length", max_length)
        if self.max_length < 2:
            raise ValueError(f"max_length: expected at least 2, got {max_length}")
        self.prefill_chunk = None if prefill_chunk is None else integer("prefill_chunk", prefill_chunk)
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk: expected at least 1, got {prefill_chunk}")
        if isinstance(model, torch.nn.Module):
            check_not_around("model", model)
            model = unwrapped("model", model)
        self.device = device_of(model)
        self.captured = capture and self.device.type == "cuda"
        check_outside("GraphDecoder", model)
        check_model(model, self.captured)
        check_cache_dtype(model, cache_dtype)
        check_output_dtype(model, output_dtype)
        self.model = model
        self._dtype = model.dtype
        self.ranks = ranks_of(model)
        self.batch_sizes = tuple(sizes)
        self._turns = _Turns()
        self._batch_invariant = config.settings.batch_invariant
        self._records = Records()
        self._pool: tuple[int, int] | None = None
        self._readers: dict[int, Step] = {}
        with self.on_device():
            self.capabilities = self._find_capabilities(fuse, cache_dtype)
            self._check_memory(sizes, output_dtype is not None)
            if output_dtype is not None:
                self.capabilities = self.capabilities._replace(output=OutputLayer(model))
            self.steps = {size: self.step_of(size, self.max_length) for size in sizes}
        self.fused: tuple[FusedModule, ...] = self.capabilities.fused or ()
        if self._batch_invariant:
            check_batch_invariance(model, self.attention, any(has_states(step.cache) for step in self.steps.values()))
        if self.captured:
            self._capture()
            compile_for_prompts(self.device.index, self.batch_sizes[-1] * self.max_length)
        self._state = ModelState(model, self.capabilities.output)
        refits_of(model).captures.add(self._state)

    def generate(self, input_ids: Tensor, **options: Unpack[Options]) -> Tensor | tuple[Tensor, ...]:
        """Return the prompts, each followed by its continuation, as ``model.generate`` does.

        input_ids: (B, L) integers. Shorter prompts are padded on the left.
        max_new_tokens: the most tokens of a continuation.
        attention_mask: (B, L), 0 where a prompt is padded. None: the prompts are padded where they have the pad token,
            unless that is also an end token; then they have no padding.
        eos_token_id: a sequence ends after any of these tokens; (): after no token. None: the end tokens in
            ``model.generation_config``.
        pad_token_id: fills a sequence after its end while others continue. None: the pad token in
            ``model.generation_config``, or else the first end token.
        do_sample: False chooses the most probable token. True draws a token among those that top_k, top_p and min_p
            keep, as defined by transformers, with probabilities at ``temperature`` (below 1e-5: as without do_sample).
            An option that is None comes from ``model.generation_config``; if it is None there too, it is off.
        repetition_penalty: as in transformers, logits of tokens in the prompt or the answer are divided by it, or
            multiplied where they are negative. presence_penalty: subtracted from logits of tokens in the answer. Both
            apply without do_sample, too; then ``model.generation_config`` sets only the default of repetition_penalty.
        seed: a 64-bit integer for all sequences, or one for each. What a sequence draws depends only on its own seed
            and logits: with one integer for all, the same prompt twice in a batch gives the same answer twice. None:
            PyTorch's default generator draws a seed for each sequence; of several ranks, the first draws for all.
        streamer: a streamer of transformers, such as TextStreamer: gets the prompts, then the tokens (B,) of each step.
        stop_strings: a sequence ends after the token that completes one of these strings in the text that
            ``tokenizer`` decodes. None: the stop strings in ``model.generation_config``.
        prefix: a result of `prefix`, which the prompts continue. Its tokens are not returned.
        return_logprobs: also return the log probabilities that the model gave the new tokens, (B, n) float32, before
            penalties, temperature and filters; 0 after the end of a sequence.
        return_routing: also return, last, the experts of each token that was read, int16 (B, P + L + n - 1, layers, K):
            of the prefix's P tokens, of the prompts, and of all new tokens but the last; for each layer with experts,
            in order. -1 for padding and behind the end of a sequence. `fp8moe.hf.replay_routing` takes it. The first
            call for a batch size captures a second graph of its step, which writes the experts beside the cache, 2
            bytes each.
        Integers may be of any kind: Python's, numpy's, tensors of one element.
        Returns (B, L + n) int64 on the device of ``input_ids``; n is max_new_tokens, or less if every sequence ended.

        Raises TypeError or ValueError for wrong arguments: more than max_length tokens, more sequences than the largest
        captured batch, padding on the right. Raises ValueError for settings of ``model.generation_config`` that would
        change tokens but are not applied (suppress_tokens, bad_words_ids, min_length, num_beams...), if the model is in
        training mode, and for return_routing of a model whose routers are not known. Raises NaNLogits, a ValueError
        with what was generated, if the logits of a sequence become NaN. Raises RuntimeError if the decoder is closed,
        if the weights change during the call, and if they have changed since the capture other than by a complete
        `fp8moe.refit`.
        """
        return self._only(parse(self, input_ids, options, self.model.generation_config))

    def stream(self, input_ids: Tensor, **options: Unpack[Options]) -> Iterator[Any]:
        """Yield the new tokens of each step, (B,) int64 on the device of ``input_ids``, until every sequence has ended.

        With return_routing, yield (tokens, routing) with the experts of what was read for them, as `generate` returns
        them: of the prefix and the prompts (B, P + L, layers, K) at first, then of the tokens before (B, 1, layers, K).

        After its end, a sequence has pad tokens. Arguments and errors are those of `generate`, except return_logprobs.
        This call raises the errors of wrong arguments; the iterator raises all others. A step is yielded while the GPU
        works on the next one. Leaving the loop or closing the iterator frees the decoder.
        """
        request = parse(self, input_ids, options, self.model.generation_config)
        if request.return_logprobs:
            raise ValueError("return_logprobs: stream yields no logprobs; generate returns them")
        request.stepwise = True
        return self._steps(request)

    @torch.inference_mode(False)
    @torch.no_grad()
    def prefix(self, input_ids: Tensor) -> Prefix:
        """Prefill the common beginning of many prompts once, for use in `generate`, `stream` and `run`.

        input_ids: (n,) or (1, n) integers. With a prefix, `generate` returns what it would return for the whole prompt,
        without the prefix's tokens. A prefix holds the keys, values and states of n tokens in memory of its own, and
        can be used with this decoder until the weights change.

        Raises TypeError or ValueError for other tensors, if no room is left after the prefix, and for a model that
        cannot prefill after cached tokens. Raises RuntimeError as `generate` does.
        """
        with self.turn(), self.on_device():
            return Prefix(self, parse_prefix(self, input_ids))

    def run(
        self, requests: Iterable[Mapping[str, Any]], *, progress: bool | Callable[[int, int | None], None] | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Serve many requests with continuous batching: a request that ends frees its row of the batch for another.

        requests: an iterable with a dict of `generate`'s arguments for each request. The request's input_ids are one
            prompt, (length,). The iterable may be lazy and endless: it is read only as far ahead as there are rows. A
            request's streamer gets the prompt, then the new tokens one by one; if the streamer raises, the run ends.
        progress: True for a bar on standard error; or a function, which is called with the number of results and the
            number of requests, None if that is unknown.

        Yields (index of the request, new tokens (n,) without padding) as requests end; in place of the tokens (tokens,
        logprobs) for a request with return_logprobs, (tokens, routing) with return_routing, (tokens, logprobs, routing)
        with both; routing is (P + L + n - 1, layers, K). A request that is refused, or whose logits become NaN, gives
        (index, ValueError), and the others go on. A request's tokens do not depend on other requests, except for
        rounding. Closing the iterator, or leaving the loop and dropping the iterator, frees the rows.

        Raises TypeError for wrong arguments, and ValueError for a model that cannot have rows of different lengths in a
        batch. The iterator raises RuntimeError as `generate` does.
        """
        if isinstance(requests, Mapping | str | Tensor) or not isinstance(requests, Iterable):
            raise TypeError(
                f"requests: expected an iterable of dicts of generate's arguments, got {describe(requests)}"
            )
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise TypeError(f"progress: expected True, False, None or a callable, got {describe(progress)}")
        if not self.capabilities.ragged:
            raise ValueError(
                f"model: the rows of a batch of {type(self.model).__name__} cannot have lengths of their own, which "
                "run needs; generate serves it"
            )
        return run(self, requests, progress)

    def stats(self) -> Stats:
        """Return the numbers of calls and tokens, the times and the memory so far: see `stats.Stats`.

        Waits until the GPU has finished the calls that have ended on the host, but not for calls still in progress.
        """
        return self._records.stats(cache_bytes(step.cache for step in self.steps.values()), pool_bytes(self._pool))

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        generation_config: Any,
        logits_processor: Iterable[Callable] = (),
        stopping_criteria: Iterable[Callable] = (),
        streamer: Any = None,
        stop_strings: str | Iterable[str] | None = None,
        tokenizer: Any = None,
        presence_penalty: float | None = None,
        seed: int | Iterable[int] | None = None,
        prefix: Prefix | None = None,
        return_logprobs: bool = False,
        return_routing: bool = False,
        **model_arguments: Any,
    ) -> Any:
        """Generate for ``model.generate(..., custom_generate=decoder)``, which calls this with prepared arguments.

        Settings come from ``generation_config``; presence_penalty, seed, prefix, return_logprobs and return_routing may
        also be given to ``model.generate``. transformers does not pass on a streamer or a tokenizer: for a streamer,
        use ``custom_generate=functools.partial(decoder, streamer=streamer)``, and for stop strings
        ``functools.partial(decoder, tokenizer=tokenizer)``.

        Returns what `generate` does; with return_dict_in_generate, the tokens are in a GenerateDecoderOnlyOutput.

        Raises ValueError that names what is not supported: another model, beams, several sequences for a prompt, logits
        processors and stopping criteria that `generate` has no argument for, scores, model arguments, or a streamer
        given to ``model.generate``, which would get no tokens.
        """
        if model is not self.model:
            raise ValueError(f"custom_generate: this decoder was made for another {type(self.model).__name__}")
        custom_generate.check_streamer(sys._getframe(1))
        custom_generate.check_processors(logits_processor, generation_config)
        custom_generate.check_criteria(stopping_criteria, generation_config)
        options = {
            **custom_generate.translate(input_ids, generation_config, model_arguments),
            "streamer": streamer,
            "stop_strings": stop_strings,
            "tokenizer": tokenizer,
            "presence_penalty": presence_penalty,
            "seed": seed,
            "prefix": prefix,
            "return_logprobs": return_logprobs,
            "return_routing": return_routing,
        }
        result = self._only(parse(self, input_ids, options, generation_config))
        return custom_generate.as_output(result) if generation_config.return_dict_in_generate else result

    def close(self) -> None:
        """Free the graphs, the caches and the copy of the output layer."""
        with self._turns.next():
            self._release()

    def __del__(self) -> None:
        self._release()

    def _release(self) -> None:
        # The constructor may have raised before it set these attributes.
        for step in (*getattr(self, "steps", {}).values(), *getattr(self, "_readers", {}).values()):
            step.release()
        self.steps, self._readers, self._pool = {}, {}, None
        output = getattr(self, "capabilities", PLAIN).output
        if output is not None:
            output.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for this thread's turn. Raises RuntimeError or ValueError if the decoder or its model is not ready."""
        with self._turns.next():
            if not self.steps:
                raise RuntimeError("the decoder is closed")
            if config.settings.batch_invariant != self._batch_invariant:
                made = "inside" if self._batch_invariant else "outside"
                raise RuntimeError(f"the decoder was made {made} of fp8moe.batch_invariant(): call it there too")
            check_eval(self.model)
            check_outside("GraphDecoder", self.model)
            if (now := (self.model.dtype, self.model.device)) != (self._dtype, self.device):
                raise RuntimeError(
                    f"the model is {now[0]} on {now[1]}, and was {self._dtype} on {self.device} when the decoder was "
                    "made: make a new GraphDecoder"
                )
            refits = refits_of(self.model)
            refits.check(refits.count)
            copied = self.captured or self.capabilities.output is not None
            if copied and (change := self._state.change(self.model)):
                since = "the capture" if self.captured else "the decoder was made"
                raise RuntimeError(f"{change} since {since}: make a new GraphDecoder")
            yield

    @cached_property
    def recorder(self) -> Recorder:
        """What records the model's routing. Raises ValueError if its routers are not known."""
        return Recorder(self.model)

    def step_of(self, size: int, max_length: int) -> Step:
        """Return a new step without a graph, with a cache of its own."""
        return Step(self.model, size, max_length, self.device, self.capabilities, self.prefill_chunk)

    def reader(self, rows: int, length: int) -> Step | None:
        """Return the step that reads ``rows`` prompts of ``length`` columns for `run` with a CUDA graph, or None.

        There are two such steps: one with a single row, one with `newcomers` rows.
        """
        if self._pool is None or not self.steps[self.batch_sizes[0]].takes_padding:
            return None
        for size in sorted({1, self.newcomers}):
            most = min(MOST_GRAPH_TOKENS // size, self.max_length)
            if rows > size or length > most:
                continue
            if size not in self._readers:
                self._readers[size] = self.step_of(size, most)
                self._readers[size].keep_short_prompts(capture_stream(torch.cuda.current_device()), self._pool)
            graphs = self._readers[size].short_prompts
            if graphs is not None and (columns := graphs.columns_of(length)) is not None and columns <= most:
                return self._readers[size]
        return None

    @property
    def newcomers(self) -> int:
        """The rows of the larger `reader`: an eighth of the largest batch size, rounded up."""
        return ceil_div(self.batch_sizes[-1], ROWS_PER_NEWCOMER)

    @contextmanager
    def on_device(self, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Make the model's device current, and this stream on it, with torch.autocast off, as at the capture.

        The caller's default device has no effect: tensors that transformers makes without a device are on the CPU.
        """
        current: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cuda":
            current = torch.cuda.device(self.device) if stream is None else torch.cuda.stream(stream)
        with current, standard_device(), torch.autocast(self.device.type, enabled=False):
            yield

    def _only(self, request: Request) -> Any:
        """Run a single request and return its result. Raises NaNLogits."""
        ((_, result, _),) = decode(self, request)
        if isinstance(result, ValueError):
            raise result
        return result

    def _steps(self, request: Request) -> Iterator[Tensor]:
        """Run a single request and yield the tokens of each step. Raises NaNLogits at the end."""
        with closing(decode(self, request)) as coming:
            for _, value, last in coming:
                if not last:
                    yield value
                elif isinstance(value, ValueError):
                    raise value

    def _find_capabilities(self, fuse: bool, cache_dtype: torch.dtype | None) -> Capabilities:
        """Find the model's capabilities, with flash attention if it supports the model.

        Raises ValueError if the model does not support a cache of this dtype.
        """
        flash = FLASH if self.device.type == "cuda" or self._batch_invariant or cache_dtype else None
        fused = (find_fused(self.model) or None) if fuse else None
        capabilities, refusals = find_capabilities(self.model, self.device, self.captured, flash, fused, cache_dtype)
        if fused and not capabilities.fused:
            name = type(self.model).__name__
            warnings.warn(f"GraphDecoder: {name} runs unfused: {refusals['fused']}", stacklevel=3)
        own = self.model.config.get_text_config(decoder=True)._attn_implementation
        self.attention = "flash" if capabilities.attention else f"{own}: {refusals.get('attention', 'on a GPU only')}"
        return capabilities

    @torch.no_grad()
    def _check_memory(self, sizes: list[int], copies_output: bool) -> None:
        """Raise ValueError if the caches of these batch sizes do not fit into the free memory.

        copies_output: whether the output layer gets an FP8 copy. Then it must fit, too, and the model must call the
        layer: ValueError if it uses its weight in another way.
        """
        step = self.step_of(1, 2)
        step.start(1, 1, None, [], 0)
        called: list[bool] = []
        layer: Any = self.model.get_output_embeddings() if copies_output else nn.Identity()
        with layer.register_forward_hook(lambda *call: called.append(True)):
            step.read()
        if copies_output and not called:
            raise ValueError(f"output_dtype: {type(self.model).__name__} does not call its output layer")
        needed = sum(sizes) * bytes_of_a_row(step.cache, self.max_length)
        needed += bytes_of_copy(layer) if copies_output else 0
        free = self.ranks.least(free_memory(self.device), self.device)
        if needed > free:
            takes = "and the output layer in FP8 take" if copies_output else "takes"
            raise ValueError(
                f"batch_sizes, max_length: the cache of {sum(sizes)} sequences of {self.max_length} tokens {takes} "
                f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on {self.device}"
            )

    def _capture(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        with self.on_device(), torch.no_grad():
            stream = capture_stream(torch.cuda.current_device())
            # Capture the largest batch size first: graphs of smaller ones then reuse its memory in the pool.
            for size in reversed(self.batch_sizes):
                try:
                    self.steps[size].capture(stream, self._pool)
                    self.steps[size].keep_short_prompts(stream, self._pool)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"the decode step of {type(self.model).__name__} cannot be captured for batch size {size}: "
                        f"{error}"
                    ) from error
