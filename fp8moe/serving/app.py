"""The HTTP application: paths, the API key, accepted hosts, statuses of errors, and metrics."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fp8moe.serving.answers import Text
from fp8moe.serving.fields import Asked, Reader, UnknownModel
from fp8moe.serving.forms import ChatForm, CompletionForm, error_of, streamed
from fp8moe.serving.manager import Answer, BatchingManager, Manager

DRAINED = 256 << 20
"""How many bytes of an oversized body are read and dropped, so that the client finishes sending and gets the error."""
SECONDS_TO_SEND = 60
"""How long the body of a request may take to arrive."""
SECONDS_TO_READ = 30
"""How long parsing a request may take: JSON, chat template and tokenization."""


def make_app(
    name: str,
    model: Any,
    tokenizer: Any,
    manager: Manager | None,
    *,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    max_length: int = 4096,
) -> Any:
    """Return the ASGI application (a FastAPI) that serves a model under this name.

    manager: the engine that generates, stopped together with the application; None: transformers' continuous batching,
    for sequences of up to max_length tokens. api_key: the bearer token that requests to /v1 must have; None: no token
    is needed. hosts: the names that the Host header may have; None: any name.
    """
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import StarletteHTTPException
    from fastapi.responses import JSONResponse, Response, StreamingResponse

    manager = manager or BatchingManager(model, max_length)
    reader = Reader(name, model, tokenizer, manager.max_length, manager.own_settings)
    readers = ThreadPoolExecutor(4, "fp8moe serve reads")
    metrics = Metrics(manager)
    listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "fp8moe"}

    def refuse(status: int, message: str) -> JSONResponse:
        return JSONResponse(error_of(message, status), status)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(manager.stop)
        readers.shutdown(wait=False, cancel_futures=True)

    async def body_of(request: Request) -> bytes:
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(SECONDS_TO_SEND):
                async for part in request.stream():
                    size += len(part)
                    if size <= reader.most_bytes:
                        body += part
                    elif size > DRAINED:
                        break
        except TimeoutError:
            raise HTTPException(408, f"body: not all of it came within {SECONDS_TO_SEND} s") from None
        if size > reader.most_bytes:
            raise HTTPException(413, f"body: more than {reader.most_bytes} bytes, the most of a request here")
        return bytes(body)

    async def read(request: Request, chat: bool) -> Asked:
        reading = asyncio.get_running_loop().run_in_executor(readers, reader.read, await body_of(request), chat)
        try:
            return await asyncio.wait_for(reading, SECONDS_TO_READ)
        except TimeoutError:
            raise HTTPException(400, f"body: reading the prompt took more than {SECONDS_TO_READ} s") from None

    async def answer(request: Request, chat: bool) -> Response:
        asked = await read(request, chat)
        try:
            answers = [manager.start(tokens, asked, tokenizer) for tokens in asked.prompts]
        except ValueError as error:
            raise ValueError(asked.told(error)) from error
        form = (ChatForm if chat else CompletionForm)(name, tokenizer, asked.skip_special_tokens)
        texts = [(one, Text(asked, model, tokenizer)) for one in answers]
        if asked.stream:
            return StreamingResponse(streamed(form, texts, asked, metrics.ended), media_type="text/event-stream")
        whole = asyncio.create_task(form.whole(texts, metrics.ended))
        gone = asyncio.create_task(_client_goes(request))
        try:
            await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise HTTPException(499, "the client has gone")
            return JSONResponse(await whole)
        finally:
            whole.cancel()
            gone.cancel()

    app = FastAPI(title="fp8moe serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat=True)

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [listed]}

    @app.get("/v1/models/{wanted:path}")
    async def one_model(wanted: str) -> dict:
        if wanted != name:
            raise UnknownModel(f"model: {wanted!r} is not served here; the model is {name!r}")
        return listed

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({}, 200 if manager.error is None else 503)

    @app.get("/metrics")
    async def measured() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    handlers: dict[Any, Callable[[Any, Any], JSONResponse]] = {
        UnknownModel: lambda _, error: refuse(404, str(error)),
        ValueError: lambda _, error: refuse(400, str(error)),
        StarletteHTTPException: lambda _, error: refuse(error.status_code, str(error.detail)),
        RuntimeError: lambda _, error: refuse(503 if manager.ending else 500, str(error)),
        Exception: lambda _, error: refuse(500, f"{type(error).__name__}: {error}"),
    }
    for error_type, handler in handlers.items():
        app.add_exception_handler(error_type, handler)
    app.add_middleware(Guard, refuse=refuse, metrics=metrics, key=api_key, hosts=hosts)
    return app


async def _client_goes(request: Any) -> None:
    """Wait until the client closes its connection. The body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Guard:
    """Middleware that refuses a wrong Host header, and requests to /v1 without the API key, without reading bodies."""

    def __init__(self, app: Any, refuse: Callable, metrics: "Metrics", key: str | None, hosts: Collection[str] | None):
        self._app, self._refuse, self._metrics = app, refuse, metrics
        self._key = None if key is None else f"Bearer {key}".encode()
        self._hosts = None if hosts is None else {host.strip("[]").lower() for host in hosts}

    async def __call__(self, scope: dict, receive: Callable, send: Callable[[dict], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: dict) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(message["status"]).inc()
            await send(message)

        headers, app = dict(scope["headers"]), self._app
        host = headers.get(b"host", b"").decode("latin-1").lower()
        host = host.rpartition("]")[0].lstrip("[") if "]" in host else host.partition(":")[0]
        if self._hosts is not None and host not in self._hosts:
            app = self._refuse(403, "Host: this server is called by another name")
        elif scope["path"].startswith("/v1") and not self._has_key(headers):
            app = self._refuse(401, "Authorization: expected the server's API key as a bearer token")
        await app(scope, receive, counted)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        return self._key is None or hmac.compare_digest(headers.get(b"authorization", b""), self._key)


class Metrics:
    """The metrics at /metrics: requests by status, tokens, steps, running and waiting answers, and answer times."""

    def __init__(self, manager: Manager):
        import prometheus_client as prometheus
        from prometheus_client.core import CounterMetricFamily

        self._registry = registry = prometheus.CollectorRegistry()
        self._write, self.content_type = prometheus.generate_latest, prometheus.CONTENT_TYPE_LATEST
        self.requests = prometheus.Counter("fp8moe_requests", "HTTP requests", ["status"], registry=registry)
        self._prompts = prometheus.Counter("fp8moe_prompt_tokens", "tokens of prompts", registry=registry)
        self._tokens = prometheus.Counter("fp8moe_generated_tokens", "tokens of answers", registry=registry)
        running = prometheus.Gauge("fp8moe_answers_running", "answers that have a row", registry=registry)
        running.set_function(lambda: max(0, len(manager.open) - manager.waiting))
        waiting = prometheus.Gauge("fp8moe_answers_waiting", "answers that wait for a row", registry=registry)
        waiting.set_function(lambda: manager.waiting)
        self._first = prometheus.Histogram(
            *("fp8moe_time_to_first_token_seconds", "from the request to its first tokens"), registry=registry
        )
        self._whole = prometheus.Histogram(
            *("fp8moe_answer_seconds", "from the request to the end of its answer"), registry=registry
        )

        class Steps:
            def collect(self) -> Any:
                yield CounterMetricFamily("fp8moe_steps", "forwards of the decoder", value=manager.steps)

        registry.register(Steps())

    def ended(self, answer: Answer) -> None:
        """Count an answer that has ended, or whose client has disconnected."""
        if answer.began:
            self._prompts.inc(answer.prompt_tokens)
            self._tokens.inc(answer.tokens)
            self._whole.observe(time.monotonic() - answer.began)
            if answer.first:
                self._first.observe(answer.first - answer.began)

    def text(self) -> bytes:
        return self._write(self._registry)
