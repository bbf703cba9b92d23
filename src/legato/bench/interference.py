"""Streams that decode, and long prompts that arrive whatever became of the ones before: does a stream stall?

An open loop: `streams` clients read, each asking anew at once when its answer ends, and every `every_s` seconds a long
prompt comes. All that is known comes from stamps taken at the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from legato.bench.client import Clock, Reply
from legato.bench.dialect import Answers
from legato.bench.load import Prompts
from legato.bench.record import (
    Gaps,
    Spread,
    chunks_between,
    gaps_of,
    is_decoding_at,
    spread,
    tokens_per_chunk,
)
from legato.errors import RunInvalid
from legato.workload.arrivals import periodic

MIN_LONG = 2
MIN_CHUNKS = 20
FIRST_TOKENS_LIMIT_S = 60.0
# Of the prompt tokens asked for, those a server may count more or fewer (words are calibrated, not counted), and those
# it may find in its prefix cache (what begins every text).
LENGTH_TOLERANCE, CACHED_TOLERANCE = 0.25, 0.1
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """What is sent. `prompt_tokens`: lengths of the long prompts, in turn. `stream_tokens`: of a stream's answer.

    `budget_ms`: a gap longer than this is a stall.
    """

    streams: int = 16
    prompt_tokens: tuple[int, ...] = (4000,)
    every_s: float = 10.0
    duration_s: float = 60.0
    budget_ms: float = 100.0
    warmup_s: float = 5.0
    stream_tokens: int = 512


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One that was sent. `tokens`: as asked for."""

    tokens: int
    reply: Reply

    def span_s(self, cut_s: float) -> tuple[float, float]:
        """From sending to its first token, or to the end of the run."""
        assert self.reply.sent_s is not None
        return self.reply.sent_s, cut_s if self.reply.first_s is None else self.reply.first_s

    @property
    def served_tokens(self) -> int:
        """As the server counts them, if it does."""
        return self.reply.prompt_tokens or self.tokens


@dataclass(frozen=True, slots=True)
class Run:
    """All that was seen. Figures are of `[start_s, stop_s)`; until `cut_s` the streams went on."""

    settings: Settings
    streams: tuple[tuple[Reply, ...], ...]
    long: tuple[LongPrompt, ...]
    start_s: float
    stop_s: float
    cut_s: float

    def gaps(self) -> Gaps:
        """Between tokens of the streams."""
        return gaps_of(
            (reply for stream in self.streams for reply in stream),
            self.start_s,
            self.stop_s,
            self.cut_s,
            self.settings.budget_ms / 1e3,
        )

    def spans_s(self) -> list[tuple[float, float]]:
        """When long prompts were in flight."""
        return [prompt.span_s(self.cut_s) for prompt in self.long]


