"""`Spawned`: a `legato serve` of one's own, for as long as it is measured."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

from legato.bench.client import Address, Client, Clock
from legato.errors import EngineError

START_LIMIT_S = 300.0
_POLL_S, _STOP_S, _TOLD = 0.1, 15.0, 2000


class Spawned:
    """`async with Spawned(model, options, clock) as url`: a server with these options, by their names on the command
    line, that answers. Raises EngineError, with what it said, if it ends before, or does not answer in five minutes.
    """

    def __init__(self, model: str, options: Mapping[str, object], clock: Clock) -> None:
        self._arguments = [model]
        for name, value in options.items():
            if isinstance(value, bool):
                self._arguments.append(f"--{'' if value else 'no-'}{name}")
            else:
                self._arguments += [f"--{name}", str(value)]
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None

    async def __aenter__(self) -> str:
        port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        command = [sys.executable, "-m", "legato.cli.main", "serve", *self._arguments, "--port", str(port)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await self._answers(Client(Address.of(url), self._clock))
        except BaseException:
            await self.__aexit__()
            raise
        return url

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._log is not None:
            self._log.close()

    async def _answers(self, client: Client) -> None:
        assert self._process is not None
        limit_s = self._clock() + START_LIMIT_S
        while True:
            if self._process.returncode is not None:
                raise EngineError(f"legato serve {' '.join(self._arguments)} ended at once: {self._said()}")
            try:
                status, _ = await client.fetch("/models")
                if status == 200:
                    return
            except OSError:
                pass  # it does not listen yet, or does not accept
            if self._clock() > limit_s:
                raise EngineError(f"legato serve did not answer within {START_LIMIT_S:.0f} s: {self._said()}")
            await asyncio.sleep(_POLL_S)

    def _said(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_TOLD:].strip() or "it said nothing"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
