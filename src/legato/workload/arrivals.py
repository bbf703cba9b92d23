"""When requests come and what they are: `Arrival`, and processes that make them without end."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from legato.errors import ConfigError
from legato.workload.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, in seconds from the start, and its tokens.

    `shared`: (text, tokens) of what its prompt begins with, one after the other: equal texts are equal tokens, of which
    there may be more than the prompt has. The rest is its own.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    shared: tuple[tuple[int, int], ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """Times between arrivals, `rate` a second on average. `cv`: their standard deviation over their mean: 1 is Poisson,
    more comes in bursts (gamma). `on_s`, `off_s`: nobody comes in the pauses; the rate is that of the time between.
    """

    rate: float
    cv: float = 1.0
    on_s: float = math.inf
    off_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"rate is {self.rate:g} requests a second; it must be above 0")
        if not 0 < self.cv <= 100:
            raise ConfigError(f"cv is {self.cv:g}; it must be above 0 and at most 100, and 1 is Poisson")
        if self.on_s <= 0 or self.off_s < 0:
            raise ConfigError(f"on_s is {self.on_s:g} and off_s {self.off_s:g}; they are lengths of time")

    def times(self, seed: int) -> Iterator[float]:
        """Without end, ascending. A higher rate is the same sequence, closer together."""
        random, busy_s = Random(seed), 0.0
        shape = self.cv**-2
        while True:
            gap = random.expovariate(1.0) if self.cv == 1.0 else random.gammavariate(shape, 1.0 / shape)
            busy_s += gap / self.rate
            yield busy_s + (busy_s // self.on_s) * self.off_s if self.off_s else busy_s


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prompts that begin alike: one of `branches[0]` texts, after it one of `branches[1]` that belong to it, and so on.

    `tokens`: of a text at each level. `skew`: the k-th text of a level is chosen k**skew times less often than the
    first (Zipf); 0: all alike.
    """

    branches: tuple[int, ...]
    tokens: tuple[int, ...]
    skew: float = 0.0

    @classmethod
    def of(cls, text: str, skew: float = 0.0) -> PrefixTree:
        """Reads `1x512,8x256`: one text of 512 tokens, with 8 of 256 after it. Raises ConfigError."""
        levels = [part.strip().partition("x") for part in text.split(",")]
        if not all(n.isdecimal() and size.isdecimal() and int(n) and int(size) for n, _, size in levels):
            raise ConfigError(f"--prefix-tree is '{text}'; it is BRANCHESxTOKENS a level, as in 1x512,8x256")
        if skew < 0:
            raise ConfigError(f"--prefix-skew is {skew:g}; 0 chooses all texts alike, 1 the first far more often")
        return cls(tuple(int(n) for n, _, _ in levels), tuple(int(size) for _, _, size in levels), skew)

    def chooser(self) -> Callable[[Random], tuple[tuple[int, int], ...]]:
        """Draws a path from the root, as `Arrival.shared` has it."""
        weights = [list(accumulate((k + 1) ** -self.skew for k in range(count))) for count in self.branches]
        nodes = list(accumulate(self.branches, operator.mul))  # at each level
        before = [0, *accumulate(nodes)]  # at all levels above it

        def choose(random: Random) -> tuple[tuple[int, int], ...]:
            path, node = [], 0
            for level, (count, size) in enumerate(zip(self.branches, self.tokens, strict=True)):
                node = node * count + random.choices(range(count), cum_weights=weights[level])[0]
                path.append((before[level] + node, size))
            return tuple(path)

        return choose


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a process. `tree`: what prompts begin with, beside `prompt` tokens of their own. `tenants`: so many,
    each as likely as the others.
    """

    process: Process
    prompt: Lengths
    output: Lengths
    tree: PrefixTree | None = None
    tenants: int = 1
    seed: int = 0

    def __iter__(self) -> Iterator[Arrival]:
        """Without end. The same for equal arguments; a higher rate is the same requests, closer together."""
        sizes = Random(self.seed + 1)
        choose = None if self.tree is None else self.tree.chooser()
        for at_s in self.process.times(self.seed):
            prompt, output = self.prompt.draw(sizes), self.output.draw(sizes)
            shared = choose(sizes) if choose else ()
            tenant = f"tenant-{sizes.randrange(self.tenants)}" if self.tenants > 1 else ""
            yield Arrival(at_s, prompt + sum(tokens for _, tokens in shared), output, shared, tenant)


def poisson_trace(rate: float, duration_s: float, prompt: Lengths, output: Lengths, seed: int) -> tuple[Arrival, ...]:
    """Poisson arrivals at `rate` a second, for so long. The same for every server."""
    trace = []
    for arrival in Traffic(Process(rate), prompt, output, seed=seed):
        if arrival.at_s >= duration_s:
            break
        trace.append(arrival)
    return tuple(trace)


def periodic(every_s: float, duration_s: float) -> Iterator[float]:
    """0, every_s, 2 every_s, … below duration_s."""
    return (k * every_s for k in range(math.ceil(duration_s / every_s)))
