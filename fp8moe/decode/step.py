"""The decode step of one batch size: computes one token for each sequence, without reading values on the host."""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fp8moe.decode.attention import AttentionMetadataBuilder, used_by
from fp8moe.decode.cache import CachePosition, clear_rows, copy_rows, has_states, reset, static_cache
from fp8moe.decode.memory import MOST_TOKENS, columns_at_a_time
from fp8moe.decode.output import OutputLayer
from fp8moe.decode.prefill import ShortPrompts, pad_to, shared_columns
from fp8moe.decode.prefix import Prefix
from fp8moe.decode.sampling import GREEDY, Sampling, empty_state, write
from fp8moe.decode.transfers import integers_on
from fp8moe.decode.use import ranks_of
from fp8moe.hf import versions
from fp8moe.hf.fused import Optimized
from fp8moe.hf.patches import take_offsets_of_rows
from fp8moe.hf.routing import Recorder
from fp8moe.kernels.decoder_ops.sampling import Sequences, sample_next
from fp8moe.runtime import config
from fp8moe.runtime.fixed_rows import linears_by_fixed_rows
from fp8moe.weights.closing import refits_of

WARM_UP_RUNS = 3


class Capabilities(NamedTuple):
    """What a model supports in a decoder, as `probe.find_capabilities` determines.

    attention: the name of the attention implementation that reads the cache; None for the model's own.
    ragged: whether the rows of a batch may have different lengths.
    chunked_prefill: whether a call may read several tokens after cached ones.
    fused: modules that run in fp8moe's kernels; None if the model's own forwards run.
    cache_dtype: float8_e4m3fn if keys and values are in FP8; None for the model's dtype.
    output: what runs in place of the model's output layer; None for that layer itself. `probe` does not try it.
    """

    attention: str | None = None
    ragged: bool = False
    chunked_prefill: bool = False
    fused: Optimized | None = None
    cache_dtype: torch.dtype | None = None
    output: OutputLayer | None = None


PLAIN = Capabilities()


