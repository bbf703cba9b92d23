"""Traces of real traffic, read line by line: Mooncake, Azure LLM, BurstGPT, and JSON lines of one's own."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from legato.errors import ConfigError
from legato.workload.arrivals import Arrival

MOONCAKE_BLOCK = 512
"""Tokens of the text that one of Mooncake's hash_ids stands for."""

Parse = Callable[[Any], Arrival | None]

_TIMES = ("at_s", "arrival_s", "timestamp_s")
_PROMPTS = ("prompt_tokens", "input_tokens", "input_length", "prompt_len")
_OUTPUTS = ("output_tokens", "max_tokens", "output_length", "output_len")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_LAYOUTS = (
    "JSON lines with timestamp, input_length, output_length and hash_ids (Mooncake) or with at_s, prompt_tokens and"
    " output_tokens; CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure LLM) or with Timestamp, Request"
    " tokens and Response tokens (BurstGPT)"
)


def read_trace(path: Path, speed: float = 1.0) -> Iterator[Arrival]:
    """The requests of a trace, the first at 0, `speed` times as fast as they were recorded.

    Those that had no answer (BurstGPT has them) are left out. Memory: one line. Raises ConfigError with the number of
    the line and the reason: a missing column, a length below 0, a time before the one above.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            yield from _arrivals(path, lines, speed)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not text; a trace is {_LAYOUTS}") from error


def _arrivals(path: Path, lines: Iterator[str], speed: float) -> Iterator[Arrival]:
    first = next(lines, "")
    if not first.strip():
        raise _empty(path)
    parse, rows = _json_lines(first, lines) if first.lstrip().startswith("{") else _csv_rows(path, first, lines)
    begin_s, last_s = None, 0.0
    for number, row in rows:
        try:
            arrival = parse(row)
        except _Bad as error:
            raise ConfigError(f"trace {path}, line {number}: {error}") from None
        if arrival is None:
            continue
        if begin_s is None:
            begin_s = last_s = arrival.at_s
        if arrival.at_s < last_s:
            raise ConfigError(
                f"trace {path}, line {number}: it comes {last_s - arrival.at_s:g} s before the line above; sort it by"
                " time first"
            )
        last_s = arrival.at_s
        at_s = (arrival.at_s - begin_s) / speed
        yield Arrival(at_s, arrival.prompt_tokens, arrival.output_tokens, arrival.shared, arrival.tenant)
    if begin_s is None:
        raise _empty(path)


def _empty(path: Path) -> ConfigError:
    return ConfigError(f"trace {path} has no requests; a trace is {_LAYOUTS}")


class _Bad(ValueError):
    """What is wrong with a line."""


def _json_lines(first: str, lines: Iterator[str]) -> tuple[Parse, Iterator[tuple[int, Any]]]:
    def rows() -> Iterator[tuple[int, Any]]:
        yield 1, first
        yield from ((number, line) for number, line in enumerate(lines, 2) if line.strip())

    def parse(line: str) -> Arrival | None:
        try:
            row = json.loads(line)
        except ValueError:
            raise _Bad("it is no JSON") from None
        if not isinstance(row, dict):
            raise _Bad("it is no JSON object")
        return _mooncake(row) if "timestamp" in row else _own(row)

    return parse, rows()


def _csv_rows(path: Path, first: str, lines: Iterator[str]) -> tuple[Parse, Iterator[tuple[int, Any]]]:
    head = next(csv.reader([first.lstrip("\ufeff")]), [])
    for columns, time in ((_AZURE, _date_s), (_BURSTGPT, _number)):
        if set(columns) & set(head):
            missing = [name for name in columns if name not in head]
            if missing:
                raise ConfigError(f"trace {path}, line 1: there is no column {', '.join(missing)}")
            places = [head.index(name) for name in columns]
            return _columns(places, time), enumerate(csv.reader(lines), 2)
    raise ConfigError(f"trace {path}, line 1: '{first.strip()[:60]}' begins no layout that is known: {_LAYOUTS}")


def _columns(places: Sequence[int], time: Callable[[str], float]) -> Parse:
    def parse(row: list[str]) -> Arrival | None:
        if not row:
            return None
        if len(row) <= max(places):
            raise _Bad(f"it has {len(row)} columns, and {max(places) + 1} are needed")
        at, prompt, output = (row[place] for place in places)
        return _arrival(time(at), _whole(prompt, "prompt"), _whole(output, "answer"))

    return parse


def _mooncake(row: dict[str, Any]) -> Arrival | None:
    """Milliseconds, and the hash of each 512 tokens of the prompt."""
    for name in ("input_length", "output_length"):
        if name not in row:
            raise _Bad(f"there is no {name}")
    prompt = _whole(row["input_length"], "prompt")
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(text, int) and text >= 0 for text in ids):
        raise _Bad("hash_ids are no whole numbers")
    shared = tuple((text, MOONCAKE_BLOCK) for text in ids)
    return _arrival(_number(row["timestamp"]) / 1000, prompt, _whole(row["output_length"], "answer"), shared)


def _own(row: dict[str, Any]) -> Arrival | None:
    at = _one_of(row, _TIMES)
    prompt, output = _whole(_one_of(row, _PROMPTS), "prompt"), _whole(_one_of(row, _OUTPUTS), "answer")
    shared = row.get("shared", [])
    try:
        texts = tuple((int(text), int(tokens)) for text, tokens in shared)
    except (TypeError, ValueError):
        raise _Bad("shared is no list of [text, tokens]") from None
    return _arrival(_number(at), prompt, output, texts, str(row.get("tenant", "")))


def _arrival(
    at_s: float, prompt: int, output: int, shared: tuple[tuple[int, int], ...] = (), tenant: str = ""
) -> Arrival | None:
    if not prompt:
        raise _Bad("the prompt has 0 tokens")
    return Arrival(at_s, prompt, output, shared, tenant) if output else None


def _one_of(row: dict[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise _Bad(f"there is no {names[0]}")


def _whole(value: Any, what: str) -> int:
    try:
        tokens = int(value)
        if tokens != float(value):
            raise ValueError
    except (TypeError, ValueError):
        raise _Bad(f"'{value}' is no number of tokens of the {what}") from None
    if tokens < 0:
        raise _Bad(f"the {what} has {tokens} tokens")
    return tokens


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _Bad(f"'{value}' is no time") from None


def _date_s(text: str) -> float:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        raise _Bad(f"'{text}' is no time as in 2023-11-16 18:17:03.97") from None
