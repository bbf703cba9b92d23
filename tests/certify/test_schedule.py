from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from certify.rigs import limits_of
from legato.certify.documents import document_tokens
from legato.certify.draw import Limits, random_schedule
from legato.certify.rig import RigShape
from legato.certify.schedule import Arrival, Schedule
from legato.certify.shrink import shrink, simpler
from legato.certify.trial import require_fit
from legato.errors import ConfigError

SHAPE = RigShape(
    vocab=50_000,
    first_token=2,
    block_tokens=32,
    max_model_len=1472,
    max_rows=640,
    max_seqs=8,
    pool_blocks=46,
    threads=4,
    kv_dtypes=("f16", "f32"),
)
LIMITS = Limits.of(SHAPE, step_tokens=512, answer_tokens=8)
TWO = Schedule(
    (Arrival(1, 9, max_tokens=4), Arrival(2, 5, follows=0, after=0)), step_tokens=8, max_seqs=2, pool_blocks=9
)


def drawn(count: int, limits: Limits = LIMITS) -> list[Schedule]:
    return [random_schedule(random.Random(f"draw {number}"), limits) for number in range(count)]


def test_a_schedule_survives_json() -> None:
    for schedule in drawn(200):
        data = schedule.to_dict()
        assert json.loads(json.dumps(data)) == data
        assert Schedule.from_dict(data) == schedule


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arrivals": []}, "no list of arrivals"),
        ({"chunk": 3}, "has a field 'chunk'"),
        ({"threads": 0}, "threads >= 1"),
        ({"threads": "two"}, "threads of the schedule is 'two'; it must be int"),
        ({"cache": 1}, "cache of the schedule is 1; it must be bool"),
        ({"kv_dtype": "f8"}, "kv_dtype of the schedule is 'f8'"),
        ({"preempt": [[1]]}, "no list of"),
        ({"arrivals": [{"document": 0}]}, "arrival 0 has no field 'length'"),
        ({"arrivals": [{"document": 0, "length": 2, "after": 0}]}, "after of arrival 0 is 0, which is no earlier one"),
        ({"arrivals": [7]}, "arrival 0 is int"),
    ],
)
def test_a_file_that_was_edited_wrongly_is_told_what_is_wrong(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule.from_dict({**TWO.to_dict(), **change})


@pytest.mark.parametrize("step_tokens", [1, 2, 64, 512])
def test_every_schedule_drawn_fits_the_rig(step_tokens: int) -> None:
    for schedule in drawn(300, Limits.of(SHAPE, step_tokens=step_tokens, answer_tokens=8)):
        require_fit(schedule, SHAPE)
        assert schedule.step_tokens <= step_tokens


@pytest.mark.parametrize("context", [2, 3, 20, 100])
def test_every_schedule_drawn_fits_a_short_context(context: int) -> None:
    shape = replace(SHAPE, max_model_len=context)
    for schedule in drawn(300, limits_of(shape, 512, 100)):
        require_fit(schedule, shape)


def test_schedules_favour_the_edges_of_chunks_blocks_and_tiles() -> None:
    seen: Counter[str] = Counter()
    for schedule in drawn(400):
        chunk = schedule.step_tokens
        for index, arrival in enumerate(schedule.arrivals):
            length = schedule.prompt_tokens(index)
            for name, unit in (("chunk", chunk), ("block", 32), ("tile", 64)):
                for off in (-1, 0, 1):
                    seen[f"{name}{off:+}"] += (length - off) % unit == 0 and length > unit
            seen["repeats"] += any(
                (other.document, other.length) == (arrival.document, arrival.length)
                for other in schedule.arrivals[:index]
            )
            for name in ("follows", "after", "head", "tail", "abort_steps", "salt", "priority", "temperature"):
                seen[name] += bool(getattr(arrival, name))
        seen["chunk of 1"] += chunk == 1
        seen["largest chunk"] += chunk == 512
        for name in ("host_blocks", "ahead", "preempt"):
            seen[name] += bool(getattr(schedule, name))
        seen["no cache"] += not schedule.cache
        seen[schedule.kv_dtype] += 1
        seen[schedule.policy] += 1
        seen[f"threads {schedule.threads}"] += 1
    rare = {name: count for name, count in seen.items() if count < 8}
    assert not rare, rare
    assert len(seen) >= 30


def test_documents_of_one_number_begin_alike_and_variants_differ_in_one_token() -> None:
    def tokens(length: int, head: int = 0, tail: int = 0, document: int = 3) -> tuple[int, ...]:
        return document_tokens(document, length, vocab=1000, first_token=7, head=head, tail=tail)

    whole = tokens(50)
    assert whole[:20] == tokens(20)
    assert whole[0] == 7
    assert whole != tokens(50, document=4)
    assert [i for i in range(50) if whole[i] != tokens(50, head=1)[i]] == [1]
    assert [i for i in range(50) if whole[i] != tokens(50, tail=2)[i]] == [49]
    assert all(0 <= token < 1000 for token in whole)
    assert document_tokens(0, 1, vocab=2, first_token=None) != document_tokens(0, 1, vocab=2, first_token=None, tail=1)


def test_shrinking_finds_the_one_request_that_matters() -> None:
    """The fault: a prompt of document 2 with more than 32 tokens, and a chunk that is smaller than it."""

    def fails(schedule: Schedule) -> bool:
        return any(a.document == 2 and a.length > max(32, schedule.step_tokens) for a in schedule.arrivals)

    start = next(schedule for schedule in drawn(2000) if fails(schedule) and len(schedule.arrivals) == 6)
    small, asked = shrink(start, fails, most_blocks=46, block_tokens=32, clock=lambda: 0.0)
    assert small == Schedule(
        (Arrival(2, 33),), step_tokens=1, max_seqs=1, pool_blocks=46, cache=False, kv_dtype=small.kv_dtype
    )
    assert asked < 200


def test_shrinking_ends_after_so_many_runs_or_seconds() -> None:
    asked = shrink(TWO, lambda schedule: False, most_blocks=46, block_tokens=32, clock=lambda: 0.0, runs=3)
    assert asked == (TWO, 3)
    now_s = iter(range(100))
    late = shrink(TWO, lambda schedule: False, most_blocks=46, block_tokens=32, clock=lambda: next(now_s), seconds=2)
    assert late == (TWO, 1)


def test_simpler_schedules_are_valid_and_fit_where_the_first_one_did() -> None:
    for schedule in drawn(60):
        for candidate in simpler(schedule, SHAPE.pool_blocks, 32):
            assert candidate != schedule
            require_fit(candidate, SHAPE)
            assert Schedule.from_dict(json.loads(json.dumps(candidate.to_dict()))) == candidate
