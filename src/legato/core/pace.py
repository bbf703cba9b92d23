"""`Pace`: what tokens take at present, from what steps took."""

from __future__ import annotations

_RECENT = 0.1  # weight of the last step


class Pace:
    """Running means over some ten steps. Seconds; 0 before the first step that tells.

    `decode_s`: the gap between two tokens of a stream.
    """

    __slots__ = ("_prompt_rows", "_prompt_s", "decode_s")

    def __init__(self) -> None:
        self.decode_s = 0.0
        self._prompt_rows = self._prompt_s = 0.0  # of steps with prompts

    @property
    def token_s(self) -> float:
        """What a token of a prompt takes, its company included."""
        return self._prompt_s / self._prompt_rows if self._prompt_rows else 0.0

    def observe(self, prompt_rows: int, decodes: int, seconds: float) -> None:
        """Learns from a step."""
        if decodes:
            self.decode_s += _RECENT * (seconds - self.decode_s) if self.decode_s else seconds
        if prompt_rows:
            self.suppose(prompt_rows, seconds)

    def suppose(self, prompt_rows: int, seconds: float, steps: int = 1) -> None:
        """The same of a step that would have taken so long, in place of so many."""
        weight = min(steps * _RECENT, 1.0)
        self._prompt_rows += weight * (prompt_rows - self._prompt_rows)
        self._prompt_s += weight * (seconds - self._prompt_s)
