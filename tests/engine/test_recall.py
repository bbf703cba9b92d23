"""What the server expects the engine to find of a prompt."""

from __future__ import annotations

from legato.engine.recall import Recall

BLOCK = 4
A, B = tuple(range(10)), (*range(8), 90, 91, 92)


def test_what_was_sent_is_found_but_for_the_block_of_its_last_token() -> None:
    recall = Recall(99, BLOCK)
    assert recall.send(A, b"") == 10
    assert recall.send(A, b"") == 2
    assert recall.send(A[:8], b"") == 4, "the last block is computed for its last token"
    assert recall.missing_tokens([B], b"") == 3
    assert recall.missing_tokens([(7, *A)], b"") == 11


def test_prompts_sent_together_share_what_they_begin_with() -> None:
    recall = Recall(99, BLOCK)
    assert recall.missing_tokens([A, B, A], b"") == 10 + 3 + 2
    assert recall.missing_tokens([A], b"") == 10, "asking is not sending"


def test_another_salt_finds_nothing() -> None:
    recall = Recall(99, BLOCK)
    recall.send(A, b"one")
    assert recall.missing_tokens([A], b"two") == 10
    assert recall.missing_tokens([A], b"one") == 2


def test_as_many_blocks_are_remembered_as_the_pool_holds_and_ends_go_before_beginnings() -> None:
    recall = Recall(3, BLOCK)
    recall.send(tuple(range(13)), b"")
    recall.send((50, 51, 52, 53, 54), b"")
    assert recall.missing_tokens([tuple(range(13))], b"") == 5
    assert recall.missing_tokens([(50, 51, 52, 53, 54)], b"") == 1


def test_where_prefixes_are_not_kept_nothing_is_found() -> None:
    recall = Recall(0, BLOCK)
    recall.send(A, b"")
    assert recall.missing_tokens([A], b"") == 10


def test_an_empty_or_short_prompt_has_no_block() -> None:
    recall = Recall(9, BLOCK)
    assert recall.send((1,), b"") == 1
    assert recall.send((1,), b"") == 1