@dataclass(frozen=True, slots=True)
class Figures:
    """`itl_beside`: gaps while a long prompt was in flight; `itl_apart`: the others. `stalls`: gaps over the budget.

    Rates are of the measured time; `tokens_per_chunk` is what the server counted, None if it counted nothing.
    """

    itl: Spread | None
    itl_beside: Spread | None
    itl_apart: Spread | None
    stalls: int
    late_share: float
    stream_ttft: Spread | None
    long_ttft: dict[int, Spread | None]
    long_ttft_all: Spread | None
    long_sent: int
    long_completed: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    tokens_per_chunk: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; durations in milliseconds."""

        def plain(value: Spread | None) -> dict[str, float] | None:
            return None if value is None else value.to_dict()

        return {
            "itl_ms": plain(self.itl),
            "itl_beside_long_ms": plain(self.itl_beside),
            "itl_apart_ms": plain(self.itl_apart),
            "stalls": self.stalls,
            "late_share": round(self.late_share, 5),
            "stream_ttft_ms": plain(self.stream_ttft),
            "long_ttft_ms": plain(self.long_ttft_all),
            "long_ttft_by_tokens_ms": {str(tokens): plain(value) for tokens, value in self.long_ttft.items()},
            "long_sent": self.long_sent,
            "long_completed": self.long_completed,
            "output_tokens_per_s": round(self.output_tokens_per_s, 1),
            "prompt_tokens_per_s": round(self.prompt_tokens_per_s, 1),
            "tokens_per_chunk": None if self.tokens_per_chunk is None else round(self.tokens_per_chunk, 4),
        }


async def interfere(server: Answers, prompts: Prompts, settings: Settings, clock: Clock) -> Run:
    """Runs it. Takes warm-up and duration, and at most the duration again until the last long prompt is answered.

    Raises RunInvalid if the streams do not even begin.
    """
    streams: list[list[Reply]] = [[] for _ in range(settings.streams)]
    tasks = [asyncio.create_task(_stream(server, prompts, settings, n, replies)) for n, replies in enumerate(streams)]
    long, answers = list[LongPrompt](), list[asyncio.Task[None]]()
    try:
        await _all_begun(streams, clock)
        await asyncio.sleep(settings.warmup_s)
        start_s = clock()
        for number, at_s in enumerate(periodic(settings.every_s, settings.duration_s)):
            prompt = LongPrompt(settings.prompt_tokens[number % len(settings.prompt_tokens)], Reply())
            text = prompts.long(prompt.tokens)
            await asyncio.sleep(start_s + at_s - clock())
            prompt.reply.sent_s = clock()
            long.append(prompt)
            answers.append(asyncio.create_task(server.complete(text, 1, prompt.reply)))
        await asyncio.sleep(start_s + settings.duration_s - clock())
        stop_s = clock()
        await asyncio.wait(answers, timeout=settings.duration_s)
        # The tokens after the last first token tell whether the streams lived on.
        await asyncio.sleep(min(settings.every_s, 5 * settings.budget_ms / 1e3))
        cut_s = clock()
    finally:
        for task in (*tasks, *answers):
            task.cancel()
        await asyncio.gather(*tasks, *answers, return_exceptions=True)
    return Run(settings, tuple(tuple(replies) for replies in streams), tuple(long), start_s, stop_s, cut_s)


def figures(run: Run) -> Figures:
    """What the stamps say. Cost: a few sorts of all tokens."""
    gaps, settings = run.gaps(), run.settings
    beside, apart = gaps.split(run.spans_s())
    replies = [reply for stream in run.streams for reply in stream]
    stalls = gaps.over(settings.budget_ms / 1e3)
    per_chunk = tokens_per_chunk(replies)
    completed = [prompt for prompt in run.long if prompt.reply.ttft_s is not None]
    read = sum(p.served_tokens for p in completed if p.span_s(run.cut_s)[1] < run.stop_s)
    measured_s = run.stop_s - run.start_s
    return Figures(
        itl=spread(gaps.length_s),
        itl_beside=spread(beside),
        itl_apart=spread(apart),
        stalls=stalls,
        late_share=stalls / max(1, len(gaps.length_s)),
        stream_ttft=spread(_ttfts(r for r in replies if r.sent_s is not None and run.start_s <= r.sent_s < run.stop_s)),
        long_ttft={
            tokens: spread(_ttfts(p.reply for p in completed if p.tokens == tokens))
            for tokens in dict.fromkeys(settings.prompt_tokens)
        },
        long_ttft_all=spread(_ttfts(p.reply for p in completed)),
        long_sent=len(run.long),
        long_completed=len(completed),
        output_tokens_per_s=chunks_between(replies, run.start_s, run.stop_s) * (per_chunk or 1.0) / measured_s,
        prompt_tokens_per_s=read / measured_s,
        tokens_per_chunk=per_chunk,
    )


def faults(run: Run) -> list[str]:
    """Why the run does not show what it is meant to show, and what to change. Empty if it does."""
    return [*_failed(run), *(_too_few(run) or _apart(run)), *_shorter(run)]


async def _stream(server: Answers, prompts: Prompts, settings: Settings, number: int, replies: list[Reply]) -> None:
    """Reads one answer after the other. The first ones differ in length, so that not all ask anew at one moment."""
    max_tokens = max(1, settings.stream_tokens * (number + 1) // settings.streams)
    while not replies or replies[-1].error is None:
        replies.append(Reply())
        await server.complete(prompts.short(), max_tokens, replies[-1])
        max_tokens = settings.stream_tokens


async def _all_begun(streams: Sequence[Sequence[Reply]], clock: Clock) -> None:
    """Waits until every stream has had a token."""
    limit_s = clock() + FIRST_TOKENS_LIMIT_S
    while True:
        begun = sum(any(reply.arrivals_s for reply in stream) for stream in streams)
        errors = [reply.error for stream in streams for reply in stream if reply.error]
        if errors:
            raise RunInvalid([f"a stream failed before the measurement began: {errors[0]}"])
        if begun == len(streams):
            return
        if clock() > limit_s:
            raise RunInvalid(
                [
                    f"{begun} of {len(streams)} streams had a token within {FIRST_TOKENS_LIMIT_S:.0f} s: the server"
                    f" may run fewer sequences at once; lower --streams or raise the server's limit"
                ]
            )
        await asyncio.sleep(_POLL_S)


def _failed(run: Run) -> list[str]:
    replies = [reply for stream in run.streams for reply in stream] + [prompt.reply for prompt in run.long]
    errors = [reply.error for reply in replies if reply.error is not None]
    if not errors:
        return []
    return [f"{len(errors)} of {len(replies)} requests failed, one with '{errors[0]}'; see the server's log"]


def _too_few(run: Run) -> list[str]:
    found = []
    completed = sum(prompt.reply.first_s is not None for prompt in run.long)
    if completed < MIN_LONG:
        found.append(
            f"{completed} of {len(run.long)} long prompts got a first token, and {MIN_LONG} are needed;"
            f" raise --duration, or lower --prompt-tokens"
        )
    counts = [chunks_between(stream, run.start_s, run.cut_s) for stream in run.streams]
    few = [count for count in counts if count < MIN_CHUNKS]
    if few:
        found.append(
            f"{len(few)} of {len(counts)} streams got fewer than {MIN_CHUNKS} tokens (one {min(few)});"
            f" raise --duration, or lower --streams to what the server runs at once"
        )
    return found


def _apart(run: Run) -> list[str]:
    """Whether streams were in the middle of an answer when a long prompt came, and still when its first token did.

    One that stood still in between was: that is a stall, and is to be reported. One that ended before was not.
    """
    completed = [prompt for prompt in run.long if prompt.reply.first_s is not None]
    mixed = 0
    for prompt in completed:
        beside = [
            sum(any(is_decoding_at(reply, moment_s) for reply in stream) for stream in run.streams)
            for moment_s in prompt.span_s(run.cut_s)
        ]
        mixed += 2 * min(beside) >= len(run.streams)
    if 2 * mixed > len(completed):
        return []
    return [
        f"beside only {mixed} of {len(completed)} long prompts at least half of the streams were decoding, so that no"
        f" step mixed both: the server seems to answer long prompts when no stream is open; allow it more sequences"
        f" at once, and raise --stream-tokens (now {run.settings.stream_tokens}) if streams end too soon"
    ]


def _shorter(run: Run) -> list[str]:
    found: list[str] = []
    for prompt in run.long:
        told, cached = prompt.reply.prompt_tokens, prompt.reply.cached_tokens or 0
        if told is not None and abs(told - prompt.tokens) > LENGTH_TOLERANCE * prompt.tokens and not found:
            found.append(f"a prompt of {prompt.tokens} tokens was counted as {told} by the server; was it truncated?")
        if cached > CACHED_TOLERANCE * prompt.tokens:
            return [*found, f"{cached} of {prompt.tokens} prompt tokens came from the prefix cache; use another --seed"]
    return found


def _ttfts(replies: Iterable[Reply]) -> list[float]:
    return [reply.ttft_s for reply in replies if reply.ttft_s is not None]
