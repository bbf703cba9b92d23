"""`StepBudget`: how much one step may do."""

from __future__ import annotations

from dataclasses import dataclass

from legato.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepBudget:
    """`max_tokens`: rows a step may compute, decodes and prefill chunks together. `max_seqs`: requests running at once.

    `max_seqs <= max_tokens`, so that every decode fits in every step, and one token is left for a prefill whenever
    there is one. `prompt_logit_rows`: rows whose logits a step may compute for the log-probabilities of prompts, at
    least 1: memory for logits does not grow with a prompt. Raises ConfigError, with the numbers, otherwise.
    """

    max_tokens: int = 512
    max_seqs: int = 64
    prompt_logit_rows: int = 64

    def __post_init__(self) -> None:
        if self.max_seqs < 1:
            raise ConfigError(f"max_seqs is {self.max_seqs}; at least 1 request must be able to run")
        if self.max_tokens < self.max_seqs:
            raise ConfigError(
                f"a step of {self.max_tokens} tokens cannot hold one for each of {self.max_seqs} running requests;"
                f" raise max_tokens to {self.max_seqs} or lower max_seqs to {max(self.max_tokens, 1)}"
            )
        if self.prompt_logit_rows < 1:
            raise ConfigError(f"prompt_logit_rows is {self.prompt_logit_rows}; 1 is the least that scores a prompt")

    @property
    def logit_rows(self) -> int:
        """Rows whose logits a step computes at most: one a request, and those of prompts."""
        return min(self.max_seqs + self.prompt_logit_rows, self.max_tokens)
