"""The server of `fp8moe serve`: the HTTP handlers of `transformers serve`, with a GraphDecoder that generates.

`DecoderManager` generates for many clients at once, `make_app` makes the HTTP application. API fields and responses,
chat templates and tool calls are handled by transformers.
"""

import asyncio
import json
import logging
import threading
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from queue import SimpleQueue
from typing import Any

import torch
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.utils import BaseGenerateManager, CBStreamer, GenerationState

from fp8moe.decode import GraphDecoder
from fp8moe.decode.request import Request, parse_one
from fp8moe.decode.scheduler import Scheduler

NEW_TOKENS = 1024
"""Default limit of new tokens per request, as in `transformers serve`; lower if the decoder has less room."""


class DecoderManager(BaseGenerateManager):
    """Generates for many clients in the rows of one decoder: requests join and leave between decode steps.

    A worker thread runs the decoder, and holds the decoder's `turn` while there are requests. All methods must be
    called on the same event loop. After each decode step this loop receives the new tokens of all requests together.
    error: the exception that ended the worker thread, or None.
    """

    def __init__(self, decoder: GraphDecoder):
        self.decoder = decoder
        self.error: Exception | None = None
        self._open: set[_Answer] = set()
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="fp8moe serve", daemon=True)
        self._thread.start()

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue, CBStreamer]:
        """Return a queue that receives the answer's text and then None, and a streamer that counts tokens and cancels.

        Generation starts when the queue is first read, so that nothing runs for a client that has already gone.
        Arguments are those of transformers' managers: inputs["input_ids"] is a list of tokens; a missing max_new_tokens
        is set in gen_config, see `NEW_TOKENS`. Raises ValueError for a request that `GraphDecoder.run` rejects. The
        queue's `get` raises RuntimeError if logits become NaN, the decoder fails, or the manager is stopped.
        """
        tokenizer = getattr(processor, "tokenizer", processor)
        answer = _Answer(self._submit)
        request = self._parse(answer, inputs, gen_config, tokenizer)
        request.stepwise = True
        answer.stops = [] if response_parser else _strings(gen_config.stop_strings)
        loop = asyncio.get_running_loop()
        answer.streamer = CBStreamer(self, request, tokenizer.backend_tokenizer, loop, answer, response_parser)
        return answer, answer.streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Generate an answer. Returns its text, the number of tokens of the prompt, and the tokens of the answer.

        Arguments and errors are those of `generate_streaming`. Cancelling the task cancels the request.
        """
        answer = _Answer(self._submit)
        request = self._parse(answer, inputs, gen_config, getattr(processor, "tokenizer", processor))
        try:
            tokens = await answer.get()
        finally:
            self.cancel_request(request)
        text = processor.decode(tokens, skip_special_tokens=True)
        return text[: _end(text, _strings(gen_config.stop_strings))], len(inputs["input_ids"]), tokens

    def cancel_request(self, request: Request) -> None:
        """Cancel a request: its row is freed before the next decode step, and its answer gets no more tokens."""
        request.cancelled = True
        self._open.discard(request.key)

    def stop(self) -> None:
        """Cancel all running requests, whose clients get an error, and end the worker thread."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join()
        self._fail()

    def _parse(self, answer: "_Answer", inputs: dict, config: Any, tokenizer: Any) -> Request:
        tokens = torch.tensor(inputs["input_ids"], dtype=torch.int64, device="cpu")
        if config.max_new_tokens is None:
            config.max_new_tokens = max(1, min(NEW_TOKENS, self.decoder.max_length - len(tokens)))
        config.pad_token_id = None  # so that it counts as an ordinary token in a prompt
        arguments = {
            "input_ids": tokens,
            "max_new_tokens": config.max_new_tokens,
            "do_sample": bool(config.do_sample),
            "presence_penalty": getattr(config, "presence_penalty", None),
            "seed": getattr(config, "seed", None),
            "tokenizer": tokenizer,
        }
        try:
            answer.request = parse_one(self.decoder, arguments, answer, config)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return answer.request

    def _submit(self, answer: "_Answer") -> None:
        self._loop = asyncio.get_running_loop()
        self._open.add(answer)
        if self._stopping or self.error is not None:
            self._fail()
        else:
            self._inbox.put(answer.request)

    def _work(self) -> None:
        try:
            while (request := self._inbox.get()) is not None:
                self._serve(request)
        except Exception as error:
            logging.getLogger(__name__).exception("the decoder has failed")
            self.error = error
            self._loop.call_soon_threadsafe(self._fail)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _serve(self, first: Request) -> None:
        """Decode `first`, and requests that arrive meanwhile, until none is left."""
        with self.decoder.turn(), self.decoder.on_device():
            scheduler = Scheduler(self.decoder)
            scheduler.add(first)
            try:
                while scheduler.busy and not self._stopping:
                    while not self._inbox.empty():
                        if (request := self._inbox.get()) is not None:
                            scheduler.add(request)
                    if news := scheduler.advance():
                        told = [(answer.read if not last else answer.finish, value) for answer, value, last in news]
                        self._loop.call_soon_threadsafe(self._tell, told)
            finally:
                scheduler.close()

    def _tell(self, told: list[tuple[Callable[[Any], None], Any]]) -> None:
        for function, value in told:
            function(value if isinstance(value, Exception) else value.tolist())
        self._open = {answer for answer in self._open if not answer.ended}

    def _fail(self) -> None:
        reason = f"the decoder has failed: {self.error}" if self.error else "the server is shutting down"
        for answer in self._open:
            answer.finish(RuntimeError(reason))
        self._open.clear()


