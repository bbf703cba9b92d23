"""The prefix cache, with the fake executor: what is shared, what is computed, and that no stale block is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.drive import Driver, prompt_of, request_of

from legato.core.blocks import BlockPool, Name
from legato.core.policy import FCFS
from legato.core.prefix import block_key, leading, root_key
from legato.core.request import Request, StopRule


def rows_of(driver: Driver) -> int:
    """Rows computed since the last call."""
    before = getattr(driver, "rows_before", 0)
    driver.rows_before = driver.executor.rows  # type: ignore[attr-defined]
    return driver.executor.rows - before


def test_a_key_depends_on_parent_tokens_model_tenant_and_what_stands_beside_the_tokens() -> None:
    roots = [root_key(b"model", b""), root_key(b"model", b"tenant"), root_key(b"other", b""), root_key(b"mode", b"l")]
    keys = [block_key(root, b"tokens") for root in roots]
    keys += [block_key(roots[0], b"Tokens"), block_key(keys[0], b"tokens")]
    keys += [block_key(roots[0], b"tokens", [(3, b"cat")]), block_key(roots[0], b"tokens", [(3, b"dog")])]
    keys += [block_key(roots[0], b"tokens", [(4, b"cat")]), block_key(roots[0], b"tokens", [(3, b"c"), (4, b"at")])]
    assert len(set(keys)) == len(keys)


def test_leading_finds_the_end_of_a_chain_in_a_few_lookups() -> None:
    pool = BlockPool(300)
    keys = [bytes([i // 256, i % 256]) for i in range(300)]
    for index in range(200):
        pool.publish(pool.take()[0], Name(keys[index], b""))
    assert leading(keys, pool, 300) == 200
    assert leading(keys, pool, 50) == 50
    assert leading(keys[200:], pool, 100) == 0
    assert leading([], pool, 0) == 0


@pytest.mark.parametrize("length", [12, 13, 15, 16])
def test_a_prompt_sent_again_computes_its_last_block_only(length: int) -> None:
    """vllm#53706: L of 3B and 3B + 1, max_tokens 1, sent twice; a fully cached prompt still computes its last token."""
    driver = Driver(blocks=16, block_tokens=4, max_tokens=8)
    driver.submit(request_of(1, length, 1))
    driver.run()
    assert rows_of(driver) == length
    driver.submit(request_of(2, length, 1, salt=2))
    driver.run()
    cached = (length - 1) // 4 * 4
    assert rows_of(driver) == length - cached
    assert driver.finished[2].cached_tokens == cached
    assert driver.outputs[1] == driver.outputs[2]
    driver.submit(request_of(3, length + 2, 1, salt=2))  # a third turn: what it adds is less than a chunk
    driver.run()
    assert rows_of(driver) <= 6


@pytest.mark.parametrize("length", sorted({k * 16 + d for k in (1, 2, 3) for d in (-1, 0, 1)}))
@pytest.mark.parametrize("same", [0, 1, 15, 16, 17, 33])
def test_nothing_wrong_is_left_in_the_cache_at_a_chunk_boundary(length: int, same: int) -> None:
    """sglang#30181: C = 16, L = kC + 1, the last token random; a second request with the same prefix inherited it."""
    driver = Driver(blocks=64, max_tokens=16)
    first = prompt_of(length, 1)
    driver.submit(Request(1, first, stop=StopRule(4)))
    driver.run()
    driver.submit(Request(2, first[:same] + prompt_of(length, 5), stop=StopRule(4)))
    driver.submit(Request(3, (*first[:-1], 96 - first[-1]), stop=StopRule(4)))
    driver.run()


def test_tenants_and_images_share_nothing() -> None:
    driver = Driver(blocks=64)
    prompt = prompt_of(17)
    for request_id, (salt, image) in enumerate(
        [(b"", ()), (b"a", ()), (b"b", ()), (b"", ((2, b"cat"),)), (b"", ((2, b"dog"),)), (b"", ((15, b"cat"),))]
    ):
        driver.submit(Request(request_id, prompt, stop=StopRule(1), cache_salt=salt, attachments=image))
        driver.run()
    assert [driver.finished[i].cached_tokens for i in range(6)] == [0, 0, 0, 0, 0, 12]


def test_without_a_cache_everything_is_computed() -> None:
    driver = Driver(blocks=64, cache=False)
    for request_id in (1, 2):
        driver.submit(request_of(request_id, 17, 1, salt=1))
        driver.run()
    assert driver.executor.rows == 34


def test_a_conversation_goes_on_from_its_own_answer() -> None:
    driver = Driver(blocks=64, block_tokens=4)
    driver.submit(Request(1, prompt_of(9), stop=StopRule(10)))
    driver.run()
    turn = prompt_of(9) + tuple(driver.outputs[1]) + (5, 6, 7)
    driver.submit(Request(2, turn, stop=StopRule(2)))
    driver.run()
    assert driver.finished[2].cached_tokens == 16, "18 positions were computed: four whole blocks"


