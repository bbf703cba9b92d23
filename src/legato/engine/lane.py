"""Where steps are computed: in the caller's thread, or in one of their own while the caller plans the next one."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable

from legato.core.plan import StepResult

Run = Callable[[], StepResult]


class Inline:
    """Computes a step when its result is asked for."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def start(self, run: Run) -> None:
        """Takes the next step."""
        self._run = run

    def result(self) -> StepResult:
        """What the step gave; raises what it raised."""
        run, self._run = self._run, None
        assert run is not None, "no step was started"
        return run()

    def close(self) -> None:
        """Nothing to end."""


class Background:
    """Computes one step at a time in a thread that it owns. `fileno` becomes readable when a step is done."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._result: StepResult | BaseException | None = None
        self._wake = threading.Semaphore(0)
        self._told, self._tell = socket.socketpair()
        self._thread = threading.Thread(target=self._work, name="legato-steps", daemon=True)
        self._thread.start()

    def start(self, run: Run) -> None:
        """Begins to compute."""
        assert self._run is None, "a step is being computed"
        self._run = run
        self._wake.release()

    def fileno(self) -> int:
        """For `select`."""
        return self._told.fileno()

    def wait(self, for_s: float) -> bool:
        """Whether the step is done, at the latest after so long."""
        return bool(select.select([self], [], [], max(for_s, 0.0))[0])

    def result(self) -> StepResult:
        """Waits for the step. Raises what it raised. An interrupt while waiting leaves it to be asked for again."""
        select.select([self], [], [])
        self._told.recv(1)
        result, self._result, self._run = self._result, None, None
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result

    def close(self) -> None:
        """Ends the thread after the step that it computes."""
        if self._run is not None:
            with contextlib.suppress(BaseException):
                self.result()
        self._wake.release()
        self._thread.join()
        self._told.close()
        self._tell.close()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            run = self._run
            if run is None:
                return
            try:
                self._result = run()
            except BaseException as error:  # whoever asks for the result gets it
                self._result = error
            self._tell.send(b"x")
