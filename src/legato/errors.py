"""Every error a user can meet, in one tree.

LegatoError
├── ModelError            a model cannot be obtained, read or run
│   ├── ModelNotFound     no such path, alias or hub id
│   ├── ModelUnsupported  readable, but an architecture or tensor type that is not implemented
│   └── ModelCorrupt      truncated, wrong checksum, tensors missing, extra or of a wrong shape
├── ConfigError           an option out of bounds, or options that contradict each other
│   └── OutOfMemory       the predicted footprint does not fit; carries both numbers
├── RequestError          one request cannot be served; nothing else is disturbed
│   ├── PromptTooLong     longer than the context or the whole KV pool
│   └── UnknownField      an API field that is not honoured
├── EngineError           the engine process failed or is gone
├── TraceError            a trace cannot be read, or does not hold what is asked of it
└── BenchError            a measurement of a server says nothing
    ├── ServerUnreachable nothing answers there, or no OpenAI server
    ├── RunInvalid        the run does not show what it is meant to show; carries the reasons
    └── NoCapacity        even the lowest rate misses a limit
"""

from __future__ import annotations

from collections.abc import Sequence


class LegatoError(Exception):
    """Base of all errors that are the user's situation. Messages carry the number, the limit and the next move."""


class ModelError(LegatoError):
    """A model cannot be obtained, read or run."""


class ModelNotFound(ModelError):
    """No such path, alias or hub id."""


class ModelUnsupported(ModelError):
    """Readable, but an architecture, tensor type or option that is not implemented."""


class ModelCorrupt(ModelError):
    """Truncated, wrong checksum, or tensors missing, extra or of a wrong shape."""


class ConfigError(LegatoError):
    """An option out of bounds, or options that contradict each other."""


class OutOfMemory(ConfigError):
    """The predicted footprint does not fit in memory."""


class RequestError(LegatoError):
    """One request cannot be served. `field`: the API field at fault, where there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(RequestError):
    """The prompt (with at least one token of output) exceeds the context or the whole KV pool."""


class UnknownField(RequestError):
    """An API field that is not known or not honoured."""


class EngineError(LegatoError):
    """The engine process failed or is gone."""


class TraceError(LegatoError):
    """A trace cannot be read, or does not hold what is asked of it."""


class BenchError(LegatoError):
    """A measurement of a server says nothing."""


class ServerUnreachable(BenchError):
    """Nothing answers at the address, or what answers is no OpenAI server."""


class RunInvalid(BenchError):
    """The run does not show what it is meant to show; nothing is reported. `reasons`: why, and what to change."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("this run shows nothing, so nothing is reported: " + "; ".join(reasons))


class NoCapacity(BenchError):
    """Even the lowest rate misses a limit."""
