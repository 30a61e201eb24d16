"""Many requests over the rows of one step: a sequence that ends frees its row, a waiting prompt takes it."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.decode.arguments import Call, GenerateArguments, Tail, check_zeros_on_the_left, parse
from fp8moe.decode.generation import NaNLogits
from fp8moe.decode.prefill import MOST_TOKENS
from fp8moe.decode.stats import Record
from fp8moe.decode.step import Step
from fp8moe.decode.transfers import Readback, integers_on
from fp8moe.runtime.checks import describe
from fp8moe.runtime.progress import progress as progress_bar

STEPS_PER_ROW_CHECK = 2
"""Steps between two checks of which rows have ended. A check does not stall the GPU: see `Readback`."""
ROWS_PER_NEWCOMER = 8
"""Newcomers are read when one of so many rows is free: reading several at once costs little more than one."""
FEW_TOKENS = 2048
MOST_PADDING = 1.25
"""Newcomers are read together if their columns are no more than MOST_PADDING times their tokens, or FEW_TOKENS."""

Result = Tensor | tuple[Tensor, Tensor] | ValueError


@torch.inference_mode(False)
@torch.no_grad()
def run(decoder: Any, requests: Iterable[Mapping[str, Any]], progress: Any) -> Iterator[tuple[int, Result]]:
    """Yield results as `GraphDecoder.run` does, whose arguments these are."""
    stream = torch.cuda.current_stream(decoder.device) if decoder.device.type == "cuda" else None
    coming = enumerate(requests)
    with decoder.turn(), _counted(progress, requests) as count:
        with decoder.on_device(stream):
            scheduler = BatchScheduler(decoder)
        try:
            while scheduler.busy or not scheduler.complete:
                with decoder.on_device(stream):  # only here: the caller's own is in force while it holds a result
                    ended = _add_waiting(scheduler, decoder, coming) + scheduler.advance()
                for index, result in ended:
                    count()
                    yield index, result
        finally:
            with decoder.on_device(stream):
                scheduler.close()


def _add_waiting(scheduler: "BatchScheduler", decoder: Any, coming: Iterator) -> list[tuple[int, Result]]:
    """Let as many requests wait as there are rows, so that prompts of similar lengths are found among them.

    Returns those that are refused.
    """
    refused: list[tuple[int, Result]] = []
    most = decoder.batch_sizes[-1]
    while not scheduler.complete and len(scheduler.waiting) < most and len(refused) < most:
        index, arguments = next(coming, (None, None))
        if index is None:
            scheduler.complete = True
            break
        try:
            scheduler.add(parse_request(decoder, arguments, index))
        except (TypeError, ValueError) as error:
            refused.append((index, error if isinstance(error, ValueError) else ValueError(str(error))))
    return refused


@contextmanager
def _counted(progress: Any, requests: Iterable) -> Iterator[Callable[[], None]]:
    """Yield the function to call for each result."""
    total = len(requests) if hasattr(requests, "__len__") else None
    if progress is True:
        with progress_bar(total=total, label="generating", unit="request") as bar:
            yield bar.update
    elif callable(progress):
        done = itertools.count(1)
        yield lambda: progress(next(done), total)
    else:
        yield lambda: None


@dataclass(eq=False)
class Request:
    """A request whose arguments are right. length: columns of its prompt, with its prefix.

    key: what its result comes with. cancelled: may be set at any time, by any thread: its row is freed before the next
    step, and no result comes.
    In a row of the step: tokens: how many new ones it has, or fewer. end: a column that it does not reach.
    With stop strings or a streamer: tail: the last tokens. seen: how many were looked at. stopped: they completed a
    stop string.
    """

    key: Any
    call: Call
    tail: Tail | None
    cancelled: bool = False
    row: int | None = None
    tokens: int = 0
    end: int = 0
    seen: int = 0
    stopped: bool = False

    @property
    def is_followed(self) -> bool:
        """Return whether its tokens are looked at one by one."""
        return self.tail is not None or self.call.streamer is not None

    @property
    def is_full(self) -> bool:
        """Return whether it has ended for certain. Of one that is followed, the last tokens are still to be seen."""
        return not self.is_followed and self.tokens >= self.call.new_tokens

    @property
    def length(self) -> int:
        return self.call.tokens.shape[1] + (0 if self.call.prefix is None else self.call.prefix.length)


class BatchScheduler:
    """Continuous batching: the rows of a step, the requests in them, those that wait for a row, and what has ended.

    complete: no more requests come. waiting: those without a row.
    """

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self.complete = False
        self.waiting: list[Request] = []
        self._alive: list[Request] = []
        self._ended: list[tuple[Any, Result]] = []
        self._take(decoder.steps[decoder.batch_sizes[0]])
        self._reports, self._reported = Readback(decoder.device), deque[list[tuple[Request, int]]]()
        self._copies, self._left = Readback(decoder.device), deque[tuple[int, list[Request]]]()
        self._record, self._lengths = Record(decoder.device), []
        self._reader = decoder.reader()

    def add(self, request: Request) -> None:
        """Let it wait for a row."""
        self.waiting.append(request)

    def close(self) -> None:
        """Free the rows."""
        self._step.clear()
        if self._lengths:
            self._record.end(self._lengths)
            self._decoder._records.add(self._record)
        for request in (*self.waiting, *self._alive, *itertools.chain(*(left for _, left in self._left))):
            _end_stream(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._alive or self._left)

    def advance(self) -> list[tuple[Any, Result]]:
        """Run one step of all rows, with newcomers in those that are free; return the keys and results of what ended.

        The requests' streamers are called here.
        """
        self._step.check_weights()
        self._drop_cancelled()
        self._resize()
        while self._admit():
            pass
        if self._alive:
            self._step.replay()
            self._record.steps += 1
            for request in self._alive:
                request.tokens += 1
        self._deliver()  # what left before this step, which the GPU is at work on
        self._release([request for request in self._alive if request.is_full])
        due = self._record.steps % STEPS_PER_ROW_CHECK == 0 or any(request.is_followed for request in self._alive)
        if self._alive and due:
            self._check_rows()
        ended, self._ended = self._ended, []
        return ended

    def _take(self, step: Step) -> None:
        step.clear()
        self._step, self._free = step, [*range(step.size)]

    def _drop_cancelled(self) -> None:
        for request in [request for request in self.waiting if request.cancelled]:
            self.waiting.remove(request)
            _end_stream(request)
        self._release([request for request in self._alive if request.cancelled])

    def _resize(self) -> None:
        """Go on in the smallest step with a row for each request, or in the largest."""
        wanted = len(self._alive) + len(self.waiting)
        sizes = self._decoder.batch_sizes
        size = next((size for size in sizes if size >= wanted), sizes[-1])
        if not wanted or size == self._step.size:
            return
        source, chosen = self._step, [request.row for request in self._alive]
        self._take(self._decoder.steps[size])
        if self._alive:
            self._move(self._alive, source, chosen, max(request.end for request in self._alive))

    def _admit(self) -> bool:
        """Read some of the waiting prompts into free rows, if that pays now."""
        pays = min(max(1, self._step.size // ROWS_PER_NEWCOMER), len(self.waiting))
        if not self.waiting or len(self._free) < (pays if self._alive else 1):
            return False
        group = self._group()
        source, length = self._read(group)
        self._move(group, source, range(len(group)), length)
        for request in group:
            self.waiting.remove(request)
            request.tokens, request.end = 1, length + request.call.new_tokens
        self._alive += group
        for request in group:
            if request.call.streamer is not None:
                request.call.streamer.put(request.call.given.cpu())
        if any(request.is_followed for request in group):
            self._check_rows()
        self._release([request for request in group if request.is_full])
        return True

    def _group(self) -> list[Request]:
        """Choose the one that waits longest, and those of the others that it pays to read with it."""
        first = self.waiting[0]
        if self.complete:  # the longest answers first: then the rows end together
            first = max(self.waiting, key=lambda request: request.call.new_tokens)
        others = [other for other in self.waiting if other is not first and _follow_together(other.call, first.call)]
        others.sort(key=lambda other: abs(other.length - first.length))
        group = [first]
        for other in others:
            together = [*group, other]
            longest = max(request.length for request in together)
            columns, tokens = len(together) * longest, sum(request.length for request in together)
            new = max(request.call.new_tokens for request in together)
            if len(together) > len(self._free) or columns > MOST_TOKENS or self._graphed(len(group), longest):
                break
            if columns <= max(MOST_PADDING * tokens, FEW_TOKENS) and longest + new <= self._decoder.max_length:
                group = together
        return group

    def _graphed(self, rows: int, columns: int) -> bool:
        """Return whether so many prompts fill the step that reads those of this length from graphs."""
        reader = self._reader
        return reader is not None and rows >= reader.size and columns <= reader.short_prompts.most

    def _read(self, group: list[Request]) -> tuple[Step, int]:
        """Read their prompts and choose first tokens in another step; return it and its columns."""
        calls = [request.call for request in group]
        lengths = [call.tokens.shape[1] for call in calls]
        longest = max(lengths)
        tokens = torch.cat([pad(call.tokens, (longest - call.tokens.shape[1], 0)) for call in calls])
        mask = None
        if min(lengths) < longest:
            padding = self._integers(longest - length for length in lengths)
            mask = torch.arange(longest, device=tokens.device) >= padding[:, None]
        prefix, most = calls[0].prefix, max(request.length for request in group)
        step = self._reader
        if step is None or prefix is not None or len(group) > step.size or most > step.short_prompts.most:
            step = self._decoder.step_of(len(group), most)
        if prefix is None:
            room = self._decoder.max_length - max(call.new_tokens for call in calls)
            tokens, mask = step.fit(tokens, mask, room)
        step.start(len(group), tokens.shape[1], mask, [], 0, [call.samplings[0] for call in calls])
        step.limit[: len(group)] = self._integers(call.new_tokens for call in calls)
        for row, call in enumerate(calls):
            step.ends[row].index_fill_(0, self._integers(call.ends), True)
        step.accept(step.prefill(tokens, mask, prefix))
        if not self._record.steps:
            self._record.first_token()
        return step, tokens.shape[1] + (0 if prefix is None else prefix.length)

    def _move(self, requests: list[Request], source: Step, chosen: Sequence[int], length: int) -> None:
        """Move them from the rows `chosen` of another step to free ones. No token is in column `length` or after it."""
        for request in requests:
            request.row = self._free.pop()
        rows, chosen = self._integers(request.row for request in requests), self._integers(chosen)
        self._step.adopt(rows, source, chosen, length)

    def _check_rows(self) -> None:
        """Find the rows that have ended, as of the check before this one."""
        step = self._step
        self._reports.push(torch.stack([step.count, step.finished, step.tokens[:, 0]]))
        self._reported.append([(request, request.row) for request in self._alive])
        while len(self._reports) > self._reports.lag:
            count, finished, tokens = self._reports.pop()[1].tolist()
            step.check_weights()
            ended = []
            for request, row in self._reported.popleft():
                if request.row is None:
                    continue
                if request.is_followed and count[row] > request.seen:
                    request.seen = count[row]
                    request.stopped = request.tail is not None and request.tail.ends_with(tokens[row])
                    if request.call.streamer is not None:
                        request.call.streamer.put(torch.tensor([tokens[row]]))
                if request.stopped or finished[row]:
                    ended.append(request)
            self._release(ended)

    def _release(self, requests: list[Request]) -> None:
        """Free their rows, and begin to copy what was generated there."""
        if not requests:
            return
        step, rows = self._step, self._integers(request.row for request in requests)
        width = max(request.call.new_tokens for request in requests)
        parts = [step.generated[:, :width], step.logprobs[:, :width].double().view(torch.int64)]
        parts += [step.count[:, None], step.failed[:, None]]
        self._copies.push(torch.cat([part.index_select(0, rows) for part in parts], dim=1))
        self._left.append((self._record.steps, requests))
        step.leave(rows)
        for request in requests:
            self._alive.remove(request)
            self._free.append(request.row)
            request.row = None

    def _deliver(self) -> None:
        """Make results of the copies from before the last step, or all if there was none."""
        while self._left and (self._left[0][0] < self._record.steps or not self._alive):
            _, requests = self._left.popleft()
            copies = self._copies.pop()
            self._step.check_weights()
            for request, *values in zip(requests, *copies, strict=True):
                self._end(request, *values)

    def _end(self, request: Request, device: Tensor, host: Tensor) -> None:
        """Make its result of what `_release` copied."""
        call = request.call
        *_, count, failed = host.tolist()
        if request.stopped:
            count, failed = request.seen, False  # what the row did after the stop string
        copy = (host if call.given.device.type == "cpu" else device).clone()
        new, logprobs = copy[:-2].view(2, -1)[:, :count].to(call.given.device)
        logprobs = logprobs.contiguous().view(torch.float64).float() if call.return_logprobs else None
        self._lengths.append(count)
        _end_stream(request)
        if not request.cancelled:
            result = NaNLogits([0], new, logprobs) if failed else new if logprobs is None else (new, logprobs)
            self._ended.append((request.key, result))

    def _integers(self, values: Iterable[int]) -> Tensor:
        return integers_on(self._decoder.device, values)


def _follow_together(one: Call, other: Call) -> bool:
    """Return whether they have one prefix, or none, and lengths that may follow it in one batch."""
    if one.prefix is not other.prefix:
        return False
    return one.prefix is None or one.prefix.pads or one.tokens.shape == other.tokens.shape


def _end_stream(request: Request) -> None:
    if request.call.streamer is not None:
        request.call.streamer.end()


def parse_request(decoder: Any, request: Any, key: Any, generation_config: Any = None) -> Request:
    """Check the arguments of one request, and cut off padding.

    key: what its result is to come with. generation_config: where what is not given comes from, None: the model's.
    Raises TypeError or ValueError with the name of the argument that is wrong.
    """
    if not isinstance(request, Mapping):
        raise TypeError(f"requests: expected dicts of generate's arguments, got {describe(request)}")
    arguments = GenerateArguments.bind(**request)
    ids, mask = arguments.input_ids, arguments.attention_mask
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        raise ValueError(f"input_ids: expected one prompt of shape (length,), got {describe(ids)}")
    arguments = replace(arguments, input_ids=ids[None], attention_mask=mask[None] if isinstance(mask, Tensor) else mask)
    call = parse(decoder, arguments, generation_config or decoder.model.generation_config)
    tails = call.tails()
    if call.mask is not None:
        check_zeros_on_the_left(call.mask)
        padding = int((~call.mask).sum())
        call = replace(call, tokens=call.tokens[:, padding:], mask=None)
    return Request(key, call, *tails)
