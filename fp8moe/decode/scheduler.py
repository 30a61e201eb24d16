"""Schedule requests over the rows of a step: each forward prefills free rows, or decodes one token per row."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.decode.memory import MOST_TOKENS
from fp8moe.decode.prefill import shared_columns
from fp8moe.decode.request import Request, parse_one
from fp8moe.decode.stats import Record
from fp8moe.decode.step import Step
from fp8moe.decode.transfers import Readback, integers_on, to_device
from fp8moe.hf.routing import Recorder
from fp8moe.runtime.progress import progress as progress_bar

STEPS_PER_ROW_CHECK = 2
"""The number of decode steps between two checks for rows that have ended. No check stalls the GPU: see `Readback`."""
STEPS_PER_END_CHECK = 8
"""The number of decode steps between two checks if there is only one request: no other waits for the freed rows."""
ROWS_PER_NEWCOMER = 8
"""Waiting prompts are prefilled once 1 / ROWS_PER_NEWCOMER of the rows are free, or a row for each waiting prompt.

Prefilling several prompts together costs little more than prefilling one.
"""
MOST_EMPTY_STEPS = 16
"""Waiting prompts are also prefilled once a row has been free for this many steps."""
CPU_PIECE_TOKENS = 256
"""The most prompt tokens that a CPU prefills between two decode steps of a stream. A GPU prefills up to MOST_TOKENS.

A decoder's prefill_chunk replaces both limits.
"""
FEW_TOKENS = 2048
MOST_PADDING = 1.25
"""Prompts are prefilled as one batch if padding makes the batch at most MOST_PADDING times as large.

Padding may always enlarge a batch to FEW_TOKENS tokens.
"""

Result = Tensor | tuple[Tensor, ...] | ValueError


class NaNLogits(ValueError):
    """The logits of the sequences ``rows`` became NaN. All other sequences were finished.

    Each of the sequences ``rows`` ends with the last token before its logits became NaN.

    tokens, logprobs, routing: the result of the call; the last two are None unless they were requested.
    """

    def __init__(self, rows: list[int], tokens: Tensor, logprobs: Tensor | None, routing: Tensor | None):
        super().__init__(
            f"model: its logits became NaN in sequences {rows}, which end there; this error has the tokens of all "
            "sequences as its attribute tokens"
        )
        self.rows = rows
        self.tokens = tokens
        self.logprobs = logprobs
        self.routing = routing


class News(NamedTuple):
    """News of the request with this key: the tokens (B,) of one step or, if ``last``, the request's result."""

    key: Any
    value: Any
    last: bool = True


@torch.inference_mode(False)
@torch.no_grad()
def decode(
    decoder: Any, alone: Request | None = None, coming: Iterator[tuple[Any, Any]] | None = None
) -> Generator[News, None, None]:
    """Serve one request, or many that an iterator yields; yield their tokens and results as `News`.

    alone: the only request. coming: yields pairs of a key and the arguments of `GraphDecoder.generate` for one prompt.
    """
    stream = torch.cuda.current_stream(decoder.device) if decoder.device.type == "cuda" else None
    with decoder.turn():
        with decoder.on_device(stream):
            scheduler = Scheduler(decoder, alone)
        try:
            while scheduler.busy or not scheduler.complete:
                with decoder.on_device(stream):  # not around the yield: the caller runs on its own stream
                    news: list[News] = []
                    while not news and (scheduler.busy or not scheduler.complete):
                        news = _add_waiting(scheduler, decoder, coming) + scheduler.advance()
                yield from news
        finally:
            with decoder.on_device(stream):
                scheduler.close()


def run(decoder: Any, requests: Iterable[Mapping[str, Any]], progress: Any) -> Iterator[tuple[int, Result]]:
    """Serve requests and yield their results, as `GraphDecoder.run` documents."""
    with closing(decode(decoder, coming=enumerate(requests))) as results, _counted(progress, requests) as count:
        for index, result, _ in results:
            count()
            yield index, result


