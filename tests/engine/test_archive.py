"""`Engine` with an archive: what is kept, what is fetched, and that nobody waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.fakes import FakeClock, FakeExecutor, expected_output

from legato.core.budget import StepBudget
from legato.core.request import Finished, Request, StopRule
from legato.core.state import SchedulerState
from legato.engine.loop import Engine
from legato.errors import RequestError

Content = dict[int, tuple[int, int]]


class FakeFetch:
    """Is done when the test says so, or when somebody waits."""

    def __init__(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        self.blocks = blocks
        self.done = False

    def wait(self, timeout_s: float | None = None) -> bool:
        self.done = True
        return True


class FakeArchive:
    """Keeps what a `FakeExecutor` has written, by key. Outlives engines."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Content] = {}
        self.fetches: list[FakeFetch] = []
        self.executor = FakeExecutor(4)
        self.closed = False

    def __contains__(self, key: object) -> bool:
        return key in self.kept

    def fetch(self, keys: Sequence[bytes]) -> FakeFetch:
        found = []
        for key in keys:
            if key not in self.kept:
                break
            found.append((key, key))
        self.fetches.append(FakeFetch(found))
        return self.fetches[-1]

    def load(self, slot: int, content: bytes) -> None:
        self.executor.host[slot] = dict(self.kept[content])

    def save(self, key: bytes, block: int) -> None:
        self.kept[key] = dict(self.executor.kv[block])

    def close(self) -> None:
        self.closed = True


def engine_of(archive: FakeArchive, *, host_blocks: int = 8, blocks: int = 32) -> Engine:
    archive.executor = FakeExecutor(4)
    state = SchedulerState(blocks, 4, 1000, host_blocks=host_blocks)
    return Engine(state, archive.executor, StepBudget(16, 4), FakeClock(), archive)


def request(request_id: int, tokens: int = 21, max_tokens: int = 2) -> Request:
    return Request(request_id, tuple(position * 7 % 97 for position in range(tokens)), stop=StopRule(max_tokens))


def drain(engine: Engine) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    outputs: dict[int, list[int]] = {}
    ends: dict[int, Finished] = {}
    while engine.has_work:
        events = engine.step()
        engine.state.check()
        for request_id, token in zip(events.request_ids, events.token_ids, strict=True):
            outputs.setdefault(request_id, []).append(token)
        ends |= {end.request_id: end for end in events.finished}
    return outputs, ends


def test_a_prefix_survives_a_restart() -> None:
    archive = FakeArchive()
    for cached in (0, 20):
        engine = engine_of(archive)
        engine.submit(request(1))
        outputs, ends = drain(engine)
        assert outputs[1] == expected_output(request(1).prompt, 2)
        assert ends[1].cached_tokens == cached
    assert archive.executor.rows == 1 + 1


def test_others_go_on_while_a_prefix_is_fetched() -> None:
    archive = FakeArchive()
    engine = engine_of(archive)
    engine.submit(request(1))
    drain(engine)
    engine = engine_of(archive)
    engine.submit(request(1))
    engine.submit(Request(2, (5, 6, 7), stop=StopRule(3)))
    for _ in range(3):
        assert engine.step().request_ids == (2,)
    assert not archive.fetches[-1].done
    outputs, _ = drain(engine)
    assert outputs[1] == expected_output(request(1).prompt, 2)


def test_a_request_can_leave_while_its_prefix_is_fetched() -> None:
    archive = FakeArchive()
    engine = engine_of(archive)
    engine.submit(request(1))
    drain(engine)
    engine = engine_of(archive)
    engine.submit(request(1))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request(1))
    engine.abort(1)
    _, ends = drain(engine)
    assert (ends[1].reason, ends[1].prompt_tokens, ends[1].generated_tokens) == ("abort", 21, 0)
    assert not engine.has_work


def test_with_little_host_memory_the_head_of_a_prefix_is_kept_and_the_rest_computed() -> None:
    archive = FakeArchive()
    engine = engine_of(archive)
    engine.submit(request(1))
    drain(engine)
    engine = engine_of(archive, host_blocks=2)
    engine.submit(request(1))
    outputs, ends = drain(engine)
    assert outputs[1] == expected_output(request(1).prompt, 2)
    assert ends[1].cached_tokens == 8


def test_closing_the_engine_closes_the_archive() -> None:
    archive = FakeArchive()
    engine_of(archive).close()
    assert archive.closed
