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

from fp8moe.integrations.decode.arguments import Call, GenerateArguments, Tail, check_zeros_on_the_left, parse
from fp8moe.integrations.decode.generation import NaNLogits
from fp8moe.integrations.decode.prefill import FEW_TOKENS, MOST_TOKENS
from fp8moe.integrations.decode.stats import Record
from fp8moe.integrations.decode.step import Step
from fp8moe.integrations.decode.transfers import Readback, integers_on
from fp8moe.runtime.checks import describe
from fp8moe.runtime.progress import progress as progress_bar

STEPS_PER_ROW_CHECK = 2
"""Steps between two checks of which rows have ended. A check does not stall the GPU: see `Readback`."""
ROWS_PER_NEWCOMER = 8
"""Newcomers are read when one of so many rows is free: reading several at once costs little more than one."""
MOST_PADDING = 1.25
"""Newcomers are read together if their columns are no more than MOST_PADDING times their tokens, or FEW_TOKENS."""

Result = Tensor | tuple[Tensor, Tensor] | ValueError


@torch.inference_mode(False)
@torch.no_grad()
def run(decoder: Any, requests: Iterable[Mapping[str, Any]], progress: Any) -> Iterator[tuple[int, Result]]:
    """Yield results as `GraphDecoder.run` does, whose arguments these are."""
    stream = torch.cuda.current_stream(decoder.device) if decoder.device.type == "cuda" else None
    with decoder.turn(), _counted(progress, requests) as count:
        with decoder.on_device(stream):
            scheduler = BatchScheduler(decoder, requests)
        try:
            while scheduler.busy:
                with decoder.on_device(stream):  # only here: the caller's own is in force while it holds a result
                    ended = scheduler.advance()
                for index, result in ended:
                    count()
                    yield index, result
        finally:
            with decoder.on_device(stream):
                scheduler.close()


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
class _Sequence:
    """A request whose arguments are right. length: columns of its prompt, with its prefix.

    In a row of the step: tokens: how many new ones it has, or fewer. end: a column that it does not reach.
    With stop strings: tail: the last tokens. seen: how many were looked at. stopped: they completed a stop string.
    """

    index: int
    call: Call
    tail: Tail | None
    row: int | None = None
    tokens: int = 0
    end: int = 0
    seen: int = 0
    stopped: bool = False

    @property
    def is_full(self) -> bool:
        """Return whether it has ended for certain. With stop strings its last tokens are still to be looked at."""
        return self.tail is None and self.tokens >= self.call.new_tokens

    @property
    def length(self) -> int:
        return self.call.tokens.shape[1] + (0 if self.call.prefix is None else self.call.prefix.length)


