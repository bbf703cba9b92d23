"""`plan_step`: what goes into a step, in which order, and what it costs in tokens and blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.budget import StepBudget
from legato.core.plan import StepPlan
from legato.core.policy import FCFS, SLO, Policy
from legato.core.prefix import NOTHING, Prefix
from legato.core.schedule import plan_step
from legato.core.tenants import Price, Tenant
from legato.errors import ConfigError


@dataclass
class At:
    """A request somewhere on its way."""

    request_id: int
    known: int
    scheduled: int = 0
    covered: int = 0
    scored: int = 0
    score_stop: int = 0
    in_flight: int = 0
    priority: int = 0
    preemptions: int = 0
    overtaken: int = 0
    arrival_s: float = 0.0
    last_token_s: float = 0.0
    itl_s: float | None = None
    due_s: float = math.inf
    tenant: Tenant = field(default_factory=lambda: Tenant("", 1.0, Price()))
    prefix: Prefix = NOTHING

    @property
    def rank(self) -> int:
        return self.request_id


@dataclass
class View:
    """A scheduler state written by hand."""

    running: list[At] = field(default_factory=list)
    waiting: list[At] = field(default_factory=list)
    free_blocks: int = 100
    returning_blocks: int = 0
    block_tokens: int = 16
    next_step: int = 7

    def prefix(self, request_id: int) -> Prefix:
        return next(r.prefix for r in self.waiting if r.request_id == request_id)

    def freed_blocks(self, request_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
        at_once = in_all = 0
        requests = {r.request_id: r for r in self.running}
        for request_id in request_ids:
            blocks = requests[request_id].covered // self.block_tokens
            in_all += blocks
            at_once += blocks if not requests[request_id].in_flight else 0
            yield at_once, in_all


def plan(view: View, max_tokens: int = 512, max_seqs: int = 8, logit_rows: int = 64, policy: Policy = FCFS) -> StepPlan:
    return plan_step(view, StepBudget(max_tokens, max_seqs, logit_rows), policy)


def chunks(step: StepPlan) -> list[tuple[int, int, int]]:
    return list(zip(step.request_ids, step.starts, step.counts, strict=True))


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan(View()) == StepPlan(7, (), (), (), ())


def test_decodes_come_first_then_prefills_in_progress_then_admissions() -> None:
    view = View(
        running=[At(1, 100, 50, 112), At(2, 30, 29, 32), At(3, 40, 39, 48)], waiting=[At(4, 10), At(5, 10), At(6, 10)]
    )
    step = plan(view, max_tokens=70)
    assert chunks(step) == [(2, 29, 1), (3, 39, 1), (1, 50, 50), (4, 0, 10), (5, 0, 8)]
    assert step.samples == (True, True, True, True, False)
    assert (step.decodes, step.admit, step.preempt) == (2, (4, 5), ())


def test_a_prompt_of_8000_takes_fifteen_chunks_of_512_and_one_of_320() -> None:
    request = At(1, 8000, covered=8000)
    counts: list[int] = []
    while request.scheduled < 8000:
        step = plan(View(running=[request]))
        assert step.samples == (request.scheduled + step.counts[0] == 8000,)
        counts += step.counts
        request.scheduled += step.counts[0]
    assert counts == [512] * 15 + [320]


def test_a_prompt_of_1000_in_256s_ends_with_232() -> None:
    request = At(1, 1000, covered=1008)
    counts: list[int] = []
    while request.scheduled < 1000:
        counts += plan(View(running=[request]), max_tokens=256).counts
        request.scheduled += counts[-1]
    assert counts == [256, 256, 256, 232]


def test_one_pending_token_is_a_decode_wherever_it_comes_from() -> None:
    """The last remainder of a long prompt may be one row, as a decode is: both need logits, both go first."""
    step = plan(View(running=[At(1, 500, 100, 512), At(2, 65, 64, 80), At(3, 33, 32, 48)]), max_tokens=8)
    assert chunks(step) == [(2, 64, 1), (3, 32, 1), (1, 100, 6)]
    assert step.decodes == 2


def test_a_request_whose_token_is_in_flight_is_not_planned() -> None:
    step = plan(View(running=[At(1, 20, 20, 32, in_flight=1), At(2, 21, 20, 32, in_flight=1)]))
    assert chunks(step) == [(2, 20, 1)]


def test_every_running_request_decodes_and_one_token_is_left_for_the_prefill() -> None:
    running = [At(i, 10, 9, 16) for i in range(7)] + [At(7, 100, 0, 112)]
    step = plan(View(running=running, waiting=[At(9, 5)]), max_tokens=8, max_seqs=8)
    assert step.counts == (1,) * 8
    assert step.request_ids[-1] == 7


def test_admission_stops_at_max_seqs() -> None:
    step = plan(View(waiting=[At(i, 2) for i in range(20)]), max_seqs=3)
    assert step.admit == (0, 1, 2)


def test_admission_reserves_the_whole_prompt_although_the_step_takes_a_part() -> None:
    """Two prompts of five blocks each in a pool of eight: the second waits, and cannot strand the first."""
    view = View(waiting=[At(1, 80), At(2, 80)], free_blocks=8)
    assert plan(view, max_tokens=100).admit == (1,)


def test_a_small_request_overtakes_a_head_that_does_not_fit_one_a_step() -> None:
    view = View(running=[At(0, 10, 9, 16)], waiting=[At(1, 100), At(2, 90), At(3, 1), At(4, 1)], free_blocks=4)
    step = plan(view)
    assert (step.admit, step.overtaken) == ((3,), (1, 2))


def test_a_head_is_overtaken_a_bounded_number_of_times_and_never_once_it_was_preempted() -> None:
    waiting = [At(1, 100, overtaken=7), At(2, 1)]
    view = View(running=[At(0, 10, 9, 16)], waiting=waiting, free_blocks=4)
    assert plan(view).admit == (2,)
    waiting[0].overtaken = 8
    assert (plan(view).admit, plan(view).overtaken) == ((), ())
    waiting[0].overtaken, waiting[0].preemptions = 0, 1
    assert plan(view).admit == ()


def test_nobody_is_overtaken_when_nobody_behind_fits() -> None:
    view = View(running=[At(0, 10, 9, 16)], waiting=[At(1, 100), At(2, 200)], free_blocks=4)
    assert (plan(view).admit, plan(view).overtaken) == ((), ())


def test_a_cached_beginning_is_neither_computed_nor_paid_for_twice() -> None:
    held = Prefix(blocks=4, idle_blocks=0)
    assert chunks(plan(View(waiting=[At(1, 80, prefix=held)], free_blocks=1))) == [(1, 64, 16)]
    idle = Prefix(blocks=4, idle_blocks=4)
    assert plan(View(waiting=[At(1, 80, prefix=idle)], free_blocks=4)).admit == (), "idle blocks count as free"
    assert chunks(plan(View(waiting=[At(1, 80, prefix=idle)], free_blocks=5))) == [(1, 64, 16)]


def test_blocks_that_are_copied_back_cost_a_row_each_and_are_as_many_as_the_step_has_room_for() -> None:
    stored = Prefix(blocks=1, idle_blocks=0, stored_blocks=3)
    assert chunks(plan(View(waiting=[At(1, 80, prefix=stored)]), max_tokens=12)) == [(1, 64, 9)]
    assert chunks(plan(View(waiting=[At(1, 80, prefix=stored)]), max_tokens=8, max_seqs=1)) == [(1, 64, 5)]
    assert chunks(plan(View(waiting=[At(1, 80, prefix=stored)]), max_tokens=3, max_seqs=1)) == [(1, 48, 1)]


def test_who_needs_a_block_that_somebody_computes_waits_for_it_and_holds_up_nobody() -> None:
    waiting = [At(1, 80, prefix=Prefix(next_key=b"k", maker=9)), At(2, 80)]
    assert plan(View(waiting=waiting)).admit == (2,)
    twins = [At(i, 80, prefix=Prefix(next_key=b"k")) for i in (1, 2)]
    assert plan(View(waiting=[*twins, At(3, 80)])).admit == (1, 3), "of two that enter, one computes"


def test_who_stands_before_the_one_that_computes_his_prefix_does_not_wait_for_it() -> None:
    """A book and a question share their beginning: the book's turn comes later, so waiting for it would be slower."""
    prefix = Prefix(next_key=b"k", maker=1)
    view = View(running=[At(1, 2000, 16, 2000)], waiting=[At(2, 100, prefix=prefix)])
    assert chunks(plan(view, policy=SLO)) == [(2, 0, 100), (1, 16, 412)]
    view = View(running=[At(1, 2000, 1950, 2000)], waiting=[At(2, 100, prefix=prefix)])
    assert chunks(plan(view, policy=SLO)) == [(1, 1950, 50)]


