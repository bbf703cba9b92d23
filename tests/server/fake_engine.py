"""An engine one can predict in one's head: it answers with the prompt's own tokens, one a step, in a circle.

Tokens are bytes; 256 is the end of sequence, 257 "<|start|>", 258 "<|end|>". The answer to "abc" is "abcabc…". Only a
prompt that contains byte 0 ends by itself: 0 becomes the end token.
The engine and the scheduler are the real ones; only the executor is made up.
"""

from __future__ import annotations

import functools
import os
import signal
import time

from legato.core.budget import StepBudget
from legato.core.cost import Curve, StepCost
from legato.core.pace import Pace
from legato.core.pacer import Pacer
from legato.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from legato.core.policy import POLICIES
from legato.core.shape import Attention
from legato.core.state import SchedulerState
from legato.core.tracker import CostTracker
from legato.core.view import RowSource
from legato.engine.loop import Engine
from legato.engine.wire import EngineInfo
from legato.engine.worker import ReportProgress
from legato.errors import ModelCorrupt

EOS, START, END = 256, 257, 258
VOCAB = 259
TOKEN_BYTES = [bytes([i]) for i in range(256)] + [b"", b"", b""]
BLOCK_TOKENS = 16


class FakeExecutor:
    """Answers with the prompt, over and over. What begins with `!kill`, `!bug` or `!exit` does so; `!lose`: a block."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def bind(self, source: RowSource) -> None:
        self._source = source

    def execute(self, plan: StepPlan) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        ids, tokens, logprobs = [], [], []
        for request_id, sampled in zip(plan.request_ids, plan.samples, strict=True):
            request = self._source.request(request_id)
            self._obey(request.prompt)
            if not sampled:
                continue
            generated = len(self._source.tokens(request_id)) - len(request.prompt)
            token = request.prompt[generated % len(request.prompt)] or EOS
            ids.append(request_id)
            tokens.append(token)
            logprobs.append(self._logprobs(token, request.sampling.logprobs))
        scores = tuple(self._score(*scored) for scored in plan.scores)
        return StepResult(plan.step, tuple(ids), tuple(tokens), tuple(logprobs), scores)

    def _score(self, request_id: int, start: int, stop: int) -> PromptLogprobs:
        """The likeliest token is always the one before; each is less likely than it by its distance in the alphabet."""
        request = self._source.request(request_id)
        entries = []
        for before, token in zip(request.prompt[start:stop], request.prompt[start + 1 : stop + 1], strict=True):
            top = tuple(((before + i) % VOCAB, -float(i)) for i in range(request.sampling.prompt_logprobs or 0))
            entries.append(TokenLogprobs(-float((token - before) % VOCAB), top, 1 + (token - before) % VOCAB))
        return PromptLogprobs(request_id, start + 1, tuple(entries))

    def _logprobs(self, token: int, wanted: int | None) -> TokenLogprobs | None:
        if wanted is None:
            return None
        return TokenLogprobs(-0.25, tuple(((token + i) % VOCAB, -0.25 - i) for i in range(wanted)))

    def _obey(self, prompt: tuple[int, ...]) -> None:
        if prompt[:5] == tuple(b"!kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt[:4] == tuple(b"!bug"):
            raise ZeroDivisionError("a bug of the executor")
        if prompt[:5] == tuple(b"!exit"):
            raise SystemExit(3)
        if prompt[:5] == tuple(b"!lose"):
            assert isinstance(self._source, SchedulerState)
            self._source.memory.pool.take()


class Steady(Pace):
    """A token of a prompt takes `token_s` and does not change."""

    def __init__(self, token_s: float) -> None:
        super().__init__()
        self.suppose(1, token_s, 10)

    def observe(self, prompt_rows: int, decodes: int, seconds: float) -> None:
        super().observe(0, decodes, seconds)


def build(
    report: ReportProgress,
    *,
    blocks: int = 64,
    max_model_len: int = 512,
    max_seqs: int = 4,
    chunk: int = 64,
    step_s: float = 0.0,
    fail: str = "",
    policy: str = "slo",
    itl_s: float = 0.0,
    ttft_s: float = 0.0,
    token_s: float = 0.0,
    tenant_weights: dict[str, float] | None = None,
    foreseen: bool = False,
) -> tuple[Engine, EngineInfo]:
    """Runs in the engine process. `foreseen`: there is a pacer, and to it every step takes `step_s`."""
    report("reading weights", 1, 2)
    if fail == "model":
        raise ModelCorrupt("model.gguf ends after 12 of 100 bytes; fetch it again")
    if fail == "bug":
        raise ZeroDivisionError("a bug of ours")
    if fail == "exit":
        os._exit(7)
    if fail == "hang":
        time.sleep(60)
    report("reading weights", 2, 2)
    state = SchedulerState(blocks, BLOCK_TOKENS, max_model_len, policy=POLICIES[policy])
    cost = StepCost(Attention(), rows=Curve((1,), (step_s,)))
    pacer = Pacer(CostTracker(cost), itl_s=itl_s) if foreseen else None
    engine = Engine(state, FakeExecutor(step_s), StepBudget(chunk, max_seqs), time.perf_counter, pacer=pacer)
    if token_s:
        engine.pace = Steady(token_s)
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab=VOCAB,
        kv_blocks=blocks,
        kv_bytes=100 * blocks,
        block_tokens=BLOCK_TOKENS,
        max_num_batched_tokens=chunk,
        max_num_seqs=max_seqs,
        policy=policy,
        itl_s=itl_s,
        least_itl_s=itl_s / 10,
        ttft_s=ttft_s,
        token_s=token_s,
        tenant_weights=tenant_weights or {},
    )
    return engine, info


def factory(**options: object) -> functools.partial[tuple[Engine, EngineInfo]]:
    """What `EngineService` takes."""
    return functools.partial(build, **options)  # type: ignore[arg-type]