def test_a_prompt_is_found_while_its_owner_still_runs_and_is_not_copied() -> None:
    driver = Driver(blocks=8, block_tokens=4)
    driver.submit(request_of(1, 14, 8))
    driver.step()
    driver.submit(request_of(2, 14, 8, salt=2))
    driver.step()
    one, two = (driver.state.blocks(i) for i in (1, 2))
    assert list(one[:3]) == list(two[:3])
    assert one[3] != two[3], "a block that is not full belongs to one"
    driver.run()


def test_equal_answers_share_their_blocks_as_they_grow() -> None:
    driver = Driver(blocks=9, block_tokens=4)
    driver.submit(request_of(1, 4, 24), request_of(2, 4, 24, salt=2))
    for _ in range(20):
        driver.step()
    assert list(driver.state.blocks(1)[:5]) == list(driver.state.blocks(2)[:5])
    driver.run()
    assert driver.state.preemptions == 0, "14 blocks of content in a pool of 9"


def test_identical_prompts_in_flight_compute_their_common_prefix_once() -> None:
    driver = Driver(blocks=64, block_tokens=4, max_tokens=16)
    driver.submit(request_of(0, 3, 40))
    driver.submit(*(Request(i, prompt_of(80, 1) + prompt_of(3, i), stop=StopRule(1)) for i in range(1, 9)))
    driver.run()
    assert driver.executor.rows == 3 + 39 + 80 + 8 * 3
    decodes = [plan for plan in driver.plans if 0 in plan.request_ids]
    assert len(decodes) == 40, "a decode waits for nobody"


def test_who_waits_for_a_prefix_goes_on_alone_when_its_maker_leaves() -> None:
    for leave_at in range(1, 7):
        driver = Driver(blocks=64, block_tokens=4, max_tokens=16)
        driver.submit(request_of(1, 80, 1), request_of(2, 83, 3, salt=2))

        def leave(number: int, at: int = leave_at, driver: Driver = driver) -> None:
            if number == at:
                driver.abort(1)

        driver.run(each=leave)
        assert driver.executor.rows <= 80 + 5 + 2, "what the first one has computed is not computed again"
        assert driver.reasons()[2] == "length"


def test_who_waits_for_a_prefix_holds_up_nobody() -> None:
    driver = Driver(blocks=64, block_tokens=4, max_tokens=16)
    driver.submit(request_of(1, 40, 1), request_of(2, 40, 1, salt=2), request_of(3, 3, 1))
    driver.run()
    assert list(driver.finished) == [1, 3, 2]


@pytest.mark.parametrize("chunk", range(11))
def test_a_body_sent_again_goes_on_where_its_client_left(chunk: int) -> None:
    """sglang#34149, ds4#333: L = 640, C = 64; the client leaves after chunk 0 … 10 and sends the same body again."""
    driver = Driver(blocks=45, block_tokens=16, max_tokens=64)
    driver.submit(request_of(1, 640, 3))
    for _ in range(chunk):
        driver.step()
    driver.abort(1)
    assert driver.state.free_blocks == 45, "everything is free at once"
    driver.submit(request_of(2, 640, 3, salt=2))
    driver.run()
    done = min(chunk * 64, 624)
    assert driver.finished[2].cached_tokens == done
    assert driver.executor.rows == min(chunk * 64, 640) + 640 - done + 2 + (chunk == 11)


def test_a_client_that_always_leaves_after_one_chunk_gets_there() -> None:
    driver = Driver(blocks=45, block_tokens=16, max_tokens=64)
    for attempt in range(1, 20):
        driver.submit(request_of(attempt, 640, 1, salt=1))
        driver.step()
        if attempt in driver.finished:
            break
        driver.abort(attempt)
    assert attempt == 10


def test_what_a_step_in_flight_computes_for_one_who_left_stays_too() -> None:
    driver = Driver(blocks=45, block_tokens=16, max_tokens=64)
    driver.submit(request_of(1, 640, 3))
    plan = driver.begin()
    driver.abort(1)
    driver.end(plan)
    driver.submit(request_of(2, 640, 1, salt=2))
    driver.run()
    assert driver.finished[2].cached_tokens == 64


def test_blocks_used_last_are_kept_longest_and_chains_lose_their_ends_first() -> None:
    driver = Driver(blocks=10, block_tokens=4, max_tokens=64)
    for request_id, salt in ((1, 1), (2, 2), (3, 1)):  # 4 blocks each; the first one's are used again
        driver.submit(request_of(request_id, 17, 1, salt=salt))
        driver.run()
    driver.submit(request_of(4, 13, 1, salt=3))  # takes two blank ones, then those of 2, from its end
    driver.run()
    driver.submit(request_of(5, 17, 1, salt=1), request_of(6, 17, 1, salt=2))
    driver.run()
    assert driver.finished[5].cached_tokens == 16
    assert 0 < driver.finished[6].cached_tokens < 16
    assert driver.state.memory.pool.evictions > 0


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    driver = Driver(blocks=12, block_tokens=4, max_tokens=64, policy=replace(FCFS, spare_blocks=lambda inside: 0))
    driver.submit(request_of(1, 16, 16), request_of(2, 20, 8))
    driver.run()
    assert driver.finished[2].preemptions == 1
    needed = 16 + 15 + 20 + 7
    assert driver.executor.rows - needed < 20, "less than its prompt is computed again"
    assert driver.finished[2].cached_tokens == 0, "usage tells what was there when it came"


