"""An engine one can predict in one's head: it answers with the prompt's own tokens, one a step, in a circle.

Tokens are bytes; 256 is the end of sequence, 257 "<|start|>", 258 "<|end|>". The answer to "abc" is "abcabc…". Only a
prompt that contains byte 0 ends by itself: 0 becomes the end token.
Prompts are computed `chunk` tokens a step, one prompt at a time, beside the decodes.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from dataclasses import dataclass, field

from legato.core.plan import TokenLogprobs
from legato.core.request import Request
from legato.engine.wire import EngineInfo
from legato.engine.worker import ReportProgress
from legato.errors import ModelCorrupt, RequestError

EOS, START, END = 256, 257, 258
VOCAB = 259
TOKEN_BYTES = [bytes([i]) for i in range(256)] + [b"", b"", b""]
BLOCK_TOKENS = 16


@dataclass
class Events:
    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finished: list[tuple[int, str]] = field(default_factory=list)
    rows: int = 0
    chunk_tokens: int = 0
    preempted: int = 0


@dataclass
class Sequence:
    request: Request
    computed: int = 0
    generated: int = 0


class FakeEngine:
    def __init__(self, *, blocks: int, max_seqs: int, chunk: int, step_s: float) -> None:
        self.blocks, self.max_seqs, self.chunk, self.step_s = blocks, max_seqs, chunk, step_s
        self.running: dict[int, Sequence] = {}
        self.waiting: dict[int, Sequence] = {}
        self.crash_on: int | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, request: Request) -> None:
        if request.prompt[:5] == tuple(b"!kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt[:4] == tuple(b"!bug"):
            raise ZeroDivisionError("a bug of ours")
        if request.prompt[:7] == tuple(b"!refuse"):
            raise RequestError("the fake engine refuses this one")
        self.waiting[request.request_id] = Sequence(request)

    def abort(self, request_id: int) -> None:
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)

    def counts(self) -> tuple[int, int, int]:
        used = sum(-(-(s.computed + s.generated) // BLOCK_TOKENS) for s in self.running.values())
        return len(self.running), len(self.waiting), self.blocks - used

    def step(self) -> Events:
        if self.step_s:
            time.sleep(self.step_s)
        while self.waiting and len(self.running) < self.max_seqs:
            request_id = next(iter(self.waiting))
            self.running[request_id] = self.waiting.pop(request_id)
        events, room = Events(), self.chunk
        for request_id, seq in list(self.running.items()):
            request, prompt = seq.request, seq.request.prompt
            if seq.computed < len(prompt):
                take = min(room, len(prompt) - seq.computed)
                seq.computed += take
                room -= take
                events.rows += take
                events.chunk_tokens += take
                if seq.computed < len(prompt):
                    continue
            else:
                events.rows += 1
            token = prompt[seq.generated % len(prompt)] or EOS
            wanted = request.sampling.logprobs
            if wanted is None:
                events.logprobs.append(None)
            else:
                top = tuple(((token + i) % VOCAB, -0.25 - i) for i in range(wanted))
                events.logprobs.append(TokenLogprobs(-0.25, top))
            seq.generated += 1
            events.request_ids.append(request_id)
            events.token_ids.append(token)
            if token in request.stop.token_ids and seq.generated > request.stop.min_tokens:
                events.finished.append((request_id, "stop"))
                del self.running[request_id]
            elif seq.generated >= request.stop.max_tokens:
                events.finished.append((request_id, "length"))
                del self.running[request_id]
        return events


def build(
    report: ReportProgress,
    *,
    blocks: int = 64,
    max_model_len: int = 512,
    max_seqs: int = 4,
    chunk: int = 64,
    step_s: float = 0.0,
    fail: str = "",
) -> tuple[FakeEngine, EngineInfo]:
    """Runs in the engine process."""
    report("reading weights", 1, 2)
    if fail == "model":
        raise ModelCorrupt("model.gguf ends after 12 of 100 bytes; fetch it again")
    if fail == "bug":
        raise ZeroDivisionError("a bug of ours")
    if fail == "exit":
        os._exit(7)
    if fail == "hang":
        time.sleep(60)
    report("reading weights", 2, 2)
    engine = FakeEngine(blocks=blocks, max_seqs=max_seqs, chunk=chunk, step_s=step_s)
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab=VOCAB,
        kv_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        max_num_batched_tokens=chunk,
        max_num_seqs=max_seqs,
    )
    return engine, info


def factory(**options: object) -> functools.partial[tuple[FakeEngine, EngineInfo]]:
    """What `EngineService` takes."""
    return functools.partial(build, **options)  # type: ignore[arg-type]