class _Answer(asyncio.Queue):
    """The queue of an answer: pieces of text from a streamer, then None; or, without a streamer, all tokens at once.

    begin: called with this object when the queue is first read. stops: stop strings; the text ends before the first
    one, and text that may be the beginning of one is held back. generated_tokens: all tokens so far; CBStreamer reads
    this attribute.
    """

    def __init__(self, begin: Callable[["_Answer"], None]):
        super().__init__()
        self._begin: Callable[[_Answer], None] | None = begin
        self.request: Request
        self.streamer: CBStreamer | None = None
        self.generated_tokens: list[int] = []
        self.error: RuntimeError | None = None
        self.ended = False
        self.stops: list[str] = []
        self._held, self._stopped = "", False

    def read(self, tokens: list[int]) -> None:
        """Add the new tokens of a decode step, and let the streamer put their text into the queue."""
        self.generated_tokens += tokens
        try:
            self.streamer.put(self)
        except Exception as error:  # from the tokenizer or the response parser; must not stop other clients
            self.streamer.cancel()
            self.finish(error)

    def finish(self, result: list[int] | Exception) -> None:
        """End the answer. result: all its tokens, or the error that ended it."""
        if self.ended:
            return
        self.ended = True
        if isinstance(result, Exception):
            self.error = RuntimeError(str(result))
            super().put_nowait("")  # wakes a waiting `get`
        elif self.streamer is None:
            super().put_nowait(result)
        else:
            self.streamer.end()

    async def get(self) -> Any:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin(self)
        item = None if self.error and self.empty() else await super().get()
        if self.error and not item:
            raise self.error
        return item

    def put_nowait(self, item: Any) -> None:
        is_end = item is None
        if self.stops and (is_end or isinstance(item, str)):
            text = "" if self._stopped else self._held + (item or "")
            end = _end(text, self.stops)
            self._stopped |= end < len(text)
            if not (self._stopped or is_end):
                end = max(0, end - max(map(len, self.stops)) + 1)
            item, self._held = text[:end], text[end:]
        if item:
            super().put_nowait(item)
        if is_end:
            super().put_nowait(None)