def test_whoever_was_preempted_comes_before_shorter_ones_that_were_not() -> None:
    view = View(waiting=[At(1, 300, preemptions=1), At(2, 10)], running=[At(3, 50, 40, 64)])
    assert plan(view, policy=SLO).request_ids == (1, 2, 3)
    view.free_blocks = 15
    assert plan(view, policy=SLO).admit == (), "nobody enters over his head, however short"


def test_the_least_important_is_preempted_first_and_the_oldest_of_the_most_important_never() -> None:
    running = [At(1, 17, 16, 16, priority=1), At(2, 17, 16, 16), At(3, 17, 16, 16), At(4, 17, 16, 16, priority=1)]
    assert plan(View(running=running, free_blocks=0)).preempt == (4, 1)
    running = [At(1, 17, 16, 16, priority=1), At(2, 17, 16, 16)]
    assert plan(View(running=running, free_blocks=0)).preempt == (1,)


def test_who_was_preempted_before_is_preempted_later() -> None:
    running = [At(1, 17, 16, 16), At(2, 17, 16, 16), At(3, 17, 16, 16, preemptions=1)]
    assert plan(View(running=running, free_blocks=1)).preempt == (2,)
    running = [At(1, 17, 16, 16), At(2, 17, 16, 16, preemptions=2), At(3, 17, 16, 16, preemptions=1)]
    assert plan(View(running=running, free_blocks=0)).preempt == (3, 2), (
        "the oldest goes on whatever others went through"
    )


