"""One engine, one long prompt beside running streams, under three budgets: when did each token come?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal, get_args

from legato.core.budget import StepBudget
from legato.core.cost import StepCost
from legato.core.promise import prompt_seconds
from legato.core.request import Request, StopRule
from legato.engine.loop import Engine
from legato.errors import ConfigError, EngineError

Clock = Callable[[], float]
Method = Literal["one pass", "tokens", "milliseconds"]
METHODS: tuple[Method, ...] = get_args(Method)

# A stream asks for something this long, and anew when it has it.
STREAM_PROMPT, STREAM_TOKENS = 32, 2048
_ENDLESS_S = float("inf")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is run. `step_tokens`: of the fixed budget. `itl_ms`: the gap wanted where time bounds a step.

    The streams decode for `lead_s` seconds, then the prompt comes; a run ends `tail_s` after its first token.
    Raises ConfigError for sizes that show nothing.
    """

    streams: int
    prompt_tokens: int
    step_tokens: int
    itl_ms: float
    lead_s: float = 1.5
    tail_s: float = 1.0

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ConfigError(f"streams is {self.streams}; 1 is the least that can stall")
        if self.step_tokens <= self.streams:
            raise ConfigError(
                f"a step of {self.step_tokens} tokens has none left for a prompt beside {self.streams} streams;"
                " raise max_num_batched_tokens"
            )
        if self.prompt_tokens < 1:
            raise ConfigError(f"prompt_tokens is {self.prompt_tokens}; 1 is the least that is a prompt")


@dataclass(slots=True)
class Run:
    """What came of one method, so far. Seconds since all streams have a token; what watching took is not in them.

    `answers`: of each answer of a stream, when its tokens came. `sent_s`, `first_s`: when the prompt came, and when its
    first token; None before that. `now_s`: the end of the last step. `steps`: that computed a part of the prompt.
    `cached_tokens`: found in a prefix cache, of prompts of this run. `late`: tokens beyond the gap asked for, by
    `core.pacer.LateCause`; of a run that is over, and where a gap was asked for.
    """

    method: Method
    answers: list[list[float]] = field(default_factory=list)
    sent_s: float | None = None
    first_s: float | None = None
    now_s: float = 0.0
    steps: int = 0
    cached_tokens: int = 0
    late: dict[str, int] = field(default_factory=dict)


Watch = Callable[[Run], None]


def record(
    engine: Engine, setup: Setup, vocab: int, clock: Clock, draw: Random, watch: Watch, *, into: list[Run]
) -> None:
    """Appends a `Run` for each method to `into`, and fills it while it goes: whatever ends this, what was is there.

    `engine` has a pacer and room for the whole prompt in one step; `clock` is the one it goes by. `draw`: tokens of the
    prompts, none of which begin alike. `watch` is called after each step. The pacer learns what steps take from all
    runs, as in a server that has been up for a while; in the first two the gap that it keeps is endless.
    Raises ConfigError for a prompt that does not fit, EngineError if a step fails.
    """
    whole = setup.prompt_tokens + setup.streams
    if whole > engine.budget.max_tokens:
        raise ConfigError(
            f"a prompt of {setup.prompt_tokens} tokens beside {setup.streams} streams does not fit a step of"
            f" {engine.budget.max_tokens}; shorten the prompt"
        )
    budget, pacer, ids = engine.budget, engine.pacer, itertools.count(1)
    assert pacer is not None, "milliseconds need a pacer"
    itl_s = pacer.itl_s
    try:
        for method in METHODS:
            engine.budget = budget_of(method, setup, budget)
            pacer.itl_s = itl_s if method == "milliseconds" else _ENDLESS_S
            late_before = pacer.late.copy()
            run = Run(method)
            into.append(run)
            _Beside(engine, setup, vocab, clock, draw, ids, run).record(watch)
            run.late = {
                cause: count - late_before[cause] for cause, count in pacer.late.items() if count > late_before[cause]
            }
    finally:
        engine.budget, pacer.itl_s = budget, itl_s


def budget_of(method: Method, setup: Setup, budget: StepBudget) -> StepBudget:
    """`budget` with the tokens that a step of this method may have."""
    tokens = setup.prompt_tokens + setup.streams if method == "one pass" else setup.step_tokens
    return dataclasses.replace(budget, max_tokens=tokens, max_seqs=setup.streams + 1)


