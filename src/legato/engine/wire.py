"""The messages between the server's process and the engine's: msgpack arrays in length-prefixed frames.

One `StepDone` a step carries the tokens of all streams. Prompts travel as packed 32-bit integers.
"""

from __future__ import annotations

import math
import select
import socket
import struct
from array import array
from typing import Any

import msgspec

from legato.core.plan import TokenLogprobs
from legato.core.request import Request, Sampling, StopRule
from legato.core.trace import TracedStep
from legato.errors import EngineError

MAX_FRAME_BYTES = 1 << 30
_length = struct.Struct("<I")


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine is, once it is ready. Sizes in tokens, blocks and bytes.

    The bytes are predicted before anything is allocated: `peak_bytes` is of the whole engine process. `notice`: what
    the user should know of how options were understood. `itl_s`: the gap between tokens that steps are planned for, 0
    if they are not; `promise`: what that means at this machine's speed. `ttft_s`: the time to a first token that is
    wanted, 0 if none is. `least_itl_s`: a step of one stream alone: nobody can have a smaller gap.
    `most_streams`: those whose gap can be kept, 0 if there is none to keep. `token_s`: of a prompt alone.
    `prefill_share`, `prefer`: as `StepTime` has them, None if no gap is planned for.
    """

    max_model_len: int
    vocab: int
    kv_blocks: int
    block_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    threads: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    scratch_bytes: int = 0
    swap_bytes: int = 0
    peak_bytes: int = 0
    load_s: float = 0.0
    description: str = ""
    prefix_caching: bool = True
    notice: str = ""
    itl_s: float = 0.0
    promise: str = ""
    ttft_s: float = 0.0
    least_itl_s: float = 0.0
    most_streams: int = 0
    prefill_share: float | None = None
    prefer: str | None = None
    token_s: float = 0.0
    policy: str = ""
    tenant_weights: dict[str, float] = {}
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    async_scheduling: bool = False

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block."""
        return self.kv_bytes // self.kv_blocks if self.kv_blocks else 0

    @property
    def kv_tokens(self) -> int:
        """Tokens the whole KV pool holds."""
        return self.kv_blocks * self.block_tokens

    @property
    def context(self) -> int:
        """Tokens of one sequence, prompt and answer: what the model and the pool allow."""
        return min(self.max_model_len, self.kv_tokens)


class CacheStats(msgspec.Struct, array_like=True, frozen=True):
    """The prefix cache, since the start but for the two that count blocks now.

    `queried_tokens`: prompt tokens of admitted requests, of which `hit_tokens` were found. `cached_blocks`: blocks of
    the pool that can be found now, `swapped_blocks` those in host memory. `evictions`: blocks that lost their content
    to another use. `restored_blocks`: copied back from host memory. `overtakes`: admissions before a larger request.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    cached_blocks: int = 0
    evictions: int = 0
    swapped_blocks: int = 0
    restored_blocks: int = 0
    overtakes: int = 0


class PaceStats(msgspec.Struct, array_like=True, frozen=True):
    """What tokens take now, how well steps are foreseen, and tokens that were late since the start, by cause.

    `token_s`, `decode_s`: see `core.pace`. The rest is 0 where steps are bounded by tokens alone. `margin`:
    predictions are planned with so much more. `scale`: the machine now, over the one first measured; `memory_scale`:
    its memory, over that again. Errors are relative. `late`: see `core.pacer`.
    """

    token_s: float = 0.0
    decode_s: float = 0.0
    margin: float = 0.0
    scale: float = 0.0
    memory_scale: float = 0.0
    median_error: float = 0.0
    p95_error: float = 0.0
    late: dict[str, int] = {}


class StepStats(msgspec.Struct, array_like=True, frozen=True):
    """One step in numbers. `rows` 0: nothing was computed (an abort, say, changed the counts).

    `gap_s`: from the end of the step before to the start of this one, -1 if the engine was idle in between.
    `free_blocks` -1: unknown. `pending_tokens`: of prompts, not planned yet.
    """

    step: int = 0
    duration_s: float = 0.0
    gap_s: float = -1.0
    rows: int = 0
    chunk_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = -1
    preempted: int = 0
    cache: CacheStats = CacheStats()
    pace: PaceStats = PaceStats()
    pending_tokens: int = 0


LogprobEntry = tuple[float, list[tuple[int, float]], int]
"""`TokenLogprobs`: of the chosen token, the most likely ones, the rank."""


class Submit(msgspec.Struct, array_like=True, tag=1):
    """A request for the engine. `prompt`: little-endian int32."""

    request_id: int
    prompt: bytes
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    min_tokens: int
    arrival_s: float
    priority: int = 0
    cache_salt: bytes = b""
    itl_s: float | None = None
    due_s: float | None = None
    tenant: str = ""


class Abort(msgspec.Struct, array_like=True, tag=2):
    """The request's client is gone, or a stop string ended it."""

    request_id: int


