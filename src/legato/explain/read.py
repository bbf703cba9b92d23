"""`read_trace`: what `TraceWriter` wrote, checked line by line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from legato.core.cost import StepCost
from legato.errors import TraceError
from legato.explain.record import FORMAT, Asked, Ended, Fitted, Header, Line, Stepped, cost_of
from legato.explain.ring import older_path

_TRIES = 3
_decode = msgspec.json.Decoder(Line).decode


@dataclass(slots=True)
class Trace:
    """What is known of a run. `requests`, `ends`: by request id. `steps`: in order.

    `notice`: what the user should know of how it was read.
    """

    header: Header
    requests: dict[int, Asked] = field(default_factory=dict)
    ends: dict[int, Ended] = field(default_factory=dict)
    steps: list[Stepped] = field(default_factory=list)
    notice: str = ""
    _costs: list[tuple[int, StepCost | None]] = field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        """Whether steps at the beginning of the run are no longer there."""
        return bool(self.steps) and self.steps[0].step > 0

    def cost(self, index: int) -> StepCost | None:
        """By what `steps[index]` was foreseen, its speeds as they were then; None if it was not."""
        cost = self._costs[bisect_right(self._costs, index, key=lambda entry: entry[0]) - 1][1]
        step = self.steps[index]
        return None if cost is None or step.predicted_s is None else cost.scaled(step.scale, step.memory_scale)

    def take(self, line: Line) -> None:
        """Adds a line. ValueError, KeyError or TypeError for one that contradicts those before it or itself."""
        match line:
            case Header():
                self._costs.append((len(self.steps), cost_of(line.cost)))
            case Fitted():
                self._costs.append((len(self.steps), cost_of(line.cost)))
            case Asked():
                self.requests.setdefault(line.id, line)
            case Ended():
                self.ends[line.id] = line
            case Stepped():
                _check(line, self.steps[-1] if self.steps else None)
                self.steps.append(line)


def read_trace(path: Path) -> Trace:
    """What is in `path`, and before it in `path`.1, if that is of the same run. TraceError with line and reason.

    A last line that was cut, by a crash or because it is being written, is left out and told in `notice`. If the files
    changed places meanwhile they are read again.
    """
    for _ in range(_TRIES):
        before = _identity(path)
        trace = _read_both(path)
        if _identity(path) == before:
            break
    return trace


def _identity(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1  # between two files, or never there: reading tells


def _read_both(path: Path) -> Trace:
    header = _first_header(path)
    trace = Trace(header)
    older = older_path(path)
    if older.exists() and _begun(_first_header(older)) == _begun(header):
        _read(older, trace)
    _read(path, trace)
    return trace


def _first_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = _decode(first)
    except msgspec.MsgspecError as error:
        said = "it is empty" if not first else f"line 1 is no header ({error})"
        raise TraceError(f"{path} is no trace: {said}; legato serve --trace FILE writes one") from error
    if not isinstance(header, Header):
        raise TraceError(f"{path} is no trace: line 1 is no header; give the file of legato serve --trace whole")
    if header.format != FORMAT:
        raise TraceError(
            f"{path} has format {header.format}, written by legato {header.legato}; this one reads format {FORMAT}"
        )
    return header


def _begun(header: Header) -> tuple[float, float]:
    return header.unix_s, header.monotonic_s


def _read(path: Path, trace: Trace) -> None:
    for number, text in _lines(path):
        try:
            trace.take(_decode(text))
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError, IndexError) as error:
            said = f"{path}, line {number}: {str(error) or type(error).__name__}"
            if text.endswith(b"\n"):
                raise TraceError(
                    f"{said}; the lines before it can be read by themselves: head -n {number - 1}"
                ) from error
            trace.notice = f"{said}; the file ends in the middle of this line, which is left out"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error


def _check(step: Stepped, before: Stepped | None) -> None:
    if not len(step.ids) == len(step.starts) == len(step.counts) == len(step.samples) >= step.decodes:
        raise ValueError(f"the columns of step {step.step} differ in length")
    if before is not None and step.step <= before.step:
        raise ValueError(f"step {step.step} comes after step {before.step}")
    if step.shape is not None and len(step.shape) != 9:
        raise ValueError(f"the shape of step {step.step} has {len(step.shape)} numbers instead of 9")
