"""An engine on a clock of its own, and a server that writes down what it hears of it, as late as one likes."""

from __future__ import annotations

from tests.fakes import FakeExecutor

from legato.core.budget import StepBudget
from legato.core.cost import Curve, StepCost
from legato.core.pacer import Pacer
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import SLO
from legato.core.request import Request, StopRule
from legato.core.shape import Attention, StepShape
from legato.core.state import SchedulerState
from legato.core.tracker import CostTracker
from legato.engine.loop import Engine
from legato.explain.attribute import Explanation, Gap, explain
from legato.explain.read import Trace
from legato.explain.record import FORMAT, Asked, Ended, Header, Line, Options, encode_line, stepped

# 4 ms a step, 1 ms for each further row, 0.5 ms for each token that is chosen.
MACHINE = StepCost(Attention(), rows=Curve((1,), (0.004,), 0.001), logits=Curve((1,), (0.0005,), 0.0005))
BLOCKS = 200


class Timed(FakeExecutor):
    """Takes what `MACHINE` says, `slowdown` times."""

    def __init__(self) -> None:
        super().__init__(16)
        self.now_s = 100.0
        self.slowdown = 1.0

    def __call__(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        self.now_s += self.slowdown * MACHINE.predict(StepShape.of(plan, MACHINE.attention))
        return super().execute(plan)


class Rig:
    """`itl_s` None: steps are bounded by tokens alone, and nobody foresees them. `delay_s`: of the next dispatch."""

    def __init__(self, itl_s: float | None = 0.2, *, blocks: int = BLOCKS, max_tokens: int = 128) -> None:
        self.machine = Timed()
        pacer = None if itl_s is None else Pacer(CostTracker(MACHINE, margin=1.0), itl_s=itl_s, slack_s=0.0)
        state = SchedulerState(blocks, 16, 3000, policy=SLO)
        self.engine = Engine(state, self.machine, StepBudget(max_tokens, 32), self.machine, pacer=pacer)
        self.engine.traces = True
        self.delay_s = 0.0
        self.dispatched_s = 0.0
        self.generated: dict[int, int] = {}
        options = Options(blocks, 16, 3000, max_tokens, 32)
        cost = None if itl_s is None else MACHINE.to_dict()
        self.lines: list[Line] = [Header(FORMAT, "0", "tiny", 0.0, self.machine.now_s, itl_s or 0.0, options, cost)]

    @property
    def now_s(self) -> float:
        return self.machine.now_s

    def ask(
        self,
        request_id: int,
        tokens: int = 5,
        max_tokens: int = 100,
        *,
        tokenized_s: tuple[float, float] | None = None,
        itl_s: float | None = None,
    ) -> None:
        """A request comes now."""
        prompt = tuple((request_id * 31 + i * i) % 97 for i in range(tokens))
        self.engine.submit(Request(request_id, prompt, stop=StopRule(max_tokens), arrival_s=self.now_s))
        asked = Asked(request_id, self.now_s, tokens, max_tokens, itl_s=itl_s, tokenized_s=tokenized_s)
        self.lines.append(asked)
        self.generated[request_id] = 0

    def tokenize(self, request_id: int, start_s: float, stop_s: float) -> None:
        """A request whose text was turned into tokens then, of which nothing else is known."""
        self.lines.append(Asked(request_id, stop_s, 1, 1, tokenized_s=(start_s, stop_s)))

    def abort(self, request_id: int) -> None:
        """Its client leaves now; the engine hears of it at once."""
        self.dispatched_s = max(self.dispatched_s, self.now_s)
        self.lines.append(Ended(request_id, "abort", self.generated.pop(request_id), self.dispatched_s))
        self.engine.abort(request_id)

    def pass_s(self, seconds: float) -> None:
        """Time in which nobody does anything."""
        self.machine.now_s += seconds

    def step(self, steps: int = 1) -> None:
        """Steps of the engine; the server hears of each `delay_s` after its end, and of none before the one before."""
        for _ in range(steps):
            if not self.engine.has_work:
                return
            events = self.engine.step()
            self.dispatched_s = max(self.dispatched_s, self.now_s + self.delay_s)
            if events.traced is not None:
                self.lines.append(stepped(events.traced, self.dispatched_s))
            for request_id in set(events.request_ids) & set(self.generated):
                self.generated[request_id] += 1
            for end in events.finished:
                generated = self.generated.pop(end.request_id, None)
                if generated is not None:
                    self.lines.append(Ended(end.request_id, end.reason, generated, self.dispatched_s))

    def finish(self) -> None:
        """Steps until nothing is left."""
        while self.engine.has_work:
            self.step()

    def bytes(self) -> bytes:
        """The file of it."""
        return b"".join(map(encode_line, self.lines))

    def explain(self, budget_s: float | None = None) -> Explanation:
        """What is said of it."""
        header = self.lines[0]
        assert isinstance(header, Header)
        trace = Trace(header)
        for line in self.lines:
            trace.take(line)
        return explain(trace, budget_s)


def the_gap(found: Explanation, request_id: int, token: int) -> Gap:
    """The one before that token."""
    return next(gap for gap in found.of(request_id) if gap.token == token)