def test_prefills_in_progress_go_by_priority_first() -> None:
    running = [At(1, 100, 10, 112), At(2, 100, 10, 112, priority=-1)]
    assert chunks(plan(View(running=running), max_tokens=100)) == [(2, 10, 90), (1, 10, 10)]


def test_an_admission_leaves_a_free_block_for_each_request_inside() -> None:
    running = [At(i, 10, 9, 16) for i in range(3)]
    assert plan(View(running=running, waiting=[At(9, 16)], free_blocks=3)).admit == ()
    assert plan(View(running=running, waiting=[At(9, 16)], free_blocks=4)).admit == (9,)


def test_a_request_alone_may_take_the_whole_pool() -> None:
    assert plan(View(waiting=[At(1, 64)], free_blocks=4)).admit == (1,)


def test_the_newest_is_preempted_when_a_decode_finds_no_block() -> None:
    running = [At(1, 33, 32, 32), At(2, 20, 19, 32), At(3, 100, 40, 112)]
    step = plan(View(running=running, waiting=[At(4, 3)], free_blocks=0))
    assert step.preempt == (3,)
    assert chunks(step) == [(1, 32, 1), (2, 19, 1)]
    assert step.admit == (), "who was preempted stands before who has not run"


def test_a_victim_that_needs_a_block_itself_counts_twice() -> None:
    running = [At(1, 17, 16, 16), At(2, 17, 16, 16), At(3, 17, 16, 16)]
    step = plan(View(running=running, free_blocks=1))
    assert step.preempt == (3,)
    assert step.request_ids == (1, 2)


def test_victims_are_named_newest_first() -> None:
    running = [At(1, 65, 64, 64), At(2, 65, 64, 64), At(3, 65, 64, 64), At(4, 5, 1, 16), At(5, 5, 1, 16)]
    assert plan(View(running=running, free_blocks=0)).preempt == (5, 4, 3)


def test_a_last_remainder_of_one_row_uses_its_reservation_and_preempts_nobody() -> None:
    running = [At(1, 10, 5, 16), At(2, 33, 32, 48)]
    step = plan(View(running=running, free_blocks=0))
    assert step.preempt == ()
    assert step.request_ids == (2, 1)


def test_ahead_of_a_commit_a_decode_waits_for_blocks_that_return_instead_of_preempting() -> None:
    running = [At(1, 17, 16, 16, in_flight=1), At(2, 17, 16, 16, in_flight=1)]
    step = plan(View(running=running, free_blocks=1, returning_blocks=2))
    assert step.preempt == ()
    assert chunks(step) == [(1, 16, 1)]


