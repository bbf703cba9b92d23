"""`Schedule`: which requests come when, and what a step may do. With the model, all that a trial depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from legato.core.policy import POLICIES
from legato.core.request import Request, Sampling, StopRule
from legato.errors import ConfigError
from legato.exec.kv import ITEM_BYTES, KvDtype


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, and when it comes and goes. `i`, `j` below are indices of arrivals; steps are those of the trial.

    The prompt: `length` tokens of the made-up text `document`; `head` and `tail`, unless 0, replace one of its first
    tokens and its last one. `follows`: prompt and answer of an earlier arrival stand before it, as in a conversation.
    `after`: comes `delay_steps` after the end of that earlier arrival; None: after the beginning.
    `abort_steps`: is taken back so many steps after it came, if it still runs.
    """

    document: int
    length: int
    max_tokens: int = 1
    head: int = 0
    tail: int = 0
    follows: int | None = None
    after: int | None = None
    delay_steps: int = 0
    abort_steps: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    priority: int = 0
    salt: str = ""

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )

    def request(self, request_id: int, prompt: tuple[int, ...]) -> Request:
        """The request that a scheduler is given."""
        return Request(
            request_id,
            prompt,
            self.sampling,
            StopRule(self.max_tokens),
            priority=self.priority,
            cache_salt=self.salt.encode(),
            tenant=self.salt,
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A trial, as plain data: equal schedules on one model do the same.

    `step_tokens`, `max_seqs`: the step budget; the former is the largest chunk. `pool_blocks`: of KV; `host_blocks`:
    places for what they have to give up. `policy`: a name of `POLICIES`. `ahead`: each step is planned while the one
    before is under way.
    `preempt`: (step, n): the running request n (modulo their number) loses its KV before that step.
    """

    arrivals: tuple[Arrival, ...]
    step_tokens: int
    max_seqs: int
    pool_blocks: int
    host_blocks: int = 0
    cache: bool = True
    threads: int = 1
    kv_dtype: KvDtype = "f16"
    policy: str = "fcfs"
    ahead: bool = False
    preempt: tuple[tuple[int, int], ...] = ()

    def prompt_tokens(self, index: int) -> int:
        """Length of an arrival's prompt, with the conversation before it."""
        arrival = self.arrivals[index]
        if arrival.follows is None:
            return arrival.length
        return arrival.length + self.prompt_tokens(arrival.follows) + self.arrivals[arrival.follows].max_tokens

    @property
    def longest_tokens(self) -> int:
        """The most tokens, prompt and answer, that one of its requests reaches."""
        return max(self.prompt_tokens(i) + arrival.max_tokens for i, arrival in enumerate(self.arrivals))

    def to_dict(self) -> dict[str, Any]:
        """Itself for JSON, without what has its default value."""
        values = _without_defaults(self)
        values["arrivals"] = [_without_defaults(arrival) for arrival in self.arrivals]
        if self.preempt:
            values["preempt"] = [list(pair) for pair in self.preempt]
        return values

    @classmethod
    def from_dict(cls, data: Any) -> Schedule:
        """What `to_dict` gave. Raises ConfigError, naming the field, for anything else."""
        fields = _checked(cls, data, "the schedule")
        arrivals = fields["arrivals"]
        if not isinstance(arrivals, list) or not arrivals:
            raise ConfigError("the schedule has no list of arrivals")
        fields["arrivals"] = tuple(Arrival(**_checked(Arrival, a, f"arrival {i}")) for i, a in enumerate(arrivals))
        preempt = fields.get("preempt", [])
        if not isinstance(preempt, list) or not all(_is_pair(entry) for entry in preempt):
            raise ConfigError("preempt of the schedule is no list of [step, number]")
        fields["preempt"] = tuple((step, which) for step, which in preempt)
        schedule = cls(**fields)
        schedule._verify()
        return schedule

    def _verify(self) -> None:
        for index, arrival in enumerate(self.arrivals):
            if arrival.length < 1 or arrival.max_tokens < 1:
                raise ConfigError(f"arrival {index} has {arrival.length} + {arrival.max_tokens} tokens; 1 + 1 at least")
            for name in ("follows", "after"):
                other = getattr(arrival, name)
                if other is not None and not 0 <= other < index:
                    raise ConfigError(f"{name} of arrival {index} is {other}, which is no earlier one")
        if not 1 <= self.max_seqs <= self.step_tokens or self.threads < 1 or self.host_blocks < 0:
            raise ConfigError("the schedule needs threads >= 1, host_blocks >= 0 and step_tokens >= max_seqs >= 1")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy of the schedule is {self.policy!r}; it must be one of {', '.join(POLICIES)}")
        if self.kv_dtype not in ITEM_BYTES:
            raise ConfigError(
                f"kv_dtype of the schedule is {self.kv_dtype!r}; it must be one of {', '.join(ITEM_BYTES)}"
            )


def _without_defaults(record: Arrival | Schedule) -> dict[str, Any]:
    values = {field.name: (getattr(record, field.name), field.default) for field in dataclasses.fields(record)}
    return {name: value for name, (value, default) in values.items() if value != default}


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
}


def _checked(cls: type[Any], data: Any, where: str) -> dict[str, Any]:
    """`data` if it has all that `cls` needs, nothing else, and plain fields of the right type."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is {type(data).__name__}, not an object")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in data:
        if name not in fields:
            raise ConfigError(f"{where} has a field '{name}'; there are {', '.join(fields)}")
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                raise ConfigError(f"{where} has no field '{name}'")
            continue
        wanted = _TYPES.get(str(field.type), (object,))
        if not isinstance(data[name], wanted) or (isinstance(data[name], bool) and field.type != "bool"):
            raise ConfigError(f"{name} of {where} is {data[name]!r}; it must be {field.type}")
    return dict(data)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(type(number) is int and number >= 0 for number in entry)
