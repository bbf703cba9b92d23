"""Why a token was late, in one sentence, and as a document for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legato.explain.attribute import Attribution, Explanation, Gap
from legato.explain.lanes import begin_of
from legato.explain.record import Stepped


class Teller:
    """Puts gaps of one explanation into words."""

    def __init__(self, found: Explanation) -> None:
        self._trace = found.trace
        self._attribution = Attribution(found.trace)
        self.begin_s = begin_of(found.trace)

    def sentence(self, gap: Gap, *, names_request: bool = True) -> str:
        """`token 17 of request 3 came after 143 ms, 43 over the budget: 88 ms of it the chunk of request 9 (…)`."""
        whose = f" of request {gap.request_id}" if names_request else ""
        over = f", {_ms(gap.over_s, gap.seconds)} over the budget" if gap.is_late else ""
        return f"token {gap.token}{whose} came after {_ms(gap.seconds)} ms{over}: {self.reason(gap)}"

    def reason(self, gap: Gap) -> str:
        """What is named as its cause."""
        ms = _ms(gap.parts[gap.cause])
        match gap.cause:
            case "chunks":
                return f"{ms} ms of it {self._chunks(gap)}"
            case "own_prompt":
                rows, steps = self._rows(gap, gap.request_id)
                return f"{ms} ms of it its own prompt ({rows:,} tokens in {_count(steps, 'step')})"
            case "queueing":
                return f"{ms} ms of it waiting for its turn{self._behind(gap)}"
            case "decodes":
                streams = self._trace.steps[gap.last].decodes
                return f"{ms} ms of it one token for each of {_count(streams, 'stream')}"
            case "sampling":
                return f"{ms} ms of it choosing tokens from their logits"
            case "preemption":
                return f"{ms} ms of it without its KV, which was given up for others and computed again"
            case "planning":
                return f"{ms} ms of it planning the step"
            case "between":
                return f"{ms} ms of it between steps, where the engine computed nothing"
            case "tokenizer":
                return f"{ms} ms of it {self._tokenizing(gap)}"
            case "delivery":
                return f"{ms} ms of it on the way from the engine to its stream: the server was busy"
            case _:
                return f"{self._noise(gap, ms)}{self._beside(gap)}"

    def document(self, gap: Gap) -> dict[str, Any]:
        """For JSON. Milliseconds; `at_s`: when the token came, from the first moment that the trace tells of."""
        return {
            "request": gap.request_id,
            "token": gap.token,
            "at_s": round(gap.ends_s - self.begin_s, 6),
            "gap_ms": _exact(gap.seconds),
            "budget_ms": None if gap.budget_s is None else _exact(gap.budget_s),
            "over_ms": _exact(gap.over_s),
            "cause": gap.cause,
            "parts_ms": {kind: _exact(seconds) for kind, seconds in gap.parts.seconds.items()},
            "chunks_ms": _by_request(gap.parts.chunks),
            "behind_ms": _by_request(gap.parts.behind),
            "steps": [self._trace.steps[gap.first].step, self._trace.steps[gap.last].step],
            "sentence": self.sentence(gap),
        }

    def _chunks(self, gap: Gap) -> str:
        most = max(gap.parts.chunks, key=gap.parts.chunks.__getitem__)
        others = len(gap.parts.chunks) - 1
        beside = f" and {_count(others, 'other')}" if others else ""
        if gap.first == gap.last or self._rows(gap, most)[1] == 1:
            start, rows = self._chunk(gap, most)
            return f"the chunk of request {most} ({rows:,} tokens from {start:,}){beside}"
        rows, steps = self._rows(gap, most)
        return f"the prompt of request {most} ({rows:,} tokens in {_count(steps, 'step')}){beside}"

    def _chunk(self, gap: Gap, request_id: int) -> tuple[int, int]:
        for step in self._steps(gap):
            if request_id in step.ids:
                column = step.ids.index(request_id)
                return step.starts[column], step.counts[column]
        return 0, 0

    def _rows(self, gap: Gap, request_id: int) -> tuple[int, int]:
        """Rows of a request in the steps of a gap, and in how many of them."""
        counts = [step.counts[step.ids.index(request_id)] for step in self._steps(gap) if request_id in step.ids]
        return sum(counts), len(counts)

    def _behind(self, gap: Gap) -> str:
        behind = gap.parts.behind
        if not behind:
            return ""
        most = max(behind, key=behind.__getitem__)
        others = len(behind) - 1
        return f", behind the prompt of request {most}" + (f" and {_count(others, 'other')}" if others else "")

    def _noise(self, gap: Gap, ms: str) -> str:
        if gap.first == gap.last:
            step = self._trace.steps[gap.last]
            foreseen = "" if step.predicted_s is None else f" ({_ms(step.step_s)} for {_ms(step.predicted_s)})"
            return f"its step took {ms} ms longer than foreseen{foreseen}"
        return f"its steps took {ms} ms longer than foreseen"

    def _tokenizing(self, gap: Gap) -> str:
        if gap.token == 1:
            return "turning its text into tokens"
        ended_s = self._trace.steps[gap.last].ended_s
        others = [other for other, _ in self._attribution.tokenized(gap.request_id, ended_s, gap.ends_s)]
        named = f"the text of request {others[0]}" if len(others) == 1 else f"{len(others)} texts"
        return f"the server turning {named} into tokens"

    def _beside(self, gap: Gap) -> str:
        """Who may have taken the cores: texts of that time that were long enough to matter."""
        began_s, ended_s = self._trace.steps[gap.first].started_s, self._trace.steps[gap.last].ended_s
        found = self._attribution.tokenized(gap.request_id, began_s, ended_s)
        matters = [other for other, seconds in found if seconds > 0.1 * (ended_s - began_s)]
        return f", while the text of request {matters[0]} was turned into tokens" if matters else ""

    def _steps(self, gap: Gap) -> list[Stepped]:
        return self._trace.steps[gap.first : gap.last + 1]


def _ms(seconds: float, beside_s: float = 0.0) -> str:
    """Rounded as a reader wants it: 1,204, 143, 9.7, 0.31; with no more digits than `beside_s` has."""
    ms, size = 1000 * seconds, 1000 * max(abs(seconds), beside_s)
    digits = 0 if size >= 99.95 and abs(ms) >= 1 else 1 if size >= 0.995 else 2
    return f"{ms:,.{digits}f}"


def _exact(seconds: float) -> float:
    return round(1000 * seconds, 4)


def _by_request(seconds: Mapping[int, float]) -> dict[str, float]:
    return {str(request_id): _exact(value) for request_id, value in seconds.items()}


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}s"