def test_blocks_that_return_spare_a_victim() -> None:
    running = [At(i, 17, 16, 16, in_flight=1) for i in range(5)]
    assert plan(View(running=running, free_blocks=2, returning_blocks=3)).preempt == ()
    assert plan(View(running=running, free_blocks=2, returning_blocks=1)).preempt == (4,)
    assert plan(View(running=running, free_blocks=2, returning_blocks=0)).preempt == (4, 3)


def test_blocks_of_a_victim_in_flight_are_not_given_out_at_once() -> None:
    running = [At(1, 17, 16, 16, in_flight=1), At(2, 20, 19, 32, in_flight=1)]
    step = plan(View(running=running, free_blocks=0))
    assert step.preempt == (2,)
    assert step.request_ids == ()


def test_a_budget_lowered_under_what_runs_is_an_error_with_both_numbers() -> None:
    view = View(running=[At(i, 10, 9, 16) for i in range(5)])
    with pytest.raises(ConfigError, match="5 requests are running and a step has 4 tokens"):
        plan(view, max_tokens=4, max_seqs=4)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any state that could be: blocks add up, the prompt of a prefill is covered, nothing is in flight."""
    block_tokens = draw(st.integers(1, 8))
    running = []
    for request_id in range(draw(st.integers(0, 8))):
        known = draw(st.integers(1, 40))
        scheduled = draw(st.one_of(st.just(known - 1), st.integers(0, known - 1)))
        whole = known if known - scheduled > 1 else draw(st.sampled_from([known, scheduled]))
        running.append(At(request_id, known, scheduled, -(-whole // block_tokens) * block_tokens))
        if draw(st.booleans()):
            running[-1].score_stop = draw(st.integers(0, known - 1))
            running[-1].scored = draw(st.integers(min(scheduled, known - 1), known - 1))
    # A decode alone always fits: the pool has at least one block beyond what the oldest holds.
    spare = 1 if running and len(running) == 1 else 0
    waiting = [At(100 + i, draw(st.integers(1, 40))) for i in range(draw(st.integers(0, 5)))]
    for request in waiting:
        request.score_stop = draw(st.sampled_from([0, request.known - 1]))
        request.scored = draw(st.integers(0, request.known - 1))
    return View(running, waiting, draw(st.integers(spare, 12)), block_tokens=block_tokens)


@settings(deadline=None, max_examples=300)  # busy machines miss deadlines
@given(views(), st.integers(8, 40), st.integers(1, 8), st.integers(1, 50))
def test_any_plan_keeps_the_budget_the_blocks_and_the_decodes(
    view: View, max_tokens: int, max_seqs: int, logit_rows: int
) -> None:
    step = plan(view, max_tokens, max_seqs, logit_rows)
    assert step == plan(view, max_tokens, max_seqs, logit_rows), "equal views give equal plans"
    at = {r.request_id: r for r in [*view.running, *view.waiting]}
    decodes = {r.request_id for r in view.running if r.known - r.scheduled == 1}
    assert step.rows <= max_tokens
    assert decodes <= set(step.request_ids) | set(step.preempt)
    assert not view.running or view.running[0].request_id in step.request_ids or step.preempt
    taken = sum(at[i].scheduled >= at[i].covered for i in step.request_ids[: step.decodes])
    taken += sum(-(-at[i].known // view.block_tokens) for i in step.admit)
    assert taken <= view.free_blocks + sum(at[i].covered // view.block_tokens for i in step.preempt)
    scored = sum(stop - start for _, start, stop in step.scores)
    assert scored <= logit_rows
    before = {r.request_id for r in view.waiting if not step.admit or r.request_id < step.admit[-1]}
    if scored == logit_rows:
        before -= {r.request_id for r in view.waiting if r.scored < r.score_stop and r.request_id not in step.admit}
    assert before - set(step.overtaken) == set(step.admit[:-1]) or not step.admit, "first come, unless he does not fit"
    for request_id, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
        r, stop = at[request_id], start + count
        wanted = [(r.scored, min(stop, r.score_stop))] if r.scored < min(stop, r.score_stop) else []
        assert [scores[1:] for scores in step.scores if scores[0] == request_id] == wanted, "a row is not scored"
    assert list(step.preempt) == [r.request_id for r in reversed(view.running)][: len(step.preempt)]
