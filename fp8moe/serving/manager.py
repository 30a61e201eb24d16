"""Two engines with one interface: a GraphDecoder, or transformers' continuous batching."""

import asyncio
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from fp8moe.decode import GraphDecoder
from fp8moe.decode.request import parse_one
from fp8moe.decode.sampling import random_seeds
from fp8moe.decode.scheduler import Scheduler
from fp8moe.serving.fields import Asked
from fp8moe.serving.ranks import Begun, Orders, Ranks


class Piece(NamedTuple):
    """Consecutive tokens of an answer, and their log probabilities if these were requested.

    reason: in the last piece, why the answer ends, "stop" or "length"; None in earlier pieces. routing: in the last
    piece, the experts (L, layers, K) int16 of prompt and answer if these were requested.
    """

    tokens: list[int]
    logprobs: list[float]
    reason: str | None
    routing: torch.Tensor | None = None


class Answer:
    """The answer to an accepted prompt. Generation begins when the first of `pieces` is requested.

    began, first: time.monotonic() when generation began, and when the first tokens arrived; each is 0 until then.
    """

    def __init__(self, begin: Callable[["Answer"], None], cancel: Callable[["Answer"], None], prompt: int):
        self._begin, self._cancel = begin, cancel
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.prompt_tokens = prompt
        self.tokens = 0
        self.began = self.first = 0.0
        self.request: Any = None
        self.begun: Any = None  # what a `DecoderManager` tells other ranks of it
        self.told = 0  # number of tokens that pieces already contain

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces. Raises RuntimeError if logits become NaN, or if the engine fails or is stopped.

        Closing the iterator before the last piece cancels the answer and frees its row.
        """
        self.began = time.monotonic()
        self._begin(self)
        try:
            while True:
                piece = await self._queue.get()
                self.first = self.first or time.monotonic()
                if isinstance(piece, Exception):
                    raise RuntimeError(str(piece)) from piece
                yield piece
                if piece.reason is not None:
                    return
        finally:
            self._cancel(self)

    def put(self, piece: Piece | Exception) -> None:
        if isinstance(piece, Piece):
            self.tokens += len(piece.tokens)
        self._queue.put_nowait(piece)


class Manager(ABC):
    """Base class of both engines. Call its methods on one event loop, on which the tokens will arrive.

    max_length: most tokens of a prompt and its answer together. error: the error that ended the engine, or None.
    own_settings: whether requests may set sampling and stop options. steps: number of forwards so far.
    """

    max_length: int
    own_settings = True

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.open: set[Answer] = set()
        self.steps = 0
        self._stopping = False

    @abstractmethod
    def start(self, tokens: list[int], asked: Asked, tokenizer: Any) -> Answer:
        """Accept a prompt; return its answer, not yet begun. Raises ValueError if the prompt cannot be served."""

    @property
    def ending(self) -> bool:
        """Whether the engine has failed or was stopped, so that it generates no more tokens."""
        return self._stopping or self.error is not None

    @property
    def waiting(self) -> int:
        """Return the number of answers that have no row yet."""
        return 0

    def fail(self) -> None:
        """End all open answers with an error, and every answer that begins later."""
        self._stopping = True
        reason = f"the decoder has failed: {self.error}" if self.error else "the server is shutting down"
        for answer in self.open:
            answer.put(RuntimeError(reason))
        self.open.clear()

    def stop(self) -> None:
        """End all open answers with an error, and stop the engine."""
        self.fail()


class DecoderManager(Manager):
    """Serves many clients with the rows of one decoder; requests join and leave between decode steps.

    A separate thread runs the decoder. While there are requests, the thread holds `GraphDecoder.turn`, so that other
    users of the decoder wait. ranks: other processes that hold the model, and follow (`Ranks.follow`); None: there are
    none.
    """

    def __init__(self, decoder: GraphDecoder, ranks: Ranks | None = None):
        super().__init__()
        self.decoder = decoder
        self.max_length = decoder.max_length
        self._ranks = ranks
        self._numbers = itertools.count()
        self._scheduler: Scheduler | None = None
        self._inbox: SimpleQueue[Answer | None] = SimpleQueue()
        self._gone: SimpleQueue[Answer] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="fp8moe serve", daemon=True)
        self._thread.start()

    def start(self, tokens: list[int], asked: Asked, tokenizer: Any) -> Answer:
        answer = Answer(self._submit, self._cancel, len(tokens))
        arguments = asked.options | {
            "input_ids": torch.tensor(tokens, dtype=torch.int64, device="cpu"),
            "max_new_tokens": asked.new_tokens(self.max_length, len(tokens)),
        }
        if arguments.get("do_sample") and arguments.get("seed") is None:
            (arguments["seed"],) = random_seeds(1)
        whole = arguments | {"tokenizer": tokenizer}
        try:
            answer.request = parse_one(self.decoder, whole, answer, asked.config, stops_in_answer=True)
        except TypeError as error:
            raise ValueError(str(error)) from error
        answer.request.stepwise = asked.stream
        answer.begun = Begun(next(self._numbers), arguments, asked.config, asked.stream)
        return answer

    @property
    def waiting(self) -> int:
        scheduler = self._scheduler
        return self._inbox.qsize() + (0 if scheduler is None else len(scheduler.waiting))

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        self._thread.join()
        self.fail()

    def _submit(self, answer: Answer) -> None:
        self._loop = asyncio.get_running_loop()
        self.open.add(answer)
        if self.ending:
            self.fail()
        else:
            self._inbox.put(answer)

    def _cancel(self, answer: Answer) -> None:
        self._gone.put(answer)
        self.open.discard(answer)

    def _work(self) -> None:
        try:
            while not self._stopping and (answer := self._inbox.get()) is not None:
                self._serve(answer)
            if self._ranks is not None:
                self._ranks.tell(Orders([], [], stop=True))
                self._ranks.leave()
        except Exception as error:
            logging.getLogger(__name__).exception("the decoder has failed")
            self.error = error
            self._loop.call_soon_threadsafe(self.fail)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _serve(self, first: Answer) -> None:
        """Generate the answer `first` and those that begin meanwhile, until none is left."""
        with self.decoder.turn(), self.decoder.on_device():
            scheduler = self._scheduler = Scheduler(self.decoder)
            begun = [first]
            try:
                while (begun or scheduler.busy) and not self._stopping:
                    gone = _all_of(self._gone)  # before those that begin: one that did not begin cannot be cancelled
                    begun += [answer for answer in _all_of(self._inbox) if answer is not None]
                    if self._ranks is not None:
                        cancelled = [answer.begun.number for answer in gone]
                        self._ranks.tell(Orders([answer.begun for answer in begun], cancelled))
                    for answer in begun:
                        scheduler.add(answer.request)
                    for answer in gone:
                        answer.request.cancelled = True
                    begun = []
                    self.steps += 1
                    if news := scheduler.advance():
                        told = [(answer, _piece(answer, value, last)) for answer, value, last in news]
                        self._loop.call_soon_threadsafe(self._tell, told)
            finally:
                self._scheduler = None
                scheduler.close()

    def _tell(self, told: list[tuple[Answer, Piece | Exception]]) -> None:
        for answer, piece in told:
            if answer in self.open:
                answer.put(piece)


def _all_of(queue: SimpleQueue) -> list[Any]:
    return [queue.get() for _ in range(queue.qsize())]


def _piece(answer: Answer, value: Any, last: bool) -> Piece | Exception:
    """Make a piece of an answer from a value that the scheduler delivers; return an exception unchanged.

    value: the tokens of a step or, if last, all tokens of the answer; the piece then holds those not yet in a piece.
    """
    if isinstance(value, Exception):
        return value
    tensors, request = [*value] if isinstance(value, tuple) else [value], answer.request
    routing = tensors.pop() if request.recorder is not None else None
    tokens, logprobs = tensors[0].tolist(), tensors[1].tolist() if request.return_logprobs else []
    told, answer.told = answer.told if last else 0, answer.told + len(tokens)
    return Piece(tokens[told:], logprobs[told:], request.finish_reasons[0] if last else None, routing)


class BatchingManager(Manager):
    """Runs transformers' continuous batching, for models that GraphDecoder does not support."""

    own_settings = False

    def __init__(self, model: Any, max_length: int):
        super().__init__()
        self.max_length = max_length
        self._model, self._numbers = model, itertools.count()
        self._engine: Any = None

    def start(self, tokens: list[int], asked: Asked, tokenizer: Any) -> Answer:
        size = self._model.config.get_text_config(decoder=True).vocab_size
        new = asked.new_tokens(self.max_length, len(tokens))
        if not all(0 <= token < size for token in tokens):
            raise ValueError(f"input_ids: expected tokens between 0 and {size - 1}")
        if new < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {new}")
        if len(tokens) + new > self.max_length:
            raise ValueError(
                f"max_new_tokens: {len(tokens)} tokens of prompt and {new} new ones are more than max_length, "
                f"{self.max_length}"
            )
        answer = Answer(self._submit, self._cancel, len(tokens))
        answer.request = {"input_ids": tokens, "max_new_tokens": new, "request_id": f"request {next(self._numbers)}"}
        answer.request |= {"eos_token_id": asked.options["eos_token_id"] or -1, "streaming": asked.stream}
        return answer

    def _submit(self, answer: Answer) -> None:
        self.open.add(answer)
        if self.ending:
            self.fail()
            return
        if self._engine is None:
            config = self._model.generation_config
            self._engine = self._model.init_continuous_batching(generation_config=config)
            self._engine.start()
        request, ends = answer.request, answer.request["eos_token_id"]
        told = 0

        def tell(output: Any) -> None:
            nonlocal told
            if answer not in self.open:
                return
            if output.error is not None:
                status = getattr(self._engine, "background_thread_status", self._engine)
                self.error = getattr(status, "fatal_error", None)
                answer.put(RuntimeError(output.error))
                return
            tokens = output.generated_tokens
            ended = bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])
            reason = None if not output.is_finished() else "stop" if ended else "length"
            answer.put(Piece(tokens[told:], [], reason))
            told = len(tokens)

        self._engine.register_result_handler(request["request_id"], tell)
        self._engine.add_request(**request)

    def _cancel(self, answer: Answer) -> None:
        if answer in self.open:
            self.open.discard(answer)
            self._engine.cancel_request(answer.request["request_id"])

    def stop(self) -> None:
        super().stop()
        if self._engine is not None:
            self._engine.stop(block=True, timeout=2)
