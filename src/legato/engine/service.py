"""`EngineService`: the engine in a process of its own, seen from asyncio. One message a step, whatever the streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from legato import errors
from legato.core.request import Request, Sampling, StopRule
from legato.engine.live import Live
from legato.engine.metrics import EngineMetrics
from legato.engine.outlook import Outlook
from legato.engine.ports import Recorder
from legato.engine.recall import Recall
from legato.engine.stream import TokenEvent, TokenStream
from legato.engine.terms import Terms
from legato.engine.wire import (
    Abort,
    EngineInfo,
    Failed,
    FrameBuffer,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    StepDone,
    StepStats,
    ToEngine,
    Trace,
    Tracing,
    decode_from_engine,
    frame,
    submit_message,
)
from legato.engine.worker import EngineFactory, ReportProgress

SEND_BUFFER_BYTES = 1 << 20
STOP_TIMEOUT_S = 5.0
_ANY_TERMS = Terms()
_CHILD = "import sys; from legato.engine.worker import main; sys.exit(main({fd}))"


class EngineService:
    """Starts, feeds, hears and ends the engine process.

    `factory` builds the engine there. `on_progress` hears of loading, `on_step` sees every step's numbers. All methods
    belong to the event loop that called `start`.
    """

    def __init__(
        self,
        factory: EngineFactory,
        *,
        on_progress: ReportProgress | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._factory = factory
        self._on_progress = on_progress
        self._on_step = on_step
        self._clock = clock
        self._ids = itertools.count(1)
        self._live: dict[int, Live] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._stopping = False
        self._failed = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._reported: errors.LegatoError | None = None
        self.detail = ""
        """Traceback of the engine process, when it broke on a bug of ours."""
        self.failure: errors.EngineError | None = None
        """Why the engine is gone, once it is."""
        self.metrics = EngineMetrics()
        self._outlook = Outlook()
        self._recall = Recall(0, 1)
        self._recorder: Recorder | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine is. EngineError before it is ready."""
        if self._ready is None or not self._ready.done() or self._ready.exception() is not None:
            raise errors.EngineError("the engine is not ready")
        return self._ready.result()

    def now_s(self) -> float:
        """The clock of arrivals and of tokens: on Linux the engine's too."""
        return self._clock()

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return self.metrics.alive

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineInfo:
        """Starts the process; returns when it is ready. Raises what it raised: ModelError, ConfigError, EngineError."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        start = pickle.dumps((sys.path, pickle.dumps(self._factory)))
        try:
            with _interrupts_ignored():
                self._process = subprocess.Popen(  # noqa: ASYNC220  (a millisecond, before anything is served)
                    [sys.executable, "-c", _CHILD.format(fd=theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
        except OSError as error:
            ours.close()
            raise errors.EngineError(f"the engine process could not be started: {error}") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        await loop.create_unix_connection(lambda: _Reader(self), sock=ours)
        assert self._transport is not None
        self._transport.write(struct.pack("<I", len(start)) + start)
        try:
            return await self._ready
        except BaseException:
            await self.stop()
            raise

    def record_to(self, recorder: Recorder) -> None:
        """Has `recorder` told of all requests and steps from now on; called once, before the first request."""
        self._recorder = recorder
        self._send(Trace())

    def open_stream(self) -> TokenStream:
        """A place for the events of one client request."""
        return TokenStream(self.abort)

    def submit(
        self,
        stream: TokenStream,
        prompt: tuple[int, ...],
        sampling: Sampling,
        stop: StopRule,
        terms: Terms = _ANY_TERMS,
        tokenized_s: tuple[float, float] | None = None,
    ) -> int:
        """Queues one sequence; its events arrive in `stream`. Returns its id. EngineError if the engine is gone.

        `tokenized_s`: when its text was turned into tokens, for a trace.
        """
        if self.failure is not None:
            raise self.failure
        arrival_s = self._clock()
        request = Request(
            next(self._ids),
            prompt,
            sampling,
            stop,
            arrival_s,
            terms.priority,
            terms.cache_salt,
            itl_s=terms.itl_s,
            due_s=terms.due_s(arrival_s, self._outlook.decode_s),
            tenant=terms.tenant,
        )
        self._send(submit_message(request))
        if self._recorder is not None:
            self._recorder.asked(request, terms, tokenized_s)
        missing_tokens = self._recall.send(prompt, terms.cache_salt)
        if sampling.prompt_logprobs is not None:
            missing_tokens = len(prompt)  # all its rows are wanted, cached or not
        pending = self._outlook.pending(self.info, terms, len(prompt), arrival_s, missing_tokens=missing_tokens)
        served = self.metrics.served(terms.tenant)
        self._outlook.submitted(len(prompt))
        self._live[request.request_id] = Live(stream, arrival_s, len(prompt), pending, terms, served)
        stream.opened(request.request_id)
        return request.request_id

    def first_token_seconds(self, prompts: Sequence[tuple[int, ...]], terms: Terms, *, scored: bool = False) -> float:
        """Until all of `prompts` had a first token, if they came now, as far as one can tell. Cost: O(open sequences).

        `scored`: their own log-probabilities are wanted, so that what is cached is computed again.
        """
        tokens = sum(map(len, prompts))
        missing_tokens = tokens if scored else self._recall.missing_tokens(prompts, terms.cache_salt)
        own = self._outlook.pending(self.info, terms, tokens, self._clock(), missing_tokens=missing_tokens)
        return self._outlook.first_token_seconds(self.info, own, self._live.values())

    def abort(self, request_id: int, reason: str = "abort") -> None:
        """Ends a sequence; the engine hears of it before its next step. Unknown and finished ids are ignored."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._ended(request_id, live, reason, self._clock())
        if self.failure is None:
            self._send(Abort(request_id))

    @property
    def open_sequences(self) -> int:
        """Sequences that are waiting or running."""
        return len(self._live)

    def end_streams(self, message: str) -> None:
        """Ends every open stream with an EngineError, and its sequences. The engine goes on."""
        streams = {entry.stream for entry in self._live.values()}
        for stream in streams:
            stream.fail(errors.EngineError(message))
            stream.close()

    async def failed(self) -> errors.EngineError:
        """Waits until the engine is gone other than by `stop`; why."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def stop(self) -> None:
        """Ends the process: at once while it loads, else after its step, by force after five seconds.

        Open streams get an EngineError.
        """
        self._stopping = True
        process, transport = self._process, self._transport
        if process is None:
            return
        if not self.alive:
            process.kill()
        if transport is not None and not transport.is_closing():
            self._send(Shutdown())
            transport.close()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        if self._ending is not None:
            await self._ending

    def _send(self, message: ToEngine) -> None:
        assert self._transport is not None
        self._transport.write(frame(message))

    def _receive(self, body: bytes) -> None:
        message = decode_from_engine(body)
        if isinstance(message, StepDone):
            self._dispatch(message)
        elif isinstance(message, Progress):
            if self._on_progress is not None:
                self._on_progress(message.stage, message.done, message.total)
        elif isinstance(message, Ready):
            self.metrics.alive = True
            blocks = message.info.kv_blocks
            self._recall = Recall(blocks if message.info.prefix_caching else 0, message.info.block_tokens)
            self.metrics.last_step = StepStats(free_blocks=blocks)
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, Rejected):
            live = self._live.pop(message.request_id, None)
            if live is not None:
                self._ended(message.request_id, live, "error", self._clock())
                live.stream.fail(errors.RequestError(message.message), message.request_id)
        elif isinstance(message, Tracing):
            if self._recorder is not None:
                self._recorder.begins(message.cost)
        elif isinstance(message, Failed):
            self._reported = _error_of(message)
            self.detail = message.detail

    def _dispatch(self, message: StepDone) -> None:
        """Hands every stream its tokens; runs once a step, so it does as little as it can for each token."""
        now_s = self._clock()
        metrics, live_by_id = self.metrics, self._live
        metrics.record_step(message.stats)
        self._outlook.heard(message.stats)
        if self._on_step is not None:
            self._on_step(message.stats)
        if self._recorder is not None and message.traced is not None:
            self._recorder.stepped(message.traced, now_s)
        for request_id, tokens in message.cached:
            if request_id in live_by_id:
                live_by_id[request_id].stream.cached_tokens[request_id] = tokens
                live_by_id[request_id].found(tokens)
        for request_id, entries in message.prompt_logprobs:
            if request_id in live_by_id:
                live_by_id[request_id].stream.prompt_logprobs.setdefault(request_id, []).extend(entries)
        finished = {ended[0]: ended for ended in message.finished}
        logprobs = message.logprobs or itertools.repeat(None)
        for request_id, token_id, entry in zip(message.request_ids, message.token_ids, logprobs, strict=False):
            live = live_by_id.get(request_id)
            if live is None:
                continue  # aborted while this step ran
            live.record_token(metrics, now_s)
            reason = finished.pop(request_id)[1] if request_id in finished else None
            if reason is not None:
                del live_by_id[request_id]
                self._ended(request_id, live, reason, now_s)
            live.stream.push(TokenEvent(request_id, token_id, entry, reason))
        for request_id, reason, text in finished.values():
            live = live_by_id.pop(request_id, None)
            if live is not None:
                self._ended(request_id, live, reason, now_s)
                live.stream.fail(errors.EngineError(text or f"the engine ended the request: {reason}"), request_id)

    def _ended(self, request_id: int, live: Live, reason: str, now_s: float) -> None:
        live.record_end(self.metrics, reason, now_s)
        if self._recorder is not None:
            self._recorder.ended(request_id, reason, now_s)
        if live.has_begun:
            self._outlook.ended(now_s - live.first_token_s)

    def _connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def _disconnected(self) -> None:
        self.metrics.alive = False
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        """Says why the process is gone to everybody who waits for it."""
        assert self._process is not None
        self.failure = errors.EngineError("the engine process is gone")
        try:
            status = await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        error = self._reported
        if error is None:
            error = errors.EngineError("the engine was stopped" if self._stopping else _how_it_ended(status))
        self.failure = error if isinstance(error, errors.EngineError) else errors.EngineError(str(error))
        if not self._stopping:
            self._failed.set()
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: a start that was cancelled leaves no warning
        live, self._live = self._live, {}
        for request_id, entry in live.items():
            self._ended(request_id, entry, "error", self._clock())
            entry.stream.fail(self.failure)


class _Reader(asyncio.Protocol):
    """Bytes of the engine's socket, to messages, within the event loop's callback."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._frames = FrameBuffer()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._service._connected(transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._service._receive(body)

    def connection_lost(self, error: Exception | None) -> None:
        self._service._disconnected()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A child started inside ignores Ctrl-C from its first instruction; we go on as before."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: the child still ignores it once it runs Python
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _how_it_ended(status: int) -> str:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the engine process was ended by {name}{hint}"
    return f"the engine process ended with status {status}"


def _error_of(message: Failed) -> errors.LegatoError:
    kind = getattr(errors, message.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.LegatoError):
        return kind(message.message)
    return errors.EngineError(f"the engine broke: {message.message}")