def test_a_failed_step_leaves_nothing_in_the_cache() -> None:
    driver = Driver(blocks=45, block_tokens=16, max_tokens=64)
    driver.submit(request_of(1, 640, 3))
    driver.step()
    driver.begin()
    driver.note(driver.state.abort_steps("broken"))
    driver.state.check()
    driver.submit(request_of(2, 640, 1, salt=2))
    driver.run()
    assert driver.finished[2].cached_tokens == 64


class TestHostMemory:
    """What the pool has to give up goes to host memory, and comes back by a copy instead of a computation."""

    def test_an_evicted_prefix_is_copied_back(self) -> None:
        driver = Driver(blocks=6, block_tokens=4, max_tokens=64, host_blocks=8)
        for request_id, salt in enumerate((1, 2, 1, 2)):
            driver.submit(request_of(request_id, 21, 1, salt=salt))
            driver.run()
        assert [driver.finished[i].cached_tokens for i in range(4)] == [0, 0, 20, 20]
        assert driver.executor.moved > 0
        assert driver.state.memory.restored_blocks == 10
        assert driver.executor.rows == 21 + 21 + 1 + 1

    def test_a_preempted_request_is_swapped_instead_of_computed_again(self) -> None:
        rows = {}
        for host_blocks in (0, 16):
            driver = Driver(blocks=9, block_tokens=4, max_tokens=64, host_blocks=host_blocks)
            driver.policy = replace(FCFS, spare_blocks=lambda inside: 0)
            driver.submit(request_of(1, 14, 20), request_of(2, 14, 20))
            driver.run()
            assert driver.state.preemptions > 0
            rows[host_blocks] = driver.executor.rows - 2 * (14 + 19)
        assert rows[16] < 8 * driver.state.preemptions, "a partial block at most, each time"
        assert rows[16] < rows[0]

    def test_as_much_as_fits_is_kept_and_the_oldest_makes_room(self) -> None:
        driver = Driver(blocks=6, block_tokens=4, max_tokens=64, host_blocks=2)
        for request_id, salt in enumerate((1, 2, 3, 1)):
            driver.submit(request_of(request_id, 21, 1, salt=salt))
            driver.run()
        assert driver.finished[3].cached_tokens == 0

    def test_copies_that_a_failed_step_did_not_make_are_not_believed(self) -> None:
        driver = Driver(blocks=6, block_tokens=4, max_tokens=64, host_blocks=8)
        driver.submit(request_of(1, 21, 1))
        driver.run()
        driver.submit(request_of(2, 21, 1))
        driver.begin()  # plans to save what the first one left, and fails before
        driver.note(driver.state.abort_steps("broken"))
        driver.submit(request_of(3, 21, 1, salt=2))
        driver.run()
        assert len(driver.state.memory.host) <= 8
        driver.state.check()


def test_a_request_is_overtaken_no_more_often_than_the_policy_says() -> None:
    driver = Driver(blocks=8, block_tokens=4, max_tokens=64, policy=replace(FCFS, overtakes=3))
    driver.submit(request_of(0, 16, 15))
    driver.step()
    driver.submit(request_of(1, 28, 1))
    for request_id in range(2, 12):
        driver.submit(request_of(request_id, 2, 2))
    driver.run()
    order = list(driver.finished)
    assert sorted(order[: order.index(1)]) == [0, 2, 3, 4]
    assert driver.state.overtakes == 3


def test_nobody_is_preempted_again_and_again() -> None:
    """Under newest-first alone, whoever comes last into a full pool is thrown out each time somebody grows."""
    most = []
    for victims in (FCFS.victims, lambda running: sorted(running, key=lambda r: -r.rank)):
        policy = replace(FCFS, victims=victims, spare_blocks=lambda inside: 0)
        driver = Driver(blocks=32, block_tokens=4, max_tokens=64, policy=policy, cache=False)
        driver.submit(*(request_of(i, 8 + 11 * i % 29, 10 + 7 * i % 41) for i in range(200)))
        driver.run()
        most.append(max(end.preemptions for end in driver.finished.values()))
    assert most == [3, 6]


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    driver = Driver(blocks=9, block_tokens=4, max_tokens=64, policy=replace(FCFS, spare_blocks=lambda inside: 0))
    driver.submit(request_of(1, 14, 20), request_of(2, 14, 20), request_of(3, 4, 4))
    driver.run()
    assert driver.finished[2].preemptions > 0
    assert list(driver.finished)[-1] in (2, 3)
