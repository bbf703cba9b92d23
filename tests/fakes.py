"""Stand-ins whose answers one can compute by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legato.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from legato.core.request import Request
from legato.core.view import RowSource

VOCAB = 97


def next_token(tokens: Sequence[int], vocab: int = VOCAB) -> int:
    """The token after `tokens`: sum of (position + 1) * token, modulo `vocab`. A misplaced token changes it."""
    return sum((position + 1) * token for position, token in enumerate(tokens)) % vocab


def expected_output(prompt: Iterable[int], count: int, vocab: int = VOCAB) -> list[int]:
    """The `count` tokens that greedily follow `prompt`: what any schedule whatever must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[-count:] if count else []


def expected_scores(request: Request) -> list[TokenLogprobs]:
    """What is said of the tokens of a prompt that are scored: what would come in their place, and what is there."""
    start, stop = request.scored_rows
    return [score_of(next_token(request.prompt[:at]), request.prompt[at]) for at in range(start + 1, stop + 1)]


def score_of(likely: int, token: int) -> TokenLogprobs:
    """An entry one can compute by hand."""
    return TokenLogprobs(-float(token), ((likely, 0.0),))


class FakeExecutor:
    """Keeps KV as block -> offset -> (digest of all up to there, token), and samples `next_token` of what it reads.

    Asserts that every position is written once and in order, by its own request or by one with the same beginning and
    salt, again only after a preemption; that no block is written by two requests of one step; and that whatever is
    read is what the request would have written itself. No row of a prompt is scored twice, and each is in its chunk.
    """

    def __init__(self, block_tokens: int, vocab: int = VOCAB) -> None:
        self.block_tokens = block_tokens
        self.vocab = vocab
        self.steps = 0
        self.rows = 0
        self.moved = 0
        self.kv: dict[int, dict[int, tuple[int, int]]] = {}
        self.host: dict[int, dict[int, tuple[int, int]]] = {}
        self._written: dict[int, int] = {}
        self._scored: dict[int, int] = {}
        self._source: RowSource | None = None

    def bind(self, source: RowSource) -> None:
        self._source = source

    def give_up(self, plan: StepPlan) -> None:
        """A plan that was applied and will not be executed, since the step before it failed: its victims start anew."""
        for request_id in plan.preempt:
            self._written[request_id] = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert self._source is not None
        self.steps += 1
        self.rows += plan.rows
        for request_id in plan.preempt:
            self._written[request_id] = 0
        for move in self._source.moves(plan.step):
            self.moved += 1
            if move.saves:
                self.host[move.slot] = dict(self.kv[move.block])
            else:
                self.kv[move.block] = dict(self.host[move.slot])
        writers: dict[int, int] = {}
        entries = list(zip(plan.request_ids, plan.starts, plan.counts, plan.samples, strict=True))
        assert len(set(plan.request_ids)) == len(entries), "a request is twice in a step"
        for request_id, start, count, _ in entries:
            if request_id in plan.admit:
                assert not self._written.get(request_id), f"request {request_id} is admitted and has positions"
                self._written[request_id] = start
            self._write(request_id, start, start + count, writers)
        chunks = {request_id: (start, start + count) for request_id, start, count, _ in entries}
        scores = tuple(self._score(*scored, chunks[scored[0]]) for scored in plan.scores)
        sampled = []
        for request_id, start, count, sample in entries:
            token = self._read(request_id, start + count)
            if sample:
                sampled.append((request_id, token))
        ids, sampled_tokens = tuple(i for i, _ in sampled), tuple(token for _, token in sampled)
        return StepResult(plan.step, ids, sampled_tokens, prompt_logprobs=scores)

    def _score(self, request_id: int, start: int, stop: int, chunk: tuple[int, int]) -> PromptLogprobs:
        assert self._source is not None
        request = self._source.request(request_id)
        first, last = request.scored_rows
        assert start == self._scored.get(request_id, first), f"request {request_id} is scored twice, or a row is not"
        assert chunk[0] <= start < stop <= min(chunk[1], last), f"request {request_id} is not computed there"
        self._scored[request_id] = stop
        read = (self._read(request_id, row + 1) for row in range(start, stop))
        entries = [score_of(likely, request.prompt[row]) for row, likely in enumerate(read, start + 1)]
        return PromptLogprobs(request_id, start + 1, tuple(entries))

    def _digests(self, request_id: int, stop: int) -> list[int]:
        """One number a position, that depends on everything before it: the stand-in for keys and values."""
        assert self._source is not None
        request = self._source.request(request_id)
        beside = dict(request.attachments)
        digest, digests = hash(request.cache_salt), []
        for position, token in enumerate(self._source.tokens(request_id)[:stop]):
            digest = hash((digest, token, beside.get(position)))
            digests.append(digest)
        return digests

    def _write(self, request_id: int, start: int, stop: int, writers: dict[int, int]) -> None:
        assert self._source is not None
        tokens, blocks = self._source.tokens(request_id), self._source.blocks(request_id)
        written = self._written.get(request_id, 0)
        assert start == written, f"request {request_id} has {written} positions and computes from {start}"
        assert start < stop <= len(tokens), f"request {request_id} computes to {stop} of {len(tokens)} tokens"
        digests = self._digests(request_id, stop)
        for position in range(start, stop):
            block, offset = blocks[position // self.block_tokens], position % self.block_tokens
            writer = writers.setdefault(block, request_id)
            assert writer == request_id, f"requests {writer} and {request_id} write block {block} in one step"
            self.kv.setdefault(block, {})[offset] = (digests[position], tokens[position])
        self._written[request_id] = stop

    def _read(self, request_id: int, stop: int) -> int:
        assert self._source is not None
        tokens, blocks = self._source.tokens(request_id), self._source.blocks(request_id)
        digests, total = self._digests(request_id, stop), 0
        for position in range(stop):
            found = self.kv[blocks[position // self.block_tokens]][position % self.block_tokens]
            wanted = (digests[position], tokens[position])
            assert found == wanted, f"request {request_id} reads {found} at {position} where it would write {wanted}"
            total += (position + 1) * found[1]
        return total % self.vocab


class FakeClock:
    """Advances by `tick_s` each time it is asked."""

    def __init__(self, tick_s: float = 1.0) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s
