"""Where the time of a step goes: phases of the executor, and kinds of operation within the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class StepClock:
    """Seconds by phase of `ModelExecutor.execute`, summed over steps. `now`: seconds (`time.perf_counter`)."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last = 0.0
        self.steps = 0
        self.seconds: dict[str, float] = {}

    def start(self) -> None:
        """Begins a step."""
        self.steps += 1
        self._last = self._now()

    def lap(self, phase: str) -> None:
        """Adds the time since `start` or the last lap to `phase`."""
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def profile_table(clock: StepClock, kernels_s: Mapping[str, float]) -> str:
    """A line a phase and a line a kind of operation: ms a step, percent of the whole. `kernels_s`: seconds by kind."""
    total_s = sum(clock.seconds.values()) or 1.0
    steps = max(clock.steps, 1)

    def line(name: str, seconds: float) -> str:
        return f"{name:<24}{1e3 * seconds / steps:9.3f} ms{100 * seconds / total_s:7.1f} %"

    lines = [line(phase, seconds) for phase, seconds in clock.seconds.items()]
    lines += [line(f"  run: {kind}", s) for kind, s in sorted(kernels_s.items(), key=lambda item: -item[1])]
    return "\n".join(lines)
