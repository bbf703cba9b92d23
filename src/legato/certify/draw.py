"""`random_schedule`: schedules drawn so that chunks end where something could go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from legato.certify.rig import RigShape
from legato.certify.schedule import Arrival, Schedule
from legato.core.policy import POLICIES
from legato.exec.kv import KvDtype

ATTENTION_TILE = 64  # positions of keys that the kernels visit together
_DOCUMENTS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """How large schedules get.

    `usual_tokens`: prompts of one trial together; one in eight has `most_tokens`. `usual_steps`: about so many steps a
    trial takes; smaller chunks go with shorter prompts. `long_answer_tokens`: of the few trials that overload the pool.
    """

    step_tokens: int
    prompt_tokens: int
    answer_tokens: int
    long_answer_tokens: int
    block_tokens: int
    max_seqs: int
    pool_blocks: int
    threads: int
    kv_dtypes: tuple[KvDtype, ...]
    requests: int = 6
    usual_tokens: int = 256
    most_tokens: int = 800
    usual_steps: int = 32

    @classmethod
    def of(cls, shape: RigShape, *, step_tokens: int, answer_tokens: int) -> Limits:
        """As large as the rig has room for."""
        context = shape.max_model_len
        # An answer of two blocks outgrows the block that an admission leaves free for it.
        long_answer_tokens = min(2 * shape.block_tokens + answer_tokens, context - 1)
        return cls(
            step_tokens=step_tokens,
            prompt_tokens=max(1, min(shape.max_rows, context - long_answer_tokens)),
            answer_tokens=min(answer_tokens, context - 1),
            long_answer_tokens=long_answer_tokens,
            block_tokens=shape.block_tokens,
            max_seqs=shape.max_seqs,
            pool_blocks=shape.pool_blocks,
            threads=shape.threads,
            kv_dtypes=shape.kv_dtypes,
        )


def random_schedule(rng: random.Random, limits: Limits) -> Schedule:
    """A schedule within `limits`. All that is random comes from `rng`."""
    if min(limits.step_tokens, limits.max_seqs) > 1 and rng.random() < 1 / 5:
        return _overload(rng, limits)
    step_tokens = _step_tokens(rng, limits)
    most_tokens = limits.most_tokens if rng.random() < 1 / 8 else limits.usual_tokens
    left_tokens = min(most_tokens, step_tokens * limits.usual_steps)
    count = rng.randint(1, limits.requests)
    arrivals: list[Arrival] = []
    lengths: list[int] = []
    while len(arrivals) < count and left_tokens:
        most = min(limits.prompt_tokens, left_tokens if count == 1 else -(-left_tokens // 2))
        arrival, length = _arrival(rng, limits, step_tokens, most, arrivals, lengths)
        arrivals.append(arrival)
        lengths.append(length)
        left_tokens -= min(left_tokens, arrival.length)
    longest = max(length + arrival.max_tokens for length, arrival in zip(lengths, arrivals, strict=True))
    needed = -(-longest // limits.block_tokens)
    is_tight = rng.random() < 0.4
    most_seqs = min(step_tokens, limits.max_seqs)
    schedule = Schedule(
        arrivals=tuple(arrivals),
        step_tokens=step_tokens,
        max_seqs=rng.choice([1, min(2, most_seqs), most_seqs, most_seqs, most_seqs]),
        pool_blocks=min(limits.pool_blocks, needed + rng.randint(0, 2) if is_tight else max(2 * needed, needed + 8)),
        cache=rng.random() < 0.85,
    )
    return _with_circumstances(rng, limits, schedule)


def _overload(rng: random.Random, limits: Limits) -> Schedule:
    """Answers that outgrow the pool: somebody has to give up KV, and computes it again or finds it again."""
    step_tokens = max(2, _step_tokens(rng, limits))
    seqs = min(step_tokens, limits.max_seqs)
    arrivals = [
        Arrival(
            document=rng.randrange(_DOCUMENTS),
            length=rng.randint(1, min(limits.prompt_tokens, 2 * limits.block_tokens, 8 * step_tokens)),
            max_tokens=rng.randint(-(-limits.long_answer_tokens // 2), limits.long_answer_tokens),
            delay_steps=rng.randint(0, 2),
        )
        for _ in range(rng.randint(2, 4))
    ]
    index = rng.randrange(len(arrivals))
    said = arrivals[index].length + arrivals[index].max_tokens
    if said < limits.prompt_tokens and rng.random() < 0.7:
        # By then others have pushed its blocks out, to host memory if there is some.
        length = rng.randint(1, min(8, limits.prompt_tokens - said))
        arrivals.append(Arrival(document=0, length=length, follows=index, after=rng.randrange(len(arrivals))))
    schedule = Schedule(
        arrivals=tuple(_with_manners(rng, arrival) for arrival in arrivals),
        step_tokens=step_tokens,
        max_seqs=seqs,
        pool_blocks=limits.pool_blocks,
        cache=rng.random() < 0.9,
    )
    blocks = -(-schedule.longest_tokens // limits.block_tokens) + rng.randint(0, 1)
    return _with_circumstances(rng, limits, replace(schedule, pool_blocks=min(limits.pool_blocks, blocks)))


def _with_circumstances(rng: random.Random, limits: Limits, schedule: Schedule) -> Schedule:
    """What may happen to any schedule: preemption without need, swapping, threads, KV type, planning ahead, policy."""
    prompts_tokens = sum(arrival.length for arrival in schedule.arrivals)
    steps = prompts_tokens // schedule.step_tokens + max(arrival.max_tokens for arrival in schedule.arrivals)
    forced = rng.randint(1, 4) if rng.random() < 0.35 else 0
    return replace(
        schedule,
        host_blocks=rng.randint(1, schedule.pool_blocks) if schedule.cache and rng.random() < 0.75 else 0,
        threads=rng.randint(2, limits.threads) if limits.threads > 1 and rng.random() < 0.3 else 1,
        kv_dtype=rng.choice(limits.kv_dtypes),
        ahead=rng.random() < 0.3,
        preempt=tuple(sorted((rng.randint(0, steps), rng.randint(0, 5)) for _ in range(forced))),
        policy=rng.choice(list(POLICIES)),
    )


def _step_tokens(rng: random.Random, limits: Limits) -> int:
    """The largest chunk: tiny, near a block or a tile, anything, or the most."""
    most = limits.step_tokens
    wanted = rng.choice(
        [
            rng.randint(1, 4),
            rng.randint(1, 4 * limits.block_tokens),
            _near(rng, limits.block_tokens, 3),
            _near(rng, ATTENTION_TILE, 3),
            rng.randint(1, most),
            most,
        ]
    )
    return max(1, min(most, wanted))


def _arrival(
    rng: random.Random,
    limits: Limits,
    step_tokens: int,
    most: int,
    earlier: list[Arrival],
    lengths: list[int],
) -> tuple[Arrival, int]:
    """One more request, often with a beginning that an earlier one has too; and the length of its whole prompt."""
    arrival = Arrival(
        document=rng.randrange(_DOCUMENTS),
        length=_length(rng, limits, step_tokens, most),
        max_tokens=min(limits.answer_tokens, rng.choice([1, 2, 3, 5, limits.answer_tokens, limits.answer_tokens])),
        delay_steps=rng.choice([0, 0, 0, 1, 2, 5]),
    )
    before_tokens = 0
    if earlier and rng.random() < 0.75:
        index = rng.randrange(len(earlier))
        said_tokens = lengths[index] + earlier[index].max_tokens
        if rng.random() < 0.2 and said_tokens + arrival.length <= limits.prompt_tokens:
            arrival = replace(arrival, follows=index)
            before_tokens = said_tokens
        elif earlier[index].follows is None and earlier[index].length <= most:
            arrival = _like(rng, limits, arrival, earlier[index])
        else:
            arrival = replace(arrival, document=earlier[index].document)
        if rng.random() < 0.45:
            arrival = replace(arrival, after=index, delay_steps=rng.choice([0, 0, 1, 3]))
    if rng.random() < 0.12:
        arrival = replace(arrival, abort_steps=rng.randint(0, 8))
    return _with_manners(rng, arrival), before_tokens + arrival.length


def _like(rng: random.Random, limits: Limits, arrival: Arrival, other: Arrival) -> Arrival:
    """With the prompt of another one: all of it, as far as its own length goes, or but for one token."""
    same = replace(arrival, document=other.document, length=other.length, head=other.head, tail=other.tail)
    kind = rng.choice(["same", "longer", "head", "tail", "last of a block"])
    if kind == "longer":
        return replace(arrival, document=other.document)
    if kind == "head":
        return replace(same, head=rng.randint(1, 2))
    if kind == "tail":
        return replace(same, tail=rng.randint(1, 2))
    whole_blocks = other.length // limits.block_tokens
    if kind == "last of a block" and whole_blocks:
        return replace(same, length=rng.randint(1, whole_blocks) * limits.block_tokens, tail=rng.randint(1, 2))
    return same


def _with_manners(rng: random.Random, arrival: Arrival) -> Arrival:
    """Sampling, priority, tenant. Few seeds and values, so that answers alone are often known already."""
    if rng.random() < 0.4:
        arrival = replace(
            arrival,
            temperature=rng.choice([0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            seed=rng.randrange(2),
        )
    return replace(
        arrival,
        priority=rng.choice([0, 0, 0, 0, 0, 0, 1, -1]),
        salt="tenant" if rng.random() < 0.08 else "",
    )


def _length(rng: random.Random, limits: Limits, step_tokens: int, most: int) -> int:
    """Of a prompt: near multiples of the chunk, of a block, of a tile; or anything; or short."""
    wanted = rng.choice(
        [
            _near(rng, step_tokens, max(1, most // step_tokens)),
            _near(rng, step_tokens, 2),
            _near(rng, limits.block_tokens, max(1, most // limits.block_tokens)),
            _near(rng, ATTENTION_TILE, max(1, most // ATTENTION_TILE)),
            rng.randint(1, most),
            rng.randint(1, min(most, 2 * limits.block_tokens)),
        ]
    )
    return max(1, min(most, wanted))


def _near(rng: random.Random, unit: int, most: int) -> int:
    """A multiple of `unit`, one less or one more."""
    return rng.randint(1, most) * unit + rng.choice([-1, 0, 1])