def _strings(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else [*(stop or ())]


def _end(text: str, stops: list[str]) -> int:
    """Return the position of the first stop string in the text, or the text's length if it has none."""
    return min((start for stop in stops if (start := text.find(stop)) >= 0), default=len(text))


def make_app(name: str, model: Any, tokenizer: Any, manager: DecoderManager | None) -> Any:
    """Return the ASGI application (a FastAPI) that serves a model under this name.

    manager: generates with a decoder of the model; None: transformers' continuous batching does. The application stops
    the manager when it shuts down.
    """
    from fastapi import FastAPI, HTTPException
    from fastapi import Request as HTTPRequest
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from jinja2 import TemplateError
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler

    state, models = _State(manager), ModelManager()
    models.force_model = name
    models.loaded_models[models.process_model_name(name)] = TimedModel(model, -1, tokenizer)
    listed = {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "fp8moe serve"}]}

    @asynccontextmanager
    async def lifespan(app):
        yield
        state.shutdown()
        models.shutdown()

    async def handle(handler, body):
        body = _prepared(body, model.generation_config if manager else None)
        response = await handler.handle_request(body, str(uuid.uuid4()))
        if isinstance(response, StreamingResponse):
            response.body_iterator = _with_errors(response.body_iterator)
        return response

    def serve_with(handler):
        async def endpoint(request: HTTPRequest, body: dict):
            answer = asyncio.create_task(handle(handler, body))
            gone = asyncio.create_task(_client_goes(request))
            try:
                await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise HTTPException(499, "the client has gone")
                return await answer
            except (KeyError, TypeError, AttributeError, TemplateError) as error:
                raise ValueError(f"the request cannot be read ({type(error).__name__}: {error})") from error
            finally:
                answer.cancel()
                gone.cancel()

        return endpoint

    def refuse(status: int, message: str) -> JSONResponse:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)

    app = FastAPI(title="fp8moe serve", lifespan=lifespan)
    app.post("/v1/chat/completions")(serve_with(ChatCompletionHandler(models, state)))
    app.post("/v1/completions")(serve_with(CompletionHandler(models, state)))
    app.get("/v1/models")(lambda: listed)
    app.get("/health")(lambda: JSONResponse({}, 200 if state.is_cb_alive() else 503))
    for error_type, answer in {
        ValueError: lambda _, error: refuse(400, str(error)),
        RequestValidationError: lambda _, error: refuse(400, "expected a JSON object as the body of the request"),
        HTTPException: lambda _, error: refuse(400 if error.status_code == 422 else error.status_code, error.detail),
        RuntimeError: lambda _, error: refuse(500 if state.is_cb_alive() else 503, str(error)),
    }.items():
        app.add_exception_handler(error_type, answer)
    return app


async def _client_goes(request: Any) -> None:
    """Wait until the client closes its connection. request: a FastAPI request whose body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _with_errors(parts: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield the parts of a stream. If a RuntimeError ends it, yield the error in the format of transformers."""
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part
        except RuntimeError as error:
            yield f"data: {json.dumps({'error': str(error)})}\n\n"


class _State(GenerationState):
    """Sends all requests to one manager or, if there is none, to transformers' continuous batching."""

    def __init__(self, manager: DecoderManager | None):
        super().__init__(continuous_batching=True)
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return self.manager or super().get_manager(model_id, use_cb)

    def is_cb_alive(self) -> bool:
        return self.manager.error is None if self.manager else super().is_cb_alive()

    def shutdown(self) -> None:
        self.manager.stop() if self.manager else super().shutdown()


_UNSERVED = {
    **dict.fromkeys(("n", "best_of"), (None, 1)),
    **dict.fromkeys(("logprobs", "top_logprobs", "echo"), (None, False)),
    **dict.fromkeys(("functions", "function_call", "audio", "prediction", "web_search_options"), (None,)),
    "logit_bias": (None, {}),
    "tool_choice": (None, "auto"),
    "modalities": (None, ["text"]),
    "response_format": (None, {"type": "text"}),
}
"""API fields that transformers' handlers ignore, each with the values that are accepted: those that change nothing."""

_ONE_FOR_ALL = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "generation_config")
"""Request fields that transformers' continuous batching ignores: all requests share the model's settings."""


def _prepared(body: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return a request's body, with the fields that transformers' handlers would ignore put into its generation_config.

    config: the model's generation config, the default for requests; None: requests cannot change settings.
    Raises ValueError for a field that is not served.
    """
    for name, neutral in _UNSERVED.items():
        if body.get(name) not in neutral:
            raise ValueError(f"{name}: {json.dumps(body[name])} is not served")
    body = body | {"max_tokens": body.get("max_completion_tokens", body.get("max_tokens"))}
    if config is None:
        for name in _ONE_FOR_ALL:
            if body.get(name) is not None:
                raise ValueError(f"{name}: this model is served with the settings of its generation_config only")
        return body
    given = body.get("generation_config")
    settings = json.loads(config.to_json_string() if given is None else given)
    settings.pop("_from_model_config", None)  # with this entry, no further settings are taken
    if given is None:
        settings["max_new_tokens"] = None  # DecoderManager sets it by the room there is
    if float(body.get("temperature") or 0):  # otherwise only the model's config decides
        settings["do_sample"] = True
    # A seed left in the body would seed PyTorch's global generator, and so change the samples of other clients.
    settings |= {name: body.get(name) for name in ("seed", "presence_penalty")}
    return body | {"seed": None, "presence_penalty": None, "generation_config": json.dumps(settings)}
