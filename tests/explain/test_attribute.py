"""A cause that was put into a run is the one that is named, with its milliseconds; and parts add up to the gap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explain.rig import MACHINE, Rig, the_gap
from legato.core.shape import StepShape
from legato.explain.parts import split_step
from legato.explain.record import Ended
from legato.explain.sentence import Teller

MS = 0.001


def near(ms: float) -> object:
    return pytest.approx(ms * MS, abs=1e-5)


def test_a_step_that_takes_longer_than_foreseen_is_noise() -> None:
    rig = Rig()
    rig.ask(1)
    rig.ask(2)
    rig.step(4)
    rig.machine.slowdown = 10.0
    rig.step()
    found = rig.explain(0.02)
    assert {(gap.request_id, gap.token, gap.cause) for gap in found.late} == {(1, 5, "noise"), (2, 5, "noise")}
    gap = found.late[0]
    assert (gap.seconds, gap.parts["decodes"], gap.parts["sampling"]) == (near(60), near(5), near(1))
    assert gap.parts["noise"] == near(54)
    assert Teller(found).sentence(gap) == (
        "token 5 of request 1 came after 60.0 ms, 40.0 over the budget:"
        " its step took 54.0 ms longer than foreseen (60.0 for 6.0)"
    )


def test_a_prompt_beside_is_named_with_its_tokens() -> None:
    rig = Rig(itl_s=0.1)
    for request_id in range(1, 5):
        rig.ask(request_id)
    rig.step(3)
    rig.ask(9, 500)
    rig.step(2)
    found = rig.explain(0.03)
    gap = the_gap(found, 2, 5)
    start, rows = found.trace.steps[gap.last].starts[-1], found.trace.steps[gap.last].counts[-1]
    assert gap.cause == "chunks"
    assert gap.parts.chunks == {9: near(rows)}, "a row more is a millisecond more"
    assert (gap.parts["decodes"], gap.parts["sampling"], gap.parts["noise"]) == (near(7), near(2), near(0))
    assert f"ms of it the chunk of request 9 ({rows} tokens from {start})" in Teller(found).sentence(gap)
    assert {gap.cause for gap in found.late} == {"chunks"}


def test_a_step_that_was_planned_to_be_in_time_is_late_by_what_was_not_planned() -> None:
    """Beside a prompt the chunk is the largest part of every gap: it fills the budget. It is not why one is late."""
    rig = Rig(itl_s=0.05)
    rig.ask(1)
    rig.step(3)
    rig.ask(9, 500)
    rig.step(2)
    rig.machine.slowdown = 1.3
    rig.step()
    (gap,) = rig.explain(0.0505).late
    assert gap.parts["chunks"] > 2 * gap.parts["noise"] > 0.02
    assert gap.cause == "noise"


def test_two_prompts_share_a_step_by_what_each_adds() -> None:
    rig = Rig(itl_s=None, max_tokens=64)
    rig.ask(1)
    rig.step()
    rig.ask(2, 20)
    rig.ask(3, 30)
    rig.step()
    split = split_step(rig.explain().trace, 1)
    seconds = dict(split.chunks)
    assert seconds[3] == pytest.approx(1.5 * seconds[2])
    assert split.foreseen + split.planning + split.noise == pytest.approx(rig.explain().trace.steps[1].step_s, abs=1e-6)


def test_a_stream_that_lost_its_kv_is_told_so() -> None:
    rig = Rig(blocks=9)
    rig.ask(1, 50, 70)
    rig.ask(2, 50, 60)
    rig.finish()
    assert rig.engine.state.preemptions == 1
    found = rig.explain(0.1)
    (gap,) = found.late
    assert gap.cause == "preemption"
    assert gap.parts.total == pytest.approx(gap.seconds, rel=1e-6)
    assert gap.parts["preemption"] > 0.9 * gap.seconds
    assert found.trace.steps[gap.first].preempt == [gap.request_id]


def test_time_between_two_steps_is_named() -> None:
    rig = Rig()
    rig.ask(1)
    rig.step(2)
    rig.pass_s(1.0)
    rig.step()
    gap = rig.explain(0.5).late[0]
    assert (gap.cause, gap.parts["between"]) == ("between", near(1000))


def test_a_server_that_tokenizes_while_a_token_waits_is_told_from_one_that_is_busy_otherwise() -> None:
    rig = Rig()
    rig.ask(1)
    rig.step(2)
    rig.delay_s = 0.1
    rig.step()
    rig.tokenize(7, rig.now_s + 0.01, rig.now_s + 0.09)
    rig.delay_s = 0.0
    rig.pass_s(0.2)
    rig.step()
    rig.delay_s = 0.3
    rig.step()
    found = rig.explain(0.09)
    tokenizing, pause, busy = found.late
    assert (tokenizing.cause, tokenizing.parts["tokenizer"]) == ("tokenizer", near(80))
    assert tokenizing.parts["delivery"] == near(20)
    assert "the server turning the text of request 7 into tokens" in Teller(found).sentence(tokenizing)
    assert pause.cause == "between"
    assert pause.parts["between"] == near(100), "the client waits only since the token before was handed on"
    assert (busy.cause, busy.parts["delivery"]) == ("delivery", near(300))


def test_decodes_that_alone_take_too_long_are_named() -> None:
    rig = Rig()
    for request_id in range(20):
        rig.ask(request_id, 2)
    rig.step(8)
    found = rig.explain(0.02)
    assert {gap.cause for gap in found.late if gap.token == 7} == {"decodes"}
    assert "one token for each of 20 streams" in Teller(found).sentence(the_gap(found, 3, 7))


def test_a_first_token_waits_for_its_text_for_others_and_for_its_own_prompt() -> None:
    rig = Rig(itl_s=None, max_tokens=100)
    rig.ask(1)
    began_s = rig.now_s
    rig.step(2)
    rig.pass_s(0.01)
    asked_s = rig.now_s
    rig.ask(2, 150, 5, tokenized_s=(asked_s - 0.01, asked_s - 0.002))
    rig.finish()
    found = rig.explain()
    first = found.firsts[2]
    assert (first.token, first.begins_s) == (1, pytest.approx(asked_s - 0.01))
    assert (first.parts["tokenizer"], first.parts["delivery"]) == (near(8), near(2))
    assert first.parts["own_prompt"] == near(103.5 * 99 / 100 + 56 * 51 / 52), "99 rows beside a decode, then 51"
    assert first.parts.total == pytest.approx(first.seconds, rel=1e-6)
    assert "its own prompt (150 tokens in 2 steps)" in Teller(found).sentence(first)
    assert (found.firsts[1].begins_s, found.firsts[1].cause) == (began_s, "own_prompt")


def test_waiting_behind_a_prompt_is_queueing_and_says_behind_whom() -> None:
    rig = Rig(itl_s=None, max_tokens=100, blocks=22)
    rig.ask(1, 300, 4)
    rig.step()
    rig.ask(2, 200, 5)
    rig.finish()
    found = rig.explain()
    first = found.firsts[2]
    assert (first.cause, set(first.parts.behind)) == ("queueing", {1})
    assert "waiting for its turn, behind the prompt of request 1" in Teller(found).sentence(first)


def test_without_a_cost_time_is_shared_out_by_rows_and_there_is_no_noise() -> None:
    rig = Rig(itl_s=None, max_tokens=52)
    for request_id in (1, 2):
        rig.ask(request_id)
    rig.step(2)
    rig.ask(9, 200)
    rig.step()
    found = rig.explain(0.03)
    gap = found.late[0]
    assert gap.cause == "chunks"
    assert gap.parts["chunks"] == pytest.approx(gap.seconds * 50 / 52)
    assert gap.parts["noise"] == 0.0


def test_a_gap_that_a_request_wanted_for_itself_is_its_budget() -> None:
    rig = Rig()
    rig.ask(1, itl_s=0.001)
    rig.ask(2)
    rig.step(3)
    assert {gap.request_id for gap in rig.explain(0.05).late} == {1}


def test_a_token_after_the_end_of_its_request_is_none() -> None:
    rig = Rig()
    rig.ask(1)
    rig.step(3)
    rig.lines.append(Ended(1, "abort", 3, rig.now_s))
    rig.step(2)
    assert len(rig.explain().tokens[1]) == 3


def test_what_is_in_time_needs_no_blame() -> None:
    rig = Rig()
    rig.ask(1)
    rig.step(5)
    found = rig.explain()
    assert not found.late
    assert [gap.cause for gap, _ in found.worst(1)] == ["decodes"]


def test_streams_of_one_step_are_told_once() -> None:
    rig = Rig()
    for request_id in range(3):
        rig.ask(request_id)
    rig.step(3)
    rig.pass_s(1.0)
    rig.step(2)
    ((gap, others),) = rig.explain(0.5).worst(5)
    assert (gap.request_id, others) == (0, 2)


def test_parts_of_a_step_are_those_of_its_prediction() -> None:
    rig = Rig()
    rig.ask(1)
    rig.step(2)
    rig.ask(2, 30)
    rig.step()
    trace = rig.explain().trace
    step, split = trace.steps[2], split_step(trace, 2)
    shape = StepShape(*(step.shape or ()))
    assert step.predicted_s == pytest.approx(MACHINE.predict(shape), abs=1e-7)
    assert split.foreseen == pytest.approx(step.predicted_s)
    assert step.budget_s is not None and step.budget_s == pytest.approx(0.2, abs=1e-6)


_actions = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 300), st.integers(1, 30)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 80), st.just(0)),
        st.tuples(st.just("slow"), st.integers(1, 8), st.just(0)),
        st.tuples(st.just("delay"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("tokenize"), st.integers(-30, 60), st.integers(1, 60)),
        st.tuples(st.just("abort"), st.integers(1, 12), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(actions=_actions, blocks=st.sampled_from([24, 60, 200]), itl_ms=st.sampled_from([None, 20, 100]))
def test_parts_add_up_to_what_was_measured_whatever_happens(
    actions: list[tuple[str, int, int]], blocks: int, itl_ms: int | None
) -> None:
    rig, asked = Rig(None if itl_ms is None else itl_ms * MS, blocks=blocks), 0
    for what, a, b in actions:
        if what == "ask":
            asked += 1
            rig.ask(asked, a, b, tokenized_s=(rig.now_s - a * 1e-5, rig.now_s) if b % 2 else None)
        elif what == "step":
            rig.step(a)
        elif what == "pass":
            rig.pass_s(a * MS)
        elif what == "slow":
            rig.machine.slowdown = a / 2
        elif what == "delay":
            rig.delay_s = a * MS
        elif what == "tokenize":
            rig.tokenize(1000 + len(rig.lines), rig.now_s + a * MS, rig.now_s + (a + b) * MS)
        elif what == "abort" and a in rig.generated:
            rig.abort(a)
    rig.finish()
    found = rig.explain(0.01) if len(rig.lines) > 1 else None
    if found is None or not found.trace.steps:
        return
    assert found.deviation < 1e-6
    for request_id, indices in found.tokens.items():
        gaps = found.of(request_id)
        asked_s = found.trace.requests[request_id].asked_s
        dispatched_s = found.trace.steps[indices[-1]].dispatched_s
        assert [gap.token for gap in gaps] == list(range(1, len(indices) + 1))
        assert sum(gap.parts.total for gap in gaps) == pytest.approx(dispatched_s - asked_s, rel=1e-6)
        for gap in gaps:
            assert sum(gap.parts.chunks.values()) == pytest.approx(gap.parts["chunks"])
            assert all(seconds >= -1e-9 for kind, seconds in gap.parts.seconds.items() if kind != "noise")
    for index, step in enumerate(found.trace.steps):
        split = split_step(found.trace, index)
        assert split.foreseen + split.planning + split.noise == pytest.approx(step.step_s, abs=1e-6)