def _add_waiting(scheduler: "Scheduler", decoder: Any, coming: Iterator[tuple[Any, Any]]) -> list[News]:
    """Take requests until as many wait as the decoder has rows, so that prompts of similar lengths can be found.

    Returns the errors of refused requests as news.
    """
    refused: list[News] = []
    most = decoder.batch_sizes[-1]
    while not scheduler.complete and len(scheduler.waiting) < most and len(refused) < most:
        index, arguments = next(coming, (None, None))
        if index is None:
            scheduler.complete = True
            break
        try:
            scheduler.add(parse_one(decoder, arguments, index))
        except (TypeError, ValueError) as error:
            refused.append(News(index, error if isinstance(error, ValueError) else ValueError(str(error))))
    return refused


@contextmanager
def _counted(progress: Any, requests: Iterable) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each result; it reports to ``progress``, an argument of `GraphDecoder.run`."""
    total = len(requests) if hasattr(requests, "__len__") else None
    if progress is True:
        with progress_bar(total=total, label="generating", unit="request") as bar:
            yield bar.update
    elif callable(progress):
        done = itertools.count(1)
        yield lambda: progress(next(done), total)
    else:
        yield lambda: None


class _Report(NamedTuple):
    """A step's `count`, `finished` and `tokens`: as lists, and stacked (3, size) on the step's device and on the host.

    The stacked tensors are (4, size) if a request wants logprobs with each step's tokens; logprobs (`_bits`) are last.
    """

    count: list[int]
    finished: list[int]
    tokens: list[int]
    device: Tensor
    host: Tensor


class _Reading(NamedTuple):
    """Requests whose prompts `step` is prefilling, up to the column `length`. pieces: the iterator `Step.pieces`."""

    requests: list[Request]
    step: Step
    pieces: Iterator[Tensor | None]
    length: int


class Scheduler:
    """Continuous batching: assigns the rows of a step to requests, which wait for rows, have rows, or have ended.

    alone: the only request. It gets all rows, so its prompts are prefilled in place.
    complete: whether no more requests will come. waiting: requests without rows.
    """

    def __init__(self, decoder: Any, alone: Request | None = None):
        self._decoder = decoder
        self._alone = alone is not None
        self.complete = self._alone
        self.waiting: list[Request] = [] if alone is None else [alone]
        self._reading: _Reading | None = None
        self._alive: list[Request] = []
        self._news: list[News] = []
        self._step: Step | None = None
        self._free: list[int] = []
        self._reports, self._reported = Readback(decoder.device), deque[list[tuple[Request, list[int]]]]()
        self._copies, self._left = Readback(decoder.device), deque[tuple[int, list[Request]]]()
        self._steps_per_check = STEPS_PER_END_CHECK if self._alone else STEPS_PER_ROW_CHECK
        if not self._reports.lag:
            self._steps_per_check = 1
        self._forwards = self._newcomers = 0  # newcomers: sequences that began after the last decode step
        self._empty_steps, self._has_read = 0, False  # has_read: the last forward was a prefill
        self._piece = MOST_TOKENS if decoder.device.type == "cuda" else CPU_PIECE_TOKENS
        self._record, self._lengths = Record(decoder.device), list[int]()

    def add(self, request: Request) -> None:
        """Queue a request of one prompt until a row is free."""
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._reading or self._alive or self._left)

    def advance(self) -> list[News]:
        """Run one forward: prefill waiting prompts if that pays, otherwise decode one token per row. Return the news.

        While new tokens of a request are looked at one by one (`Request.is_followed`), at least every second forward is
        a decode step, and prompts are prefilled in pieces. This method also calls the streamers of requests.
        """
        self._drop_cancelled()
        self._resize()
        decodes = any(request.made < request.new_tokens for request in self._alive)
        followed = any(request.is_followed for request in self._alive)
        reads = not (self._has_read and decodes and followed)
        if reads and self._reading is None and (group := self._group(followed)):
            self._reading = self._begin(group, followed)
        self._has_read = reads and self._reading is not None
        if self._has_read:
            self._read()
        elif decodes:
            self._step.record(_recorder(self._alive))
            self._step.replay()
            self._record.steps += 1
            self._forwards += 1
            self._newcomers = 0
            self._empty_steps = self._empty_steps + 1 if self._free and self.waiting else 0
            for request in self._alive:
                request.made += 1
        # While the GPU computes this forward, deliver the results of requests that ended before it.
        self._deliver()
        self._release([one for one in self._alive if not one.is_followed and one.made >= one.new_tokens])
        followed = any(request.is_followed for request in self._alive)
        if followed or (self._alive and not self._has_read and self._record.steps % self._steps_per_check == 0):
            self._check_rows()
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """End the streams of unfinished requests, and count their tokens."""
        reading = () if self._reading is None else self._reading.requests
        for request in (*self.waiting, *reading, *self._alive, *itertools.chain(*(left for _, left in self._left))):
            self._lengths += [count for count in request.seen if count]
            request.end_stream()
        if any(self._lengths):
            self._record.end(self._lengths)
            self._decoder._records.add(self._record)

    def _drop_cancelled(self) -> None:
        for request in [request for request in self.waiting if request.cancelled]:
            self.waiting.remove(request)
            request.end_stream()
        if self._reading is not None and all(request.cancelled for request in self._reading.requests):
            for request in self._reading.requests:
                request.end_stream()
            self._reading = None
        self._release([request for request in self._alive if request.cancelled])

    def _resize(self) -> None:
        """Move to the smallest step that has a row for each sequence; if there is none, move to the largest step."""
        reading = () if self._reading is None else self._reading.requests
        wanted = sum(len(request.tokens) for request in (*self._alive, *reading, *self.waiting))
        sizes = self._decoder.batch_sizes
        size = next((size for size in sizes if size >= wanted), sizes[-1])
        source = self._step
        if not wanted or (source is not None and size == source.size):
            return
        self._step, self._free = self._decoder.steps[size], [*range(size)]
        if not self._alone:
            self._step.clear()
        if self._alive:
            chosen = [row for request in self._alive for row in request.rows]
            self._move(self._alive, source, chosen, max(request.end for request in self._alive))

    def _group(self, followed: bool) -> list[Request]:
        """Pick a prompt and others of similar length to prefill together; return [] if prefill does not pay now.

        The first prompt is the oldest or, if no more requests will come, the one with the longest answer. followed:
        whether prefill delays a stream. If so, several prompts are prefilled together only if they fit into one piece.
        """
        if not (self.waiting and self._free) or (self._alive and self._newcomers >= self._step.size):
            return []
        pays = min(max(1, self._step.size // ROWS_PER_NEWCOMER), len(self.waiting))
        if self._alive and len(self._free) < pays and self._empty_steps < MOST_EMPTY_STEPS:
            return []
        most = self._piece if followed else MOST_TOKENS
        first = self.waiting[0]
        if self.complete:  # start the longest answers first, so that all rows end at about the same time
            first = max(self.waiting, key=lambda request: request.new_tokens)
        others = [other for other in self.waiting if other is not first and _follow_together(other, first)]
        others.sort(key=lambda other: abs(other.length - first.length))
        group = [first]
        for other in others:
            together = [*group, other]
            longest = max(request.length for request in together)
            columns, tokens = len(together) * longest, sum(request.length for request in together)
            new, padded = max(request.new_tokens for request in together), len(together) * self._columns(longest)
            if len(together) > len(self._free) or padded > most or self._graphed(len(group), longest):
                break
            if columns <= max(MOST_PADDING * tokens, FEW_TOKENS) and longest + new <= self._decoder.max_length:
                group = together
        return group

    def _graphed(self, rows: int, columns: int) -> bool:
        """Return whether ``rows`` prompts of ``columns`` columns fill a step that prefills with a CUDA graph."""
        size = self._decoder.newcomers
        return rows >= size and self._decoder.reader(size, columns) is not None

    def _begin(self, group: list[Request], followed: bool) -> _Reading:
        """Begin to prefill the prompts of these requests.

        followed: whether prefill delays a stream. If so, the prompts are prefilled in pieces.
        """
        for request in group:
            if request.streamer is not None:
                request.streamer.put(request.given.cpu())
        step = self._step if self._alone else self._reading_step(group)
        prefix, rows = group[0].prefix, sum(len(request.tokens) for request in group)
        tokens, mask = self._joined(group)
        if prefix is None:
            tokens, mask = step.fit(tokens, mask, self._decoder.max_length - max(one.new_tokens for one in group))
        ends, new = group[0].ends, [one.new_tokens for one in group for _ in one.tokens]
        alike = all(request.ends == ends for request in group)
        samplings = [sampling for request in group for sampling in request.samplings]
        step.start(rows, tokens.shape[1], mask, ends if alike else [], group[0].pad or 0, samplings)
        step.record(_recorder(group))
        step.limit[:rows] = self._integers(new)
        if not alike:
            for row, request in enumerate(group):
                step.ends[row].index_fill_(0, self._integers(request.ends), True)
        if len(group) == min(len(self._free), len(self.waiting)):
            self._empty_steps = 0
        for request in group:
            self.waiting.remove(request)
        length = tokens.shape[1] + (0 if prefix is None else prefix.length)
        pieces = step.pieces(tokens, mask, prefix, max(1, self._piece // step.size) if followed else None)
        return _Reading(group, step, pieces, length)

    def _read(self) -> None:
        """Prefill the next piece of prompts; after the last piece choose first tokens and give the requests rows."""
        requests, step, pieces, length = self._reading
        self._forwards += 1
        logits = next(pieces)
        if logits is None:
            return
        step.accept(logits)
        if not self._record.steps:
            self._record.first_token()
        rows = sum(len(request.tokens) for request in requests)
        self._newcomers += rows
        if self._alone:
            requests[0].rows = [*range(rows)]
        else:
            self._move(requests, step, range(rows), length)
        for request in requests:
            request.made, request.end = 1, length + request.new_tokens
        self._reading = None
        self._alive += requests

    def _reading_step(self, group: list[Request]) -> Step:
        """Return the step that prefills a group's prompts; their rows are then moved to the decode step."""
        longest = max(request.length for request in group)
        step = None if group[0].prefix is not None else self._decoder.reader(len(group), longest)
        if step is None:
            columns = longest if group[0].prefix is not None else self._columns(longest)
            step = self._decoder.step_of(len(group), min(columns, self._decoder.max_length))
        return step

    def _columns(self, longest: int) -> int:
        """Return the columns of prompts that are padded to the length ``longest``, if they have no graph."""
        return shared_columns(longest) if self._step.shares_shapes and longest <= MOST_TOKENS else longest

    def _joined(self, group: list[Request]) -> tuple[Tensor, Tensor | None]:
        """Return the prompts of a group as one batch (B, L), padded on the left, and its mask or None."""
        if len(group) == 1:
            return group[0].tokens, group[0].mask
        lengths = [request.tokens.shape[1] for request in group]
        longest = max(lengths)
        tokens = torch.cat([pad(request.tokens, (longest - request.tokens.shape[1], 0)) for request in group])
        if min(lengths) == longest:
            return tokens, None
        padding = self._integers(longest - length for length in lengths)
        return tokens, torch.arange(longest, device=tokens.device) >= padding[:, None]

    def _move(self, requests: list[Request], source: Step, chosen: Sequence[int], length: int) -> None:
        """Move requests from rows ``chosen`` of another step to free rows. length: the number of columns to copy."""
        for request in requests:
            request.rows = [self._free.pop() for _ in request.tokens]
        rows, chosen = self._rows(requests), self._integers(chosen)
        self._step.adopt(rows, source, chosen, length)

    def _check_rows(self) -> None:
        """Find requests that have ended, and pass on new tokens.

        On a GPU, a check reads the state that the previous check began to copy to the host.
        """
        step = self._step
        parts = [step.count, step.finished, step.tokens[:, 0]]
        if any(request.stepwise and request.return_logprobs for request in self._alive):
            parts.append(_bits(step.logprobs.gather(1, (step.count - 1).clamp(min=0)[:, None])[:, 0]))
        self._reports.push(torch.stack(parts))
        for request in self._alive:
            if request.stepwise and request.recorder is not None:
                end = request.reads(request.made)
                request.routing.push(self._routing(request, 0 if request.made == 1 else end - 1, end))
        self._reported.append([(request, request.rows) for request in self._alive])
        while len(self._reports) > self._reports.lag:
            device, host = self._reports.pop()
            step.check_weights()
            report = _Report(*host[:3].tolist(), device, host)
            reported = [(request, rows) for request, rows in self._reported.popleft() if request.rows]
            self._release([request for request, rows in reported if self._note(request, rows, report)])

    def _note(self, request: Request, rows: list[int], report: "_Report") -> bool:
        """Pass on a request's new tokens if `Request.is_followed`; return whether all of its sequences have ended.

        rows: the rows of the sequences when the report was made; they are adjacent.
        """
        count, finished, tokens, device, host = report
        ended = [bool(finished[row]) for row in rows]
        if not request.is_followed:
            return all(ended)
        routing = request.routing.pop() if request.stepwise and request.recorder is not None else None
        got = {}
        for index, row in enumerate(rows):
            if index not in request.stopped and count[row] > request.seen[index]:
                request.seen[index], got[index] = count[row], tokens[row]
                tail = request.tails[index]
                if tail is not None and tail.ends_with(tokens[row]):
                    request.stopped.add(index)
        ended = [one or index in request.stopped for index, one in enumerate(ended)]
        if not all(ended):
            for index in request.stopped:
                self._step.finished[request.rows[index]].fill_(True)  # the GPU already computes the next token
        if got:
            if request.streamer is not None:
                several = [got.get(index, request.pad or 0) for index in range(len(rows))]
                request.streamer.put(torch.tensor(several, dtype=torch.int64, device="cpu"))
            if request.stepwise:
                home = request.given.device
                # The host has waited for this report, so its copy on the GPU can be read on any stream.
                on_host = home.type == "cpu"
                values = (host if on_host else device)[2:, rows[0] : rows[0] + len(rows)]
                experts = None if routing is None else routing[on_host]
                for index, row in enumerate(rows):
                    if index in got:
                        continue
                    if tokens[row] != (request.pad or 0):
                        values[0, index] = request.pad or 0
                    if request.return_logprobs:
                        values[1, index] = 0
                    if experts is not None:
                        experts[index, -1] = -1
                logprobs = _floats(values[1].to(home)) if request.return_logprobs else None
                value = _several(values[0].to(home), logprobs, None if experts is None else experts.to(home))
                self._news.append(News(request.key, value, last=False))
        return all(ended)

    def _release(self, requests: list[Request]) -> None:
        """Start copying the generated tokens of these requests to the host, and free their rows."""
        if not requests:
            return
        step, rows = self._step, self._rows(requests)
        width = max(request.new_tokens for request in requests)
        parts = [step.generated[:, :width], _bits(step.logprobs[:, :width])]
        parts += [step.count[:, None], step.failed[:, None]]
        self._copies.push(torch.cat([part.index_select(0, rows) for part in parts], dim=1))
        self._left.append((self._forwards, requests))
        for request in requests:
            if request.recorder is not None:
                request.routing = Readback(self._decoder.device)
                request.routing.push(self._routing(request, 0, request.reads(request.new_tokens)))
            self._alive.remove(request)
            self._free += request.rows
            request.rows = []
        if self._alive or self.waiting or not self.complete:
            step.leave(rows)

    def _deliver(self) -> None:
        """Make results from the copies that began before the last forward; from all copies if no request has rows."""
        while self._left and (self._left[0][0] < self._forwards or not self._alive):
            _, requests = self._left.popleft()
            device, host = self._copies.pop()
            self._step.check_weights()
            sizes = [len(request.tokens) for request in requests]
            for request, *values in zip(requests, device.split(sizes), host.split(sizes), strict=True):
                self._end(request, *values)

    def _end(self, request: Request, device: Tensor, host: Tensor) -> None:
        """Make a request's result from its copies, begun by `_release`, on the device and on the host."""
        counts, failed = host[:, -2].tolist(), host[:, -1].tolist()
        for index in request.stopped:  # the row generated tokens after the stop string
            counts[index], failed[index] = request.seen[index], False
        for index, count in enumerate(counts):
            stopped = index in request.stopped or int(host[index, count - 1]) in request.ends
            request.finish_reasons.append(None if failed[index] else "stop" if stopped else "length")
        self._lengths += counts
        request.end_stream()
        if not request.cancelled:
            self._news.append(News(request.key, _result(request, device, host, counts, failed)))

    def _routing(self, request: Request, start: int, end: int) -> Tensor:
        """Return the experts (B, end - start, layers, K) of a request's tokens ``start`` to ``end``, -1 for padding.

        Tokens are counted as by `Request.reads`.
        """
        rows, before, (batch, length) = self._rows([request])[:, None], request.before, request.given.shape
        padded = torch.zeros(batch, end, dtype=torch.bool, device=rows.device)
        if request.shown is not None:
            padded[:, before : before + length] = ~request.shown
        token = torch.arange(start, end, device=rows.device)
        columns = self._step.begin[rows] + token - torch.where(token < before, 0, padded.sum(1, keepdim=True))
        routing = self._step.routing[rows, columns.clamp(min=0)]
        return routing.masked_fill(padded[:, start:, None], -1).unflatten(2, request.recorder.sizes)

    def _rows(self, requests: list[Request]) -> Tensor:
        return self._integers(row for request in requests for row in request.rows)

    def _integers(self, values: Iterable[int]) -> Tensor:
        return integers_on(self._decoder.device, values)


