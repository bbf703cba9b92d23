"""Prompts, and how they are asked for."""

from __future__ import annotations

from random import Random

import pytest

from legato.bench.load import (
    Prompts,
    WordScale,
    parse_tokens,
    parse_vocab,
)
from legato.errors import ConfigError


def test_lengths_and_vocabularies_are_read() -> None:
    assert parse_tokens("4000,8000", "x") == (4000, 8000)
    assert parse_vocab("300:20000") == range(300, 20000)


@pytest.mark.parametrize("text", ["300", "300-2000", "300:310", ":"])
def test_a_vocabulary_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--vocab is"):
        parse_vocab(text)


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts(Random(1), range(300, 20000))
    assert len({tuple(prompts.long(4000)[:8]) for _ in range(200)}) == 200
    assert len({prompts.short() for _ in range(200)}) == 200


def test_prompts_have_the_tokens_asked_for_in_ids_or_about_so_many_in_words() -> None:
    assert len(Prompts(Random(1), range(300, 400)).long(123)) == 123
    text = Prompts(Random(1), range(300, 400), WordScale(per_word=1.5, extra=10)).long(160)
    assert isinstance(text, str) and len(text.split()) == 100