class Shutdown(msgspec.Struct, array_like=True, tag=3):
    """End the engine process now."""


class Trace(msgspec.Struct, array_like=True, tag=4):
    """From now on, tell of each step what a trace keeps. The answer is `Tracing`."""


class Progress(msgspec.Struct, array_like=True, tag=1):
    """How far start-up got, in bytes."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, array_like=True, tag=2):
    """The engine takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, array_like=True, tag=3):
    """The engine could not start, or broke. `kind`: class name in `legato.errors`, or "bug" with a traceback."""

    kind: str
    message: str
    detail: str = ""


class Rejected(msgspec.Struct, array_like=True, tag=4):
    """One request the engine refused; nothing else is disturbed."""

    request_id: int
    kind: str
    message: str


class StepDone(msgspec.Struct, array_like=True, tag=5):
    """Tokens of one step, one entry a sampled request. `logprobs`: empty, or one entry a token.

    `finished`: (request, reason, message) of those that ended; the message is empty but for the reason "error".
    `cached`: (request, prompt tokens found in the prefix cache) of those that were admitted and found any.
    `prompt_logprobs`: (request, entries), the next ones of its prompt. `traced`: the step, for a trace.
    """

    request_ids: list[int]
    token_ids: list[int]
    logprobs: list[LogprobEntry | None]
    finished: list[tuple[int, str, str]]
    stats: StepStats
    cached: list[tuple[int, int]] = []
    prompt_logprobs: list[tuple[int, list[LogprobEntry]]] = []
    traced: TracedStep | None = None


class Tracing(msgspec.Struct, array_like=True, tag=6):
    """Steps after this one are traced. `cost`: by which they are foreseen, as `StepCost.to_dict`; None: they are not.

    Comes again when the cost was fitted anew.
    """

    cost: dict[str, Any] | None


ToEngine = Submit | Abort | Shutdown | Trace
FromEngine = Progress | Ready | Failed | Rejected | StepDone | Tracing

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message as it goes over the socket."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _length.pack(len(body)) + body


def submit_message(request: Request) -> Submit:
    """`Request`, packed."""
    return Submit(
        request.request_id,
        array("i", request.prompt).tobytes(),
        request.sampling,
        request.stop.max_tokens,
        list(request.stop.token_ids),
        request.stop.min_tokens,
        request.arrival_s,
        request.priority,
        request.cache_salt,
        request.itl_s,
        None if request.due_s == math.inf else request.due_s,
        request.tenant,
    )


def request_of(message: Submit) -> Request:
    """The `Request` of a `Submit`."""
    prompt = array("i")
    prompt.frombytes(message.prompt)
    return Request(
        message.request_id,
        tuple(prompt),
        message.sampling,
        StopRule(message.max_tokens, frozenset(message.stop_token_ids), message.min_tokens),
        message.arrival_s,
        message.priority,
        message.cache_salt,
        itl_s=message.itl_s,
        due_s=math.inf if message.due_s is None else message.due_s,
        tenant=message.tenant,
    )


def pack_logprobs(entry: TokenLogprobs) -> LogprobEntry:
    """`TokenLogprobs` as it travels."""
    return (entry.chosen, [(int(token), float(value)) for token, value in entry.top], entry.rank)


class FrameBuffer:
    """Splits a stream of bytes into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that are complete now."""
        self._buffer += data
        bodies, at = [], 0
        while len(self._buffer) - at >= 4:
            size = _length.unpack_from(self._buffer, at)[0]
            if len(self._buffer) - at - 4 < size:
                break
            bodies.append(bytes(self._buffer[at + 4 : at + 4 + size]))
            at += 4 + size
        del self._buffer[:at]
        return bodies


def decode_from_engine(body: bytes) -> FromEngine:
    """A message of the engine process."""
    return _from_engine.decode(body)


class EngineSocket:
    """The engine process's end: blocking sends, receives that wait only when asked to."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer()
        self._sock.setblocking(True)

    def send(self, message: FromEngine) -> None:
        """Sends; BrokenPipeError or ConnectionResetError if the other process is gone."""
        self._sock.sendall(frame(message))

    def is_quiet(self, for_s: float) -> bool:
        """Whether nothing arrives for so long. Returns at once when something does."""
        return not select.select([self._sock], [], [], for_s)[0]

    def waits_beside(self, other_fd: int, for_s: float) -> bool:
        """Waits so long, or until something arrives, or `other_fd` can be read. Whether something has arrived."""
        return self._sock.fileno() in select.select([self._sock.fileno(), other_fd], [], [], for_s)[0]

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """Messages that have arrived. `wait`: sleeps (no polling) until there is one. EOFError: the parent is gone."""
        out: list[ToEngine] = []
        while True:
            flags = 0 if wait and not out else socket.MSG_DONTWAIT
            try:
                data = self._sock.recv(1 << 18, flags)
            except BlockingIOError:
                return out
            if not data:
                raise EOFError
            out.extend(_to_engine.decode(body) for body in self._frames.feed(data))