def seconds_of(method: Method, setup: Setup, cost: StepCost) -> float:
    """From the prompt to its first token, as foreseen."""
    itl_s = setup.itl_ms / 1000 if method == "milliseconds" else _ENDLESS_S
    tokens = setup.prompt_tokens + setup.streams if method == "one pass" else setup.step_tokens
    return prompt_seconds(cost, itl_s, tokens, setup.prompt_tokens, setup.streams, STREAM_PROMPT)


def fitting_setup(
    setup: Setup, cost: StepCost, *, most_tokens: int, one_pass_s: float, all_s: float, keeps_step: bool = False
) -> Setup:
    """`setup` with the longest prompt, in hundreds of tokens, of which one pass and all three runs take so long.

    At most `most_tokens`, at least a hundred, or `most_tokens` if that is less. The fixed budget is a quarter of it at
    most, or the second run would be the first one again; unless it `keeps_step`.
    """
    with_prompt = functools.partial(_with_prompt, setup, keeps_step=keeps_step)
    low, high = 1, max(most_tokens // 100, 1)
    while low < high:
        middle = (low + high + 1) // 2
        tried = with_prompt(100 * middle)
        taken_s = {method: seconds_of(method, tried, cost) for method in METHODS}
        if taken_s["one pass"] <= one_pass_s and sum(taken_s.values()) <= all_s:
            low = middle
        else:
            high = middle - 1
    return with_prompt(min(100 * low, most_tokens))


def _with_prompt(setup: Setup, tokens: int, *, keeps_step: bool) -> Setup:
    step_tokens = setup.step_tokens if keeps_step else min(setup.step_tokens, max(tokens // 4, setup.streams + 1))
    return dataclasses.replace(setup, prompt_tokens=tokens, step_tokens=step_tokens)


class _Beside:
    """The requests of one run."""

    def __init__(
        self, engine: Engine, setup: Setup, vocab: int, clock: Clock, draw: Random, ids: Iterator[int], run: Run
    ) -> None:
        self._engine = engine
        self._setup = setup
        self._vocab = vocab
        self._clock = clock
        self._draw = draw
        self._ids = ids
        self._run = run
        self._beginning: set[int] = set()
        """Streams without a token, before there is a start to count from."""
        self._answers: dict[int, list[float]] = {}
        self._long: int | None = None
        self._start_s: float | None = None
        self._watched_s = 0.0

    def record(self, watch: Watch) -> None:
        """To the end of the run; then the engine is idle."""
        run, setup = self._run, self._setup
        for _ in range(setup.streams):
            self._open_stream()
        self._beginning.update(self._answers)
        while run.first_s is None or run.now_s < run.first_s + setup.tail_s:
            if self._long is None and self._start_s is not None and run.now_s >= setup.lead_s:
                run.sent_s = self._now_s()
                self._long = self._submit(setup.prompt_tokens, 1)
            self._step()
            before_s = self._clock()
            watch(run)
            self._watched_s += self._clock() - before_s
        for request_id in self._answers:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()

    def _now_s(self) -> float:
        now_s = self._clock() - self._watched_s
        if self._start_s is None:
            return 0.0
        return now_s - self._start_s

    def _open_stream(self) -> None:
        answer: list[float] = []
        self._run.answers.append(answer)
        self._answers[self._submit(STREAM_PROMPT, STREAM_TOKENS)] = answer

    def _submit(self, tokens: int, max_tokens: int) -> int:
        request_id = next(self._ids)
        low, high = self._vocab // 8, self._vocab - self._vocab // 8  # special tokens stand at either end
        prompt = tuple(self._draw.randrange(low, high) for _ in range(tokens))
        self._engine.submit(Request(request_id, prompt, stop=StopRule(max_tokens), arrival_s=self._clock()))
        return request_id

    def _step(self) -> None:
        run = self._run
        events = self._engine.step()
        if self._start_s is None:
            self._beginning.difference_update(events.request_ids)
            if not self._beginning:
                self._start_s = self._clock() - self._watched_s
        run.now_s = self._now_s()
        run.cached_tokens += sum(tokens for _, tokens in events.cached)
        if self._long is not None and events.record is not None and self._long in events.record.plan.request_ids:
            run.steps += 1
        for request_id in events.request_ids:
            if request_id == self._long:
                run.first_s = run.now_s
            elif request_id in self._answers and self._start_s is not None:
                self._answers[request_id].append(run.now_s)
        for finished in events.finished:
            if finished.reason == "error":
                raise EngineError(finished.message)
            if self._answers.pop(finished.request_id, None) is not None:
                self._open_stream()