class Step:
    """The cache of a batch, the tensors that a decode step reads and writes in place, and its CUDA graph.

    tokens, positions (B, 1): the model's inputs. columns (B,): the cache columns where these tokens go.
    begin (B,): the number of padding columns in each row's prompt; with flash attention they come first.
    mask (B, max_length): False where the prompt is padded; the causal mask hides the columns that are still to come.
    count (B,): the number of new tokens of each row. generated, logprobs (B, max_length): the tokens, and their log
    probabilities; row b has count[b] values, and after them ``pad`` in generated and 0 in logprobs.
    limit (B,): row b ends with its limit[b]-th new token. ends (B, vocabulary): True for tokens that end the row.
    finished (B,): whether a row has ended. failed (B,): whether it ended because its logits were NaN.
    sampling: how next tokens are chosen. prefill_chunk: prompt columns to prefill at a time; None: as memory allows.
    routing (B, max_length, layers * K) int16: the experts of the token in each column, if it was read while `recorder`
    was set; None until `record` is called.
    graph: the step's CUDA graph. recording_graph: one that also writes `routing`, captured at the first such step.
    short_prompts: graphs that prefill short prompts. All three are None without graphs.
    refits: the model's `Refits`. begun: the value of `refits.count` when the sequences began.
    """

    def __init__(
        self,
        model: Any,
        size: int,
        max_length: int,
        device: torch.device,
        capabilities: Capabilities = PLAIN,
        prefill_chunk: int | None = None,
    ):
        self.model = model
        self.size = size
        self.capabilities = capabilities
        self.prefill_chunk = prefill_chunk
        self.ranks = ranks_of(model)
        self.position = CachePosition(size, device, capabilities.ragged)
        self.cache = static_cache(model.config, max_length, self.position, capabilities.cache_dtype)
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        booleans = partial(torch.zeros, dtype=torch.bool, device=device)
        self.tokens = integers(size, 1)
        self.positions = integers(size, 1)
        self.columns = self.position.columns
        self.begin = integers(size)
        self.mask = ~booleans(size, max_length)
        self.generated = integers(size, max_length)
        self.logprobs = torch.zeros(size, max_length, dtype=torch.float32, device=device)
        self.count = integers(size)
        self.limit = integers(size)
        self.finished = booleans(size)
        self.failed = booleans(size)
        self.ends = booleans(size, vocabulary(model))
        self.pad = integers(1)
        self.sampling = empty_state(size, vocabulary(model), device)
        self.sequences = Sequences(
            self.tokens.squeeze(1),
            *(self.generated, self.logprobs, self.count, self.finished, self.failed, self.limit, self.ends, self.pad),
        )
        self.metadata = AttentionMetadataBuilder(self.begin, self.columns, max_length, self.ranks.key_heads)
        self.recorder: Recorder | None = None
        self.routing: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.recording_graph: torch.cuda.CUDAGraph | None = None
        self.short_prompts: ShortPrompts | None = None
        self.refits = refits_of(model)
        self.begun = self.refits.count

    def start(
        self,
        batch: int,
        length: int,
        mask: Tensor | None,
        ends: list[int],
        pad: int,
        samplings: Sequence[Sampling] = (),
    ) -> None:
        """Initialize all tensors for ``batch`` prompts of ``length`` columns; the rows after them are copies of row 0.

        Copies choose the same tokens and experts, so they read no further weights. mask (batch, length): False for
        padding. ends, pad: end tokens and the pad token. samplings: one for each sequence; (): all are greedy.
        """
        self.begun = self.refits.count
        reset(self.cache, masked=self.capabilities.attention is None)  # masked NaNs would stay: 0 * NaN is NaN
        self.mask.fill_(True)
        if mask is None:
            self.begin.zero_()
        else:
            self.mask[:, :length] = self.rows(mask)
            torch.sum(~self.mask, 1, out=self.begin)
        for tensor in (self.columns, self.count, self.logprobs, self.finished, self.failed, self.ends):
            tensor.zero_()
        self.generated.fill_(pad)
        self.limit.fill_(self.generated.shape[1])
        self.ends.index_fill_(1, integers_on(self.ends.device, ends), True)
        self.pad.fill_(pad)
        self.samplings = [*samplings, *samplings[:1] * (self.size - len(samplings))]
        for tensor, greedy in zip(self.sampling, empty_state(1, vocabulary(self.model), self.pad.device), strict=True):
            tensor.copy_(greedy.expand_as(tensor))

    def record(self, recorder: Recorder | None) -> None:
        """Write the experts of tokens that are read from now on to `routing`; None: stop writing."""
        self.recorder = recorder
        if recorder is not None and self.routing is None:
            shape = *self.mask.shape, math.prod(recorder.sizes)
            self.routing = torch.zeros(shape, dtype=torch.int16, device=self.mask.device)

    def check_weights(self) -> None:
        """Raise RuntimeError if the model has been refitted since the sequences began, or is being refitted.

        Called before a step, and again after its results are read: another thread may have begun a refit in between.
        """
        self.refits.check(self.begun)

    def fit(self, tokens: Tensor, mask: Tensor | None, room: int) -> tuple[Tensor, Tensor | None]:
        """Pad prompts (batch, length) and their mask to one of few lengths, with a graph if they are short.

        For `start` and `prefill`. room: the most columns to pad to.
        """
        length, graphs = tokens.shape[1], self.short_prompts
        columns = None if graphs is None else graphs.columns_of(length)
        if columns is None or columns > room:
            columns = shared_columns(length)
            if columns == length or self.size * columns > MOST_TOKENS or not self.shares_shapes:
                return tokens, mask
        return (tokens, mask) if columns > room else pad_to(columns, tokens, mask)

    @property
    def shares_shapes(self) -> bool:
        """Whether prompts that are read in one piece are padded to one of few lengths: a GPU plans each new one."""
        return self.columns.is_cuda and self.prefill_chunk is None and self.takes_padding

    @cached_property
    def takes_padding(self) -> bool:
        """Whether the model allows rows to be padded by any amount."""
        return self.capabilities.attention is not None and self.capabilities.ragged and not has_states(self.cache)

    def prefill(self, tokens: Tensor, mask: Tensor | None, prefix: Prefix | None = None) -> Tensor:
        """Prefill prompts (batch, length), after a prefix if there is one; return logits (B, vocabulary) that follow.

        Raises ValueError for a prefix that this model or these prompts cannot continue.
        """
        *_, logits = self.pieces(tokens, mask, prefix)
        return logits

    def pieces(
        self, tokens: Tensor, mask: Tensor | None, prefix: Prefix | None = None, most: int | None = None
    ) -> Iterator[Tensor | None]:
        """Prefill prompts in pieces: yield None after each piece but the last, and the logits after the last piece.

        Other steps may run between pieces. most: limit for a piece's columns if `prefill_chunk` is None; None: no limit
        but the free memory. Arguments and errors are otherwise those of `prefill`.
        """
        self.check_weights()
        tokens = self.rows(tokens)
        self._note_prompts(tokens, None if mask is None else self.rows(mask), prefix)
        start: int | None = 0
        padded = mask is not None
        if prefix is not None:
            tokens, start = prefix.put(self, tokens, mask)
            padded = start is None  # otherwise the mask, if there is one, has ones only
        known = 0 if prefix is None else prefix.length
        count = tokens.shape[1]
        at_a_time = self._chunk(known + count, most)
        if padded and prefix is None and count <= at_a_time:
            graphs = self.short_prompts
            graphed = graphs is not None and count in graphs.columns
            recorded = self.recorder is not None
            yield graphs.read(tokens, self.read_padded, recorded) if graphed else self.read_padded(tokens)
            return
        for first in range(0, count, at_a_time):
            self.check_weights()
            piece = tokens[:, first : first + at_a_time]
            logits = self.read_several(piece, None if start is None else start + first, known + first, padded)
            yield logits if first + at_a_time >= count else None

    def _chunk(self, end: int, most: int | None) -> int:
        """Return how many columns to prefill at a time. end: the column where the prompts end. most: see `pieces`."""
        if not self.capabilities.chunked_prefill:
            return end
        columns = self.prefill_chunk
        if columns is None:
            masked, device = self.capabilities.attention is None, self.columns.device
            how = {"masked": masked, "ranks": self.ranks.most}
            if self.capabilities.cache_dtype is not None:
                how["copied"] = self.metadata.length
            free = columns_at_a_time(self.model, self.size, end, device, **how)
            columns = min(self.ranks.least(free, device), most or end)
        return max(columns, 2)  # a call with one token runs as a decode step, in which no token may be padding

    def read_several(self, tokens: Tensor, start: int | None, before: int, padded: bool) -> Tensor:
        """Prefill tokens (B, T) of prompts; return the logits (B, vocabulary) that follow.

        start: the column of the first token; None if this column differs between rows. before: the most tokens that a
        row has in the cache. padded: whether prompts have padding.
        """
        count = tokens.shape[1]
        end = before + count
        self.position.next_call(count, start, end)
        mask = self.mask[:, :end].long() if padded else None
        if start is None:
            new = self.columns[:, None] + torch.arange(count, device=tokens.device)
            positions = (new - self.begin[:, None]).clamp(min=0)
        elif mask is not None:
            positions = positions_of(mask)[:, start:]
        else:
            positions = torch.arange(start, end, device=tokens.device).expand(self.size, count)
        logits = self._run(tokens, positions, mask, before=None if padded else start)
        self.columns.add_(count)
        return logits

    def read_padded(self, tokens: Tensor) -> Tensor:
        """Prefill whole prompts (B, T) with padding; return the logits (B, vocabulary) that follow.

        If fp8moe's attention reads the cache, padding is moved from the left of each row to its end, where later tokens
        overwrite it. Attention then needs only a causal mask, and no row lengths. In cuDNN, this halves its time.
        """
        if self.capabilities.attention is None or not self.capabilities.ragged or config.settings.batch_invariant:
            return self.read_several(tokens, 0, 0, True)
        count = tokens.shape[1]
        self.position.next_call(count, 0, count)
        column = torch.arange(count, device=tokens.device)
        last = count - 1 - self.begin[:, None]
        tokens = tokens.gather(1, (column + self.begin[:, None]).clamp(max=count - 1))
        self.begin.zero_()
        self.mask.fill_(True)
        logits = self._run(tokens, column.expand(self.size, count), None, before=0, last=last)
        self.columns.add_(last[:, 0] + 1)
        return logits

    def replay(self) -> None:
        """Decode one more token for each sequence."""
        self.check_weights()
        graph = self.graph if self.recorder is None else self.recording_graph
        if graph is not None:
            graph.replay()
            return
        self.advance()
        if self.graph is not None:  # this step has loaded the kernels that record
            self.recording_graph = self._capture()

    def advance(self) -> None:
        self.accept(self.read())

    def read(self) -> Tensor:
        """Run the model on ``self.tokens``; return the logits (B, vocabulary) that follow."""
        self.position.next_call()
        torch.sub(self.columns[:, None], self.begin[:, None], out=self.positions)
        logits = self._run(self.tokens, self.positions, self.mask)
        self.columns.add_(~self.finished if self.capabilities.ragged else 1)
        return logits

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        *,
        before: int | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """Run the model; return the logits (B, vocabulary) after each row's last token, or after token last[b, 0].

        before: see `AttentionMetadataBuilder.next_call`.
        """
        options = {versions.cache_name(self.model.forward): self.cache, "use_cache": True}
        if (
            last is None
            and tokens.shape[1] > 1
            and "logits_to_keep" in inspect.signature(self.model.forward).parameters
        ):
            options["logits_to_keep"] = 1
        configs = (self.model.config, self.model.config.get_text_config(decoder=True))
        if any(getattr(one, "output_router_logits", False) for one in configs):
            options["output_router_logits"] = False  # the router loss expects a mask of just these tokens
        if self.capabilities.ragged:
            take_offsets_of_rows()  # install the patch again, as `unregister` may have removed it
        self.metadata.next_call(before=before, end=self.position.end)
        fused = nullcontext() if self.capabilities.fused is None else self.capabilities.fused.in_force()
        output = nullcontext() if self.capabilities.output is None else self.capabilities.output.in_force()
        rows = nullcontext() if last is None else _head_reads(self.model, last)
        record = nullcontext() if self.recorder is None else self.recorder.open()
        attention = used_by(self.model, self.capabilities.attention, self.metadata)
        with attention, fused, output, linears_by_fixed_rows(), rows, record as recorded:
            logits = self.model(input_ids=tokens, position_ids=positions, attention_mask=mask, **options).logits
        if recorded is not None:
            self.position.write(self.routing, 1, recorded.routing.flatten(2))
        if last is not None and logits.shape[1] > 1:  # the hook of `_head_reads` was not called
            return logits.gather(1, last[..., None].expand(-1, -1, logits.shape[-1]))[:, 0]
        return logits[:, -1]

    def accept(self, logits: Tensor) -> None:
        """Choose the next token of each sequence from its logits (B, vocabulary), and store it."""
        invariant = config.settings.batch_invariant
        before = self.count.clone() if invariant else self.count
        sample_next(logits, self.sampling, self.sequences)
        if invariant:  # PyTorch's log_softmax sums in another order than the kernel
            column = before.clamp(max=self.logprobs.shape[1] - 1)[:, None]
            logprobs = logits.float().log_softmax(1).gather(1, self.tokens)
            written = logprobs.where((self.count > before)[:, None], self.logprobs.gather(1, column))
            self.logprobs.scatter_(1, column, written)

    def rows(self, values: Tensor) -> Tensor:
        """Pad (batch, ...) to (size, ...) with copies of row 0."""
        missing = self.size - len(values)
        return torch.cat([values, values[:1].expand(missing, *values.shape[1:])]) if missing else values

    def adopt(self, rows: Tensor, source: Self, chosen: Tensor, length: int) -> None:
        """Take over sequences from rows ``chosen`` (n,) of another step of the model into ``rows`` (n,) of this one.

        length: the number of cache columns to copy, which hold all tokens of these sequences.
        """
        self.begun = min(self.begun, source.begun)
        copy_rows(self.cache, self.size, rows, source.cache, chosen, length)
        self.mask.index_fill_(0, rows, True)
        copied = [(getattr(self, name), getattr(source, name)) for name in _ROW_TENSORS]
        if source.recorder is not None:
            self.record(source.recorder)
            copied.append((self.routing, source.routing))
        for target, values in [*copied, *zip(self.sampling, source.sampling, strict=True)]:
            values = values.index_select(0, chosen)
            if target.dim() > 1:  # the steps may differ in max_length
                width = min(target.shape[1], values.shape[1])
                target, values = target[:, :width], values[:, :width]
            target.index_copy_(0, rows, values)

    def leave(self, rows: Tensor) -> None:
        """Release finished rows: set their lengths to 0, so that later steps read one cache column for them."""
        if self.capabilities.attention is None:
            clear_rows(self.cache, rows)  # they may hold NaN, and masks multiply by 0, which keeps a NaN
        self.finished.index_fill_(0, rows, True)
        for tensor in (self.columns, self.begin, self.count, self.failed):
            tensor.index_fill_(0, rows, 0)

    def clear(self) -> None:
        """Release all rows; `adopt` fills them again."""
        self.start(self.size, 1, None, [], 0)
        self.finished.fill_(True)

    def _note_prompts(self, tokens: Tensor, mask: Tensor | None, prefix: Prefix | None) -> None:
        """Write the sampling state of each sequence that is not greedy; `start` has written it for greedy ones."""
        if prefix is not None:
            before = prefix.tokens.expand(len(tokens), -1)
            tokens = torch.cat([before, tokens], dim=1)
            mask = None if mask is None else torch.cat([torch.ones_like(before, dtype=torch.bool), mask], dim=1)
        for row, sampling in enumerate(self.samplings):
            if sampling != GREEDY:
                write(self.sampling, row, sampling, tokens[row], None if mask is None else mask[row])

    def keep_short_prompts(self, stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
        """Prefill short prompts with CUDA graphs from now on, if the model takes padding."""
        if self.takes_padding:
            self.short_prompts = ShortPrompts(self.size, self.prefill_chunk, stream, pool)

    def capture(self, stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
        self._place = stream, pool
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):  # allocates the cache, compiles kernels, fills PyTorch's own workspaces
                self.start(self.size, 1, None, [], 0)
                self.advance()  # the first token takes other branches of linear attention than later tokens
                self.advance()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream, pool = self._place
        graph = torch.cuda.CUDAGraph()
        # "thread_local", so that other threads may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.advance()
        return graph

    def release(self) -> None:
        for graph in (self.graph, self.recording_graph):
            if graph is not None:
                graph.reset()
        self.graph = self.recording_graph = None
        if self.short_prompts is not None:
            self.short_prompts.release()


@contextmanager
def _head_reads(model: Any, rows: Tensor) -> Iterator[None]:
    """Make the output layer read only one token of each sequence. rows (B, 1) int64: the token's index."""
    head = model.get_output_embeddings()

    def choose(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1])), *others

    hook = head.register_forward_pre_hook(choose, prepend=True)
    try:
        yield
    finally:
        hook.remove()


_ROW_TENSORS = (
    *("tokens", "columns", "begin", "mask", "generated", "logprobs", "count", "limit"),
    *("finished", "failed", "ends"),
)


def vocabulary(model: Any) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def positions_of(mask: Tensor) -> Tensor:
    """Return tokens' positions (B, L) as transformers' generate counts them. mask (B, L): integers, 0 for padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream that all captures on a device share: cuBLAS keeps a workspace for every stream it runs on."""
    return torch.cuda.Stream(device)
