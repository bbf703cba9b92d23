"""`TraceRecorder`: keeps all that the question "why was this token late?" needs, in a file."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import legato
from legato.core.prefix import root_key
from legato.core.request import Request
from legato.core.trace import TracedStep
from legato.engine.terms import Terms
from legato.engine.wire import EngineInfo
from legato.explain.record import FORMAT, Asked, Ended, Event, Fitted, Header, Options, block_names, stepped
from legato.explain.ring import TraceWriter


class TraceRecorder:
    """A `Recorder` that writes to `path`, `limit_bytes` at most. A disk that fails ends the trace, not the server.

    `now_s`: the server's clock. `say`: told if the trace ends early.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        model: str,
        info: EngineInfo,
        now_s: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._model = model
        self._info = info
        self._now_s = now_s
        self._say = say
        self._root = secrets.token_bytes(16)
        self._writer: TraceWriter | None = None
        self._early: list[Event] = []  # what comes before the engine has said by what it foresees steps
        self._closed = False

    def begins(self, cost: dict[str, Any] | None) -> None:
        """Writes the header; later ones are costs that were fitted anew."""
        if self._writer is not None:
            assert cost is not None, "steps that were foreseen are no longer"
            self._write(Fitted(self._now_s(), cost))
        elif not self._closed:
            self._writer = TraceWriter(self._path, self._header(cost), self._limit_bytes)
            early, self._early = self._early, []
            for line in early:
                self._write(line)

    def asked(self, request: Request, terms: Terms, tokenized_s: tuple[float, float] | None) -> None:
        """Writes what a request wants; of its prompt, names of blocks."""
        sampling = request.sampling
        drawn = sampling.temperature > 0.0
        root = root_key(self._root, request.cache_salt)
        self._write(
            Asked(
                request.request_id,
                request.arrival_s,
                len(request.prompt),
                request.stop.max_tokens,
                request.priority,
                request.tenant,
                terms.itl_s,
                terms.ttft_s,
                terms.deadline_s,
                tokenized_s,
                drawn,
                drawn and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0),
                sampling.logprobs is not None,
                sampling.prompt_logprobs is not None,
                block_names(root, request.prompt, self._info.block_tokens),
            )
        )

    def stepped(self, step: TracedStep, dispatched_s: float) -> None:
        """Writes the step."""
        self._write(stepped(step, dispatched_s))

    def ended(self, request_id: int, reason: str, now_s: float) -> None:
        """Writes how a request ended."""
        generated = 0 if self._writer is None else self._writer.generated(request_id)
        self._write(Ended(request_id, reason, generated, now_s))

    def close(self) -> None:
        """Nothing is written after this."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._closed = True

    def _write(self, line: Event) -> None:
        if self._closed:
            return
        if self._writer is None:
            self._early.append(line)
            return
        try:
            self._writer.write(line)
        except OSError as error:
            self._say(f"the trace ends here: {self._path} cannot be written: {error.strerror}")
            self.close()

    def _header(self, cost: dict[str, Any] | None) -> Header:
        info = self._info
        options = Options(
            kv_blocks=info.kv_blocks,
            block_tokens=info.block_tokens,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_seqs=info.max_num_seqs,
            policy=info.policy,
            prefill_share=info.prefill_share,
            prefer=info.prefer,
            ttft_s=info.ttft_s,
            tenant_weights=info.tenant_weights,
            long_prefill_token_threshold=info.long_prefill_token_threshold,
            max_num_partial_prefills=info.max_num_partial_prefills,
            async_scheduling=info.async_scheduling,
            prefix_caching=info.prefix_caching,
        )
        return Header(FORMAT, legato.__version__, self._model, time.time(), self._now_s(), info.itl_s, options, cost)
