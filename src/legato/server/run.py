"""Listening, serving and stopping: uvicorn around the application, the engine beside it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from legato.errors import ConfigError

DRAIN_S = 5
"""How long open answers may take to finish after the first Ctrl-C or SIGTERM."""
CUT_S = 2
"""How long clients may take to read the end of an answer that was cut."""
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model is loaded, so that a taken port is told at once. ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host '{host}' is not an address of this machine: {error}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken; stop what uses it, or choose another with --port"
        elif error.errno == errno.EACCES:
            message = f"port {port} needs more rights than this process has; choose one above 1023 with --port"
        else:
            message = f"cannot listen on {host}:{port}: {error.strerror}"
        raise ConfigError(message) from error
    return sock


class HttpServer:
    """uvicorn, stopped in two steps: open answers may finish for a while, then they are cut with a reason.

    `cut`: ends all open answers, each with an error its client can read.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, cut: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=DRAIN_S + CUT_S,
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._sock = sock
        self._cut = cut

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return bool(self._server.should_exit)

    async def serve(self) -> None:
        """Answers until stopped."""
        gc.collect()
        gc.freeze()  # a collection of all that was imported takes a core from the step that runs, for 10 ms
        await self._server.serve(sockets=[self._sock])

    def stop(self) -> None:
        """Takes no more connections and lets open answers finish for `DRAIN_S`. Called again: cuts them now."""
        if self._server.should_exit:
            self._cut()
        else:
            self._server.should_exit = True
            asyncio.get_running_loop().call_later(DRAIN_S, self._cut)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `on_signals`: uvicorn would raise them again and cancel our own cleaning up."""
        yield


@contextlib.contextmanager
def on_signals(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` for every Ctrl-C and SIGTERM inside, instead of an exception in whatever happens to run."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
