"""Seeded random prompts, the same for every peer and for Legato. Standard library only."""

from __future__ import annotations

import random

# Ids in this range are ordinary text tokens in every vocabulary measured (special ids lie below, added ones above).
FIRST_ID = 1_000
LAST_ID = 40_000

DECODE_PROMPT_TOKENS = 112
DECODE_STEPS = 32  # 112 + 32 / 2: the mean context over the timed steps is 128 tokens


def random_prompt(tokens: int, seed: int) -> list[int]:
    """`tokens` ids drawn uniformly; two seeds share no prefix worth caching."""
    draw = random.Random(f"legato-peer-prompt-{seed}")
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]


def decode_prompts(sequences: int, seed: int) -> list[list[int]]:
    """One prompt of DECODE_PROMPT_TOKENS ids for each of `sequences`, all different."""
    return [random_prompt(DECODE_PROMPT_TOKENS, seed * 1_000 + row + 1_000_000) for row in range(sequences)]
