"""Stop strings: found across token boundaries, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence

from legato.engine.detokenize import Detokenizer


class StopMatcher:
    """Passes text through until one of `stops` has appeared; holds back what may be the beginning of one.

    The match is the one that is complete first, and of those complete at the same character the longest. So the result
    depends on the text alone, not on how tokens cut it. Cost without stops: nothing; with: O(longest stop) a piece.
    """

    __slots__ = ("_held", "_reach", "_stops", "hit")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in self._stops), default=0) - 1
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text, once one did."""

    def feed(self, text: str) -> str:
        """The part of the text so far that can be shown and was not yet. After a hit: always empty."""
        if not self._stops or self.hit is not None:
            return text if self.hit is None else ""
        held = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = held.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is not None:
            self.hit, self._held = best[2], ""
            return held[: best[1]]
        keep = self._beginning_of_stop(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What is still held back when the text ends otherwise."""
        text, self._held = self._held, ""
        return text

    def _beginning_of_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._reach, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """One sequence's text: tokens in, text that may be shown out, stop strings obeyed.

    Stop strings are not looked for in the first `min_tokens` tokens.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "finished", "tokens")

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens fed so far."""
        self.finished = False

    @property
    def stop_hit(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.hit

    def feed(self, token_id: int) -> str:
        """Text to show now. If `stop_hit` is set afterwards, the sequence is over: abort its request."""
        self.tokens += 1
        text = self._detokenizer.feed(token_id)
        return text if self.tokens <= self._min_tokens else self._matcher.feed(text)

    def finish(self) -> str:
        """The rest of the text when the engine ended the sequence. Empty after a stop string."""
        if self.finished or self.stop_hit is not None:
            return ""
        self.finished = True
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()