class BatchScheduler:
    """Continuous batching: the rows of a step, the sequences in them, those that wait for a row, and what has ended."""

    def __init__(self, decoder: Any, requests: Iterable[Mapping[str, Any]]):
        self._decoder = decoder
        self._requests = enumerate(requests)
        self._exhausted = False
        self._waiting: list[_Sequence] = []
        self._alive: list[_Sequence] = []
        self._ended: list[tuple[int, Result]] = []
        self._take(decoder.steps[decoder.batch_sizes[-1]])
        self._reports, self._reported = Readback(decoder.device), deque[list[tuple[_Sequence, int]]]()
        self._copies, self._left = Readback(decoder.device), deque[tuple[int, list[_Sequence]]]()
        self._record, self._lengths = Record(decoder.device), []
        self._reader = decoder.reader()

    def close(self) -> None:
        """Free the rows."""
        self._step.clear()
        if self._lengths:
            self._record.end(self._lengths)
            self._decoder._records.add(self._record)

    @property
    def busy(self) -> bool:
        return bool(not self._exhausted or self._waiting or self._alive or self._left or self._ended)

    def advance(self) -> list[tuple[int, Result]]:
        """Run one step of all rows, with newcomers in those that are free; return what has ended since."""
        self._fetch()
        while self._admit():
            pass
        self._shrink()
        if self._alive:
            self._step.replay()
            self._record.steps += 1
            for sequence in self._alive:
                sequence.tokens += 1
        self._deliver()  # what left before this step, which the GPU is at work on
        self._release([sequence for sequence in self._alive if sequence.is_full])
        due = self._record.steps % STEPS_PER_ROW_CHECK == 0 or any(sequence.tail for sequence in self._alive)
        if self._alive and due:
            self._check_rows()
        ended, self._ended = self._ended, []
        return ended

    def _take(self, step: Step) -> None:
        step.clear()
        self._step, self._free = step, [*range(step.size)]

    def _fetch(self) -> None:
        """Let as many requests wait as there are rows, so that prompts of similar lengths are found among them."""
        while not self._exhausted and len(self._waiting) < self._step.size and len(self._ended) < self._step.size:
            index, request = next(self._requests, (None, None))
            if index is None:
                self._exhausted = True
                return
            try:
                self._waiting.append(_Sequence(index, *_parse(self._decoder, request)))
            except (TypeError, ValueError) as error:
                self._ended.append((index, error if isinstance(error, ValueError) else ValueError(str(error))))

    def _admit(self) -> bool:
        """Read some of the waiting prompts into free rows, if that pays now."""
        pays = min(max(1, self._step.size // ROWS_PER_NEWCOMER), len(self._waiting))
        if not self._waiting or len(self._free) < (pays if self._alive else 1):
            return False
        group = self._group()
        source, length = self._read(group)
        self._move(group, source, range(len(group)), length)
        for sequence in group:
            self._waiting.remove(sequence)
            sequence.tokens, sequence.end = 1, length + sequence.call.new_tokens
        self._alive += group
        if any(sequence.tail for sequence in group):
            self._check_rows()
        self._release([sequence for sequence in group if sequence.is_full])
        return True

    def _group(self) -> list[_Sequence]:
        """Choose the one that waits longest, and those of the others that it pays to read with it."""
        first = self._waiting[0]
        if self._exhausted:  # the longest answers first: then the rows end together
            first = max(self._waiting, key=lambda sequence: sequence.call.new_tokens)
        others = [other for other in self._waiting if other is not first and _follow_together(other.call, first.call)]
        others.sort(key=lambda other: abs(other.length - first.length))
        group = [first]
        for other in others:
            together = [*group, other]
            longest = max(sequence.length for sequence in together)
            columns, tokens = len(together) * longest, sum(sequence.length for sequence in together)
            new = max(sequence.call.new_tokens for sequence in together)
            if len(together) > len(self._free) or columns > MOST_TOKENS or self._graphed(len(group), longest):
                break
            if columns <= max(MOST_PADDING * tokens, FEW_TOKENS) and longest + new <= self._decoder.max_length:
                group = together
        return group

    def _graphed(self, rows: int, columns: int) -> bool:
        """Return whether so many prompts fill the step that reads those of this length from graphs."""
        reader = self._reader
        return reader is not None and rows >= reader.size and columns <= reader.short_prompts.most

    def _read(self, group: list[_Sequence]) -> tuple[Step, int]:
        """Read their prompts and choose first tokens in another step; return it and its columns."""
        calls = [sequence.call for sequence in group]
        lengths = [call.tokens.shape[1] for call in calls]
        longest = max(lengths)
        tokens = torch.cat([pad(call.tokens, (longest - call.tokens.shape[1], 0)) for call in calls])
        mask = None
        if min(lengths) < longest:
            padding = self._integers(longest - length for length in lengths)
            mask = torch.arange(longest, device=tokens.device) >= padding[:, None]
        prefix, most = calls[0].prefix, max(sequence.length for sequence in group)
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

    def _move(self, sequences: list[_Sequence], source: Step, chosen: Sequence[int], length: int) -> None:
        """Move them from the rows `chosen` of another step to free ones. No token is in column `length` or after it."""
        for sequence in sequences:
            sequence.row = self._free.pop()
        rows, chosen = self._integers(sequence.row for sequence in sequences), self._integers(chosen)
        self._step.adopt(rows, source, chosen, length)

    def _shrink(self) -> None:
        """Go on in a smaller step once no more sequences come."""
        if not self._exhausted or self._waiting or not self._alive:
            return
        size = next(size for size in self._decoder.batch_sizes if size >= len(self._alive))
        if size < self._step.size:
            source, chosen = self._step, [sequence.row for sequence in self._alive]
            self._take(self._decoder.steps[size])
            self._move(self._alive, source, chosen, max(sequence.end for sequence in self._alive))

    def _check_rows(self) -> None:
        """Find the rows that have ended, as of the check before this one."""
        step = self._step
        self._reports.push(torch.stack([step.count, step.finished, step.tokens[:, 0]]))
        self._reported.append([(sequence, sequence.row) for sequence in self._alive])
        while len(self._reports) > self._reports.lag:
            count, finished, tokens = self._reports.pop()[1].tolist()
            ended = []
            for sequence, row in self._reported.popleft():
                if sequence.row is None:
                    continue
                if sequence.tail is not None and count[row] > sequence.seen:
                    sequence.seen = count[row]
                    sequence.stopped = sequence.tail.ends_with(tokens[row])
                if sequence.stopped or finished[row]:
                    ended.append(sequence)
            self._release(ended)

    def _release(self, sequences: list[_Sequence]) -> None:
        """Free their rows, and begin to copy what was generated there."""
        if not sequences:
            return
        step, rows = self._step, self._integers(sequence.row for sequence in sequences)
        width = max(sequence.call.new_tokens for sequence in sequences)
        parts = [step.generated[:, :width], step.logprobs[:, :width].double().view(torch.int64)]
        parts += [step.count[:, None], step.failed[:, None]]
        self._copies.push(torch.cat([part.index_select(0, rows) for part in parts], dim=1))
        self._left.append((self._record.steps, sequences))
        step.leave(rows)
        for sequence in sequences:
            self._alive.remove(sequence)
            self._free.append(sequence.row)
            sequence.row = None

    def _deliver(self) -> None:
        """Make results of the copies from before the last step, or all if there was none."""
        while self._left and (self._left[0][0] < self._record.steps or not self._alive):
            _, sequences = self._left.popleft()
            for sequence, *copies in zip(sequences, *self._copies.pop(), strict=True):
                self._end(sequence, *copies)

    def _end(self, sequence: _Sequence, device: Tensor, host: Tensor) -> None:
        """Make its result of what `_release` copied."""
        call = sequence.call
        *_, count, failed = host.tolist()
        if sequence.stopped:
            count, failed = sequence.seen, False  # what the row did after the stop string
        copy = (host if call.given.device.type == "cpu" else device).clone()
        new, logprobs = copy[:-2].view(2, -1)[:, :count].to(call.given.device)
        logprobs = logprobs.contiguous().view(torch.float64).float() if call.return_logprobs else None
        self._lengths.append(count)
        result = NaNLogits([0], new, logprobs) if failed else new if logprobs is None else (new, logprobs)
        self._ended.append((sequence.index, result))

    def _integers(self, values: Iterable[int]) -> Tensor:
        return integers_on(self._decoder.device, values)


def _follow_together(one: Call, other: Call) -> bool:
    """Return whether they have one prefix, or none, and lengths that may follow it in one batch."""
    if one.prefix is not other.prefix:
        return False
    return one.prefix is None or one.prefix.pads or one.tokens.shape == other.tokens.shape


def _parse(decoder: Any, request: Any) -> tuple[Call, Tail | None]:
    """Check the arguments of one request, cut off padding, and return them with the tail for stop strings.

    Raises TypeError or ValueError with the name of the argument that is wrong.
    """
    if not isinstance(request, Mapping):
        raise TypeError(f"requests: expected dicts of generate's arguments, got {describe(request)}")
    arguments = GenerateArguments.bind(**request)
    ids, mask = arguments.input_ids, arguments.attention_mask
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        raise ValueError(f"input_ids: expected one prompt of shape (length,), got {describe(ids)}")
    if arguments.streamer is not None:
        raise ValueError("streamer: run yields whole answers; generate and stream serve streamers")
    arguments = replace(arguments, input_ids=ids[None], attention_mask=mask[None] if isinstance(mask, Tensor) else mask)
    call = parse(decoder, arguments, decoder.model.generation_config)
    if call.mask is not None:
        check_zeros_on_the_left(call.mask)
        padding = int((~call.mask).sum())
        call = replace(call, tokens=call.tokens[:, padding:], mask=None)
    return call, *call.tails()
