"""`Ledger`: what became of simulated requests, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from legato.core.request import Finished, Request
from legato.core.shape import StepShape
from legato.sim.replica import Replica
from legato.sim.series import Series
from legato.sim.sketch import Sketch

MOST_TENANTS, OTHER_TENANTS = 64, "(others)"
_LATE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request has to get to count as good; None: whatever. Seconds.

    `ttft_s`: until its first token. `itl_s`: between two tokens, 99 % of the gaps of each request. `tpot_s`: a token
    after the first, on average. `stall_s`: a longer gap is a stall.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    stall_s: float | None = None


class Tenancy:
    """What one tenant got. `active_s`: when it had unfinished requests."""

    __slots__ = ("active_s", "finished", "open", "since_s", "tokens", "ttft")

    def __init__(self) -> None:
        self.ttft = Sketch()
        self.finished = 0
        self.tokens = 0
        self.open = 0
        self.since_s = 0.0
        self.active_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt and answer, while it had unfinished requests."""
        return self.tokens / self.active_s if self.active_s else 0.0


class _Entry:
    """An unfinished request. `first_s`, `last_s`: when it got its first token and its newest; below 0 before."""

    __slots__ = ("arrival_s", "first_s", "last_s", "late", "request", "tenant")

    def __init__(self, request: Request, tenant: Tenancy) -> None:
        self.request = request
        self.tenant = tenant
        self.arrival_s = request.arrival_s
        self.first_s = self.last_s = -1.0
        self.late = 0  # gaps above the objective


class Ledger:
    """Sees the steps and tokens of all replicas: a `Witness`."""

    def __init__(self, objectives: Objectives = Objectives()) -> None:
        self.objectives = objectives
        self.ttft, self.itl, self.tpot, self.e2e = Sketch(), Sketch(), Sketch(), Sketch()
        self.series = Series()
        self.tenants: dict[str, Tenancy] = {}
        self.arrived = self.completed = self.good = self.stalls = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.good_tokens = 0
        self.preemptions = self.step_count = 0
        self.refusals: dict[str, int] = {}
        self.first_s, self.last_s = -1.0, 0.0
        self.kv_share_s = self.most_kv_share = self.busy_s = 0.0
        self._entries: dict[int, _Entry] = {}
        self._stall_s = objectives.stall_s
        self._itl_s = objectives.itl_s

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(self.last_s - self.first_s, 0.0)

    @property
    def unfinished(self) -> int:
        """Requests that have come and not ended."""
        return len(self._entries)

    def arrive(self, request: Request) -> None:
        """A request has come."""
        if self.first_s < 0.0:
            self.first_s = self.last_s = request.arrival_s
        self.arrived += 1
        name = request.tenant
        if name not in self.tenants and len(self.tenants) >= MOST_TENANTS:
            name = OTHER_TENANTS
        tenant = self.tenants.setdefault(name, Tenancy())
        if not tenant.open:
            tenant.since_s = request.arrival_s
        tenant.open += 1
        self._entries[request.request_id] = _Entry(request, tenant)

    def refused(self, request: Request, reason: str) -> None:
        """It can never be served. Reasons count without their numbers."""
        entry = self._entries.pop(request.request_id)
        kind = "".join("n" if c.isdigit() else c for c in reason.split(";")[0]).replace("nn", "n")
        while "nn" in kind:
            kind = kind.replace("nn", "n")
        self.refusals[kind] = self.refusals.get(kind, 0) + 1
        self._left(entry.tenant, request.arrival_s)

    def steps(self, replica: Replica, begin_s: float, ends_s: Sequence[float], shape: StepShape) -> None:
        """Steps that follow one another, `shape` of the first."""
        state, end_s = replica.state, ends_s[-1]
        seconds = end_s - begin_s
        self.step_count += len(ends_s)
        self.busy_s += seconds
        kv_share = 1.0 - state.free_blocks / state.total_blocks
        self.kv_share_s += seconds * kv_share
        if kv_share > self.most_kv_share:
            self.most_kv_share = kv_share
        if end_s > self.last_s:
            self.last_s = end_s
        self.series.add(begin_s, seconds, len(state.running), len(state.waiting), kv_share)

    def tokens(self, request_ids: Sequence[int], steps_s: Sequence[float]) -> None:
        """Each of these got a token at each of `steps_s`. Cost: O(requests + steps)."""
        entries, first_s, last_s, limit_s = self._entries, steps_s[0], steps_s[-1], self._itl_s
        more, late = len(steps_s) - 1, 0
        if more:
            gaps = list(map(sub, steps_s[1:], steps_s))
            self.itl.add_all(gaps, len(request_ids))
            if self._stall_s is not None and max(gaps) > self._stall_s:
                self.stalls += len(request_ids) * sum(gap_s > self._stall_s for gap_s in gaps)
            if limit_s is not None and max(gaps) > limit_s:
                late = sum(gap_s > limit_s for gap_s in gaps)
        same_s, same = -1.0, 0
        for request_id in request_ids:
            entry = entries[request_id]
            if entry.first_s < 0.0:
                self._begun(entry, first_s)
            else:
                gap_s = first_s - entry.last_s
                if gap_s != same_s:
                    if same:
                        self._gap(same_s, same)
                    same_s, same = gap_s, 0
                same += 1
                if limit_s is not None and gap_s > limit_s:
                    entry.late += 1
            entry.last_s = last_s
            entry.late += late
        if same:
            self._gap(same_s, same)
        self.output_tokens += len(request_ids) * (more + 1)

    def finished(self, ended: Finished, at_s: float) -> None:
        """A request ended."""
        entry, tokens = self._entries.pop(ended.request_id), ended.generated_tokens
        self.completed += 1
        self.preemptions += ended.preemptions
        e2e_s, ttft_s = at_s - entry.arrival_s, entry.first_s - entry.arrival_s
        tpot_s = (at_s - entry.first_s) / (tokens - 1) if tokens > 1 else 0.0
        self.e2e.add(e2e_s)
        if tokens > 1:
            self.tpot.add(tpot_s)
        wanted = self.objectives
        if (
            (wanted.ttft_s is None or ttft_s <= wanted.ttft_s)
            and (wanted.itl_s is None or entry.late <= _LATE_SHARE * (tokens - 1))
            and (wanted.tpot_s is None or tpot_s <= wanted.tpot_s)
        ):
            self.good += 1
            self.good_tokens += tokens
        tenant = entry.tenant
        tenant.finished += 1
        tenant.tokens += ended.prompt_tokens + tokens
        self.cached_tokens += ended.cached_tokens
        self._left(tenant, at_s)

    def _begun(self, entry: _Entry, at_s: float) -> None:
        ttft_s = at_s - entry.arrival_s
        entry.first_s = at_s
        self.ttft.add(ttft_s)
        entry.tenant.ttft.add(ttft_s)
        self.prompt_tokens += len(entry.request.prompt)

    def _gap(self, seconds: float, times: int) -> None:
        self.itl.add(seconds, times)
        if self._stall_s is not None and seconds > self._stall_s:
            self.stalls += times

    def _left(self, tenant: Tenancy, at_s: float) -> None:
        tenant.open -= 1
        if not tenant.open:
            tenant.active_s += at_s - tenant.since_s