def _follow_together(one: Request, other: Request) -> bool:
    """Return whether both requests can be prefilled in one batch.

    Both must have the same prefix, or both must have none. The lengths of prompts that follow a prefix may differ only
    if the prefix allows padding.
    """
    if one.prefix is not other.prefix:
        return False
    return one.prefix is None or one.prefix.pads or one.tokens.shape == other.tokens.shape


def _recorder(requests: list[Request]) -> Recorder | None:
    return next((request.recorder for request in requests if request.recorder is not None), None)


def _several(tokens: Tensor, logprobs: Tensor | None, routing: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """Return a tuple of those that are not None, the tokens alone without a tuple."""
    several = tuple(value for value in (tokens, logprobs, routing) if value is not None)
    return several if len(several) > 1 else tokens


def _bits(values: Tensor) -> Tensor:
    """Return the bits of floats as int64, to copy them together with integers; `_floats` converts them back."""
    return values.double().view(torch.int64)


def _floats(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float64).float()


def _result(request: Request, device: Tensor, host: Tensor, counts: list[int], failed: list[int]) -> Result:
    """Return a request's result as `generate` returns it if ``request.with_prompts``, otherwise as `run` yields it.

    device, host (B, 2 * columns + 2) int64: generated tokens, their logprobs as float64 bits, counts, failed.
    """
    home = request.given.device
    values = (host if home.type == "cpu" else device)[:, :-2].unflatten(1, (2, -1))[:, :, : max(counts)]
    ended = torch.arange(max(counts), device="cpu") >= torch.tensor(counts, dtype=torch.int64, device="cpu")[:, None]
    ended = to_device(ended, values.device)
    tokens = values[:, 0].masked_fill(ended, request.pad or 0).to(home)
    logprobs = _floats(values[:, 1]).masked_fill(ended, 0).to(home) if request.return_logprobs else None
    routing = None
    if request.recorder is not None:
        prompt = request.reads(0)
        routing = request.routing.pop()[home.type == "cpu"][:, : prompt + max(counts)].to(home)
        routing[:, prompt:].masked_fill_(ended[..., None, None].to(home), -1)
    if request.with_prompts:
        tokens = torch.cat([request.given.long(), tokens], dim=1)
    else:
        tokens, logprobs, routing = (None if value is None else value[0] for value in (tokens, logprobs, routing))
    rows = [row for row, one in enumerate(failed) if one]
    return NaNLogits(rows, tokens, logprobs, routing) if rows else _several(tokens, logprobs, routing)
