"""`Outlook`: how busy the engine is and what follows for whoever comes now, as the server's side hears of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from legato.engine.forecast import Load, Pending, first_token_seconds, place_of
from legato.engine.live import Live
from legato.engine.terms import Terms
from legato.engine.wire import EngineInfo, StepStats

_STAYS = 32


class Outlook:
    """Learns from each step and each end; predicts first tokens."""

    def __init__(self) -> None:
        self._step = StepStats()
        # (requests, prompt tokens) that the last step's numbers may not know of: submitted since, and while it ran.
        self._unheard = [(0, 0), (0, 0)]
        self._stays_s: deque[float] = deque(maxlen=_STAYS)

    def submitted(self, prompt_tokens: int) -> None:
        """A sequence was sent to the engine."""
        count, tokens = self._unheard[0]
        self._unheard[0] = count + 1, tokens + prompt_tokens

    def heard(self, step: StepStats) -> None:
        """The engine has told of a step."""
        self._step = step
        self._unheard = [(0, 0), self._unheard[0]]

    def ended(self, stay_s: float) -> None:
        """A sequence gave its slot back, so long after its first token."""
        self._stays_s.append(stay_s)

    @property
    def decode_s(self) -> float:
        """The gap between two tokens at present; 0 before the first."""
        return self._step.pace.decode_s

    def pending(
        self, info: EngineInfo, terms: Terms, prompt_tokens: int, arrival_s: float, *, missing_tokens: int | None = None
    ) -> Pending:
        """A request as it stands among others. `missing_tokens`: those of its prompt to be computed; None: all."""
        due_s = terms.due_s(arrival_s, self.decode_s)
        place = place_of(info.policy, terms.priority, arrival_s, due_s, prompt_tokens)
        return Pending(place, prompt_tokens if missing_tokens is None else missing_tokens, terms.tenant)

    def first_token_seconds(self, info: EngineInfo, own: Pending, live: Collection[Live]) -> float:
        """Until the first token of a request that comes now beside `live`. Cost: O(live)."""
        others = (entry.pending for entry in live if not entry.has_begun)
        return first_token_seconds(
            own, others, self._load(info, live), info.tenant_weights if info.policy == "fair" else None
        )

    def _load(self, info: EngineInfo, live: Collection[Live]) -> Load:
        step = self._step
        # With nobody there, what the last load made of it says nothing.
        told_s, alone_s = step.pace.token_s, info.token_s
        places = min(info.max_num_seqs, info.most_streams or info.max_num_seqs)
        free_tokens = info.kv_tokens if step.free_blocks < 0 else step.free_blocks * info.block_tokens
        return Load(
            token_s=told_s or alone_s if live else alone_s or told_s,
            pending_tokens=step.pending_tokens + sum(tokens for _, tokens in self._unheard),
            waiting=step.waiting + sum(count for count, _ in self._unheard),
            running=step.running,
            free_places=max(places - step.running, 0),
            free_tokens=free_tokens,
            held_tokens=info.kv_tokens - free_tokens,
            stay_s=sum(self._stays_s) / len(self._stays_s) if self._stays_s else self._foreseen_stay_s(live),
        )

    def _foreseen_stay_s(self, live: Collection[Live]) -> float:
        """Before any has ended: what the answers of those that run may take, as far as they say."""
        answers = [entry.terms.answer_tokens for entry in live if entry.has_begun]
        return self.decode_s * sum(answers) / len(answers) if answers else 0.0
