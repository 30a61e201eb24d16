"""Runs the application on uvicorn, with time limits for the head of a request and for answers during shutdown."""

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fp8moe.serving.manager import Manager

SECONDS_TO_FINISH = 10
"""How long answers may continue after Ctrl-C or SIGTERM, before they are cancelled."""
SECONDS_TO_ASK = 30
"""How long a connection may take to send the head of a request."""


class _Protocol(H11Protocol):
    """Closes a connection if the head of a request does not arrive within SECONDS_TO_ASK."""

    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._overdue = self.loop.call_later(SECONDS_TO_ASK, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        elif not answering and self._overdue is None:
            self._overdue = self.loop.call_later(SECONDS_TO_ASK, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, manager: Manager):
        super().__init__(config)
        self._manager = manager

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(SECONDS_TO_FINISH, self._manager.fail)
        await super().shutdown(sockets)


def serve(app: Any, manager: Manager, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM. Answers that are still running SECONDS_TO_FINISH later end with an error."""
    config = uvicorn.Config(
        *(app, "", 0), http=_Protocol, log_level="warning", timeout_graceful_shutdown=SECONDS_TO_FINISH + 2
    )
    _Server(config, manager).run(sockets=[listener])
