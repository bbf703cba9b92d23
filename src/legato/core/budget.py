"""`StepBudget`: how much one step may do."""

from __future__ import annotations

from dataclasses import dataclass

from legato.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepBudget:
    """`max_tokens`: rows a step may compute, decodes and prefill chunks together. `max_seqs`: requests running at once.

    `max_seqs <= max_tokens`, so that every decode fits in every step, and one token is left for a prefill whenever
    there is one. Raises ConfigError, with both numbers, otherwise.
    """

    max_tokens: int = 512
    max_seqs: int = 64

    def __post_init__(self) -> None:
        if self.max_seqs < 1:
            raise ConfigError(f"max_seqs is {self.max_seqs}; at least 1 request must be able to run")
        if self.max_tokens < self.max_seqs:
            raise ConfigError(
                f"a step of {self.max_tokens} tokens cannot hold one for each of {self.max_seqs} running requests;"
                f" raise max_tokens to {self.max_seqs} or lower max_seqs to {max(self.max_tokens, 1)}"
            )
