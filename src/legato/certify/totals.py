"""`Totals`: what trials exercised and compared, counted."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Totals:
    """Counts over trials.

    `steps`, `rows`: carried out, with those of chunks. `chunks`: pieces of prompts that were computed in more than one.
    `steps_in_company`: of more than one request. `preemptions`: of which `forced_preemptions` without need.
    `cached_tokens`: positions found in the prefix cache, of which `restored_blocks` blocks came from host memory.
    `evicted_blocks`: cached ones that were overwritten. `aborts`: requests taken back before their end.
    `threaded_trials`: on more than one thread. `ahead_trials`: with steps planned ahead. `f16_trials`, `f32_trials`: by
    KV type. `compared_logits`: single numbers; `mismatched_logit_bits`: of their 32 bits each.
    """

    trials: int = 0
    requests: int = 0
    steps: int = 0
    rows: int = 0
    chunks: int = 0
    largest_step_rows: int = 0
    steps_in_company: int = 0
    preemptions: int = 0
    forced_preemptions: int = 0
    cached_tokens: int = 0
    restored_blocks: int = 0
    evicted_blocks: int = 0
    aborts: int = 0
    threaded_trials: int = 0
    ahead_trials: int = 0
    f16_trials: int = 0
    f32_trials: int = 0
    compared_logits: int = 0
    compared_tokens: int = 0
    mismatched_logit_bits: int = 0
    mismatched_tokens: int = 0

    def add(self, other: Totals) -> None:
        """Takes in another's counts."""
        for field in fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            is_peak = field.name.startswith("largest")
            setattr(self, field.name, max(mine, others) if is_peak else mine + others)
