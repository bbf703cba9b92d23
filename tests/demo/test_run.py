"""The three runs on a virtual clock: the gaps are those that arithmetic says."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from tests.fakes import VOCAB

from demo.rig import MACHINE, SETUP, Timed, engine_of, recorded
from legato.demo.figures import figures_of
from legato.demo.run import METHODS, Run, Setup, fitting_setup, record, seconds_of
from legato.errors import ConfigError, EngineError


def test_each_method_gives_the_worst_gap_and_the_wait_that_arithmetic_says() -> None:
    runs = recorded()
    assert [run.method for run in runs] == list(METHODS)
    whole, fixed, paced = map(figures_of, runs)
    # 600 rows and 4 streams in one step: 4 ms and 603 more. The next gap is that of 4 streams alone.
    assert whole.worst_ms == pytest.approx((607.0, 7.0, 7.0))
    assert whole.ttft_s == pytest.approx(0.607)
    # 96 rows a step, six of them and 24 rows: 100 rows take 103 ms.
    assert fixed.worst_ms == pytest.approx((103.0, 103.0, 103.0))
    assert fixed.ttft_s == pytest.approx(6 * 0.103 + 0.031)
    # 30.5 ms: 27 rows, 23 of them of the prompt.
    assert paced.worst_ms == pytest.approx((30.0, 30.0, 30.0))
    assert [run.steps for run in runs] == [1, 7, 27]
    assert all(found.usual_ms == pytest.approx(7.0) for found in (whole, fixed, paced))
    assert fixed.tokens_per_s == pytest.approx(4 * 7 / (6 * 0.103 + 0.031))


def test_the_foresight_that_sizes_the_prompt_agrees_with_what_comes() -> None:
    for run in recorded():
        ttft_s = figures_of(run).ttft_s
        assert ttft_s is not None
        assert seconds_of(run.method, SETUP, MACHINE) == pytest.approx(ttft_s, rel=0.05)


def test_no_run_is_helped_by_what_another_computed() -> None:
    assert [run.cached_tokens for run in recorded()] == [0, 0, 0]


def test_the_streams_decode_before_the_prompt_and_a_while_after_it() -> None:
    for run in recorded():
        assert run.sent_s is not None and run.first_s is not None
        assert 0.1 <= run.sent_s < 0.11
        assert run.first_s + 0.1 <= run.now_s < run.first_s + 0.11
        assert len(run.answers) == 4
        assert all(answer[0] == 0.0 and answer[-1] == run.now_s for answer in run.answers)


def test_a_stream_that_has_its_answer_asks_anew_and_that_wait_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.demo.run.STREAM_TOKENS", 5)
    whole = recorded.__wrapped__()[0]
    assert len(whole.answers) > 8
    assert all(len(answer) <= 5 for answer in whole.answers)
    # Its last token came with the first ones of nobody; the prompts of 32 are read in steps of their own.
    assert figures_of(whole).worst_ms[0] >= 600


def test_what_watching_takes_is_in_no_gap() -> None:
    engine, clock = engine_of()
    runs: list[Run] = []

    def watch(run: Run) -> None:
        clock.now_s += 0.5

    record(engine, SETUP, VOCAB, clock, Random(1), watch, into=runs)
    assert figures_of(runs[0]).worst_ms == pytest.approx((607.0, 7.0, 7.0))


def test_an_interrupt_keeps_what_was_measured() -> None:
    first, second = recorded(steps_left=40)
    assert figures_of(first).worst_ms[0] == pytest.approx(607.0) and first.first_s is not None
    assert second.first_s is None
    assert len(second.answers) == 4


def test_the_engine_is_left_as_it_was_and_idle() -> None:
    engine, clock = engine_of()
    assert engine.pacer is not None
    budget, itl_s = engine.budget, engine.pacer.itl_s
    record(engine, SETUP, VOCAB, clock, Random(1), lambda run: None, into=[])
    assert (engine.budget, engine.pacer.itl_s) == (budget, itl_s)
    assert not engine.has_work
    engine.state.check()
    assert engine.state.free_blocks == engine.state.total_blocks


def test_a_step_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clock = engine_of()
    monkeypatch.setattr(Timed, "execute", lambda self, plan: 1 / 0)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        record(engine, SETUP, VOCAB, clock, Random(1), lambda run: None, into=[])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"streams": 0}, "streams is 0"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"step_tokens": 4}, "none left for a prompt beside 4 streams"),
    ],
)
def test_a_setup_that_shows_nothing_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(SETUP, **change)


def test_a_prompt_that_no_step_holds_is_refused() -> None:
    engine, clock = engine_of(most_tokens=603)
    with pytest.raises(ConfigError, match="600 tokens beside 4 streams does not fit a step of 603"):
        record(engine, SETUP, VOCAB, clock, Random(1), lambda run: None, into=[])


def test_the_prompt_is_as_long_as_the_time_allows() -> None:
    # A row takes a millisecond: 2 s of one pass are 1,900 tokens and some.
    found = fitting_setup(SETUP, MACHINE, most_tokens=8000, one_pass_s=2.0, all_s=99.0)
    assert (found.prompt_tokens, found.step_tokens) == (1900, 100)
    assert fitting_setup(SETUP, MACHINE, most_tokens=8000, one_pass_s=99.0, all_s=3.0).prompt_tokens < 1000
    assert fitting_setup(SETUP, MACHINE, most_tokens=1200, one_pass_s=99.0, all_s=99.0).prompt_tokens == 1200
    assert fitting_setup(SETUP, MACHINE, most_tokens=70, one_pass_s=99.0, all_s=99.0).prompt_tokens == 70
    assert fitting_setup(SETUP, MACHINE, most_tokens=8000, one_pass_s=0.0, all_s=0.0).prompt_tokens == 100


def test_the_fixed_budget_is_a_part_of_a_short_prompt() -> None:
    wide = Setup(streams=4, prompt_tokens=1, step_tokens=512, itl_ms=30.0)
    assert fitting_setup(wide, MACHINE, most_tokens=400, one_pass_s=9.0, all_s=99.0).step_tokens == 100
