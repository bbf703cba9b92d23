"""Streams beside long prompts, in virtual time: a decode step takes 50 ms, one with a chunk of a prompt 80 ms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from bench.virtual import SteppingServer, run_virtual
from legato.bench.interference import Run, Settings, faults, figures, interfere
from legato.bench.load import Prompts
from legato.errors import RunInvalid

SETTINGS = Settings(
    streams=4,
    prompt_tokens=(4000,),
    every_s=2.0,
    duration_s=10.0,
    budget_ms=100.0,
    warmup_s=1.0,
    stream_tokens=400,
)


def measured(settings: Settings = SETTINGS, **server: Any) -> Run:
    async def main(clock: Callable[[], float]) -> Run:
        made = SteppingServer(clock, **server)
        stepping = asyncio.create_task(made.run())
        try:
            return await interfere(made, Prompts(Random(1), range(300, 400)), settings, clock)
        finally:
            stepping.cancel()

    return run_virtual(main)


def test_in_chunks_no_token_is_late_and_all_figures_are_those_of_the_steps() -> None:
    """4,000 tokens are 8 chunks of 80 ms; five prompts in 10 s; the rest of the time is decode steps of 50 ms."""
    run = measured()
    assert faults(run) == []
    found = figures(run)
    assert found.itl and found.itl_beside and found.itl_apart and found.long_ttft_all
    assert (found.itl.p50_ms, found.itl.max_ms) == pytest.approx((50, 80))
    assert found.itl_apart.max_ms == pytest.approx(50)
    assert found.stalls == 0 and found.late_share == 0
    # It may come in the middle of a step, and then waits for it to end.
    assert 640 <= found.long_ttft_all.p50_ms <= 690 + 1e-6
    assert (found.long_sent, found.long_completed) == (5, 5)
    # 5 x 8 steps of 80 ms are 3.2 s; the 6.8 s left are 136 steps: 176 steps of 4 tokens in 10 s, but for the edges.
    assert found.output_tokens_per_s == pytest.approx(4 * 176 / 10, rel=0.03)
    assert found.prompt_tokens_per_s == 2000
    assert found.tokens_per_chunk == 1


def test_in_one_piece_every_stream_stalls_once_a_prompt() -> None:
    run = measured(chunk=None)
    assert faults(run) == []
    found = figures(run)
    assert found.itl and found.itl_apart
    assert found.itl.max_ms == pytest.approx(640)
    assert found.stalls == 4 * 5
    assert found.late_share == pytest.approx(20 / found.itl.count)
    assert found.itl_apart.max_ms == pytest.approx(50)


def test_lengths_take_turns() -> None:
    run = measured(Settings(**{**_plain(SETTINGS), "prompt_tokens": (1000, 4000)}))
    found = figures(run)
    short, long = found.long_ttft[1000], found.long_ttft[4000]
    assert short and long and (short.count, long.count) == (3, 2)
    assert short.max_ms <= 210 + 1e-6 < 640 <= long.p50_ms


def test_streams_ask_anew_at_different_times_and_their_wait_is_no_gap() -> None:
    run = measured(Settings(**{**_plain(SETTINGS), "stream_tokens": 40}))
    assert faults(run) == []
    found = figures(run)
    assert found.stream_ttft and found.stream_ttft.count >= 12
    assert found.itl and found.itl.max_ms == pytest.approx(80)


def test_several_tokens_in_a_chunk_are_counted_by_the_server() -> None:
    run = measured(Settings(**{**_plain(SETTINGS), "stream_tokens": 80}), tokens_per_chunk=2)
    found = figures(run)
    assert found.tokens_per_chunk == 2
    assert found.output_tokens_per_s == pytest.approx(2 * 4 * 176 / 10, rel=0.05)


def test_a_stall_that_lasts_until_the_end_is_not_missed() -> None:
    """The last prompt comes at 8 s and takes 16 s in one step: the run is over before the streams go on."""
    run = measured(Settings(**{**_plain(SETTINGS), "every_s": 4.0, "prompt_tokens": (500, 500, 100_000)}), chunk=None)
    found = figures(run)
    assert found.itl and found.itl.max_ms > 9_000
    assert found.stalls == 4


def test_streams_are_heard_out_after_the_last_first_token() -> None:
    """The last of two prompts is answered when the measurement is over; that the streams outlive it is still seen."""
    run = measured(
        Settings(**{**_plain(SETTINGS), "every_s": 6.0, "duration_s": 8.0, "prompt_tokens": (20_000,)}), chunk=None
    )
    assert run.long[1].span_s(run.cut_s)[1] > run.stop_s
    assert faults(run) == []


def test_a_run_is_refused_if_long_prompts_wait_until_no_stream_is_open() -> None:
    """What a batching front end does that does not mix: the streams run out, the prompt is read, the streams begin."""
    reasons = faults(measured(Settings(**{**_plain(SETTINGS), "stream_tokens": 12}), exclusive=True))
    assert len(reasons) == 1 and "no step mixed both" in reasons[0]


def test_a_run_is_refused_if_requests_failed() -> None:
    reasons = faults(measured(fails_after_s=5.0))
    assert "requests failed" in reasons[0] and "out of luck" in reasons[0]


def test_a_run_is_refused_if_it_was_over_before_two_long_prompts_were_answered() -> None:
    reasons = faults(measured(Settings(**{**_plain(SETTINGS), "prompt_tokens": (100_000,)})))
    assert "1 of 5 long prompts got a first token" in reasons[0]


def test_a_run_is_refused_if_streams_got_a_few_tokens_only() -> None:
    reasons = faults(measured(decode_s=1.5, chunk_s=1.5))
    assert any("got fewer than 20 tokens" in reason for reason in reasons)


def test_a_run_is_refused_if_prompts_came_from_a_cache() -> None:
    assert "prefix cache" in faults(measured(cached=3000))[0]


def test_a_run_that_does_not_begin_says_how_many_streams_the_server_ran() -> None:
    with pytest.raises(RunInvalid, match="2 of 4 streams had a token within 60 s"):
        measured(Settings(**{**_plain(SETTINGS), "stream_tokens": 40_000}), max_open=2)
    with pytest.raises(RunInvalid, match="out of luck"):
        measured(fails_after_s=-1.0)


def _plain(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.__slots__}
