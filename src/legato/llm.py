"""`LLM`: the engine in your own process, for offline use. `from legato import LLM, SamplingParams`."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from legato.assemble import build_engine, open_text, resolve_model
from legato.config import DEFAULT_MODEL, EngineConfig
from legato.core.plan import TokenLogprobs
from legato.core.request import Finished, Request
from legato.engine.loop import StepEvents
from legato.engine.params import SamplingParams, random_seed
from legato.engine.stop import TextStream
from legato.engine.worker import ReportProgress
from legato.errors import ConfigError, EngineError, LegatoError, PromptTooLong, RequestError

Prompt = str | Sequence[int]
Conversation = Sequence[dict[str, str]]


@dataclass(slots=True)
class Completion:
    """One finished sequence. `prompt`: its tokens. `index`: 0 to n - 1. `finish_reason`: "stop" or "length".

    `token_ids` are all generated tokens; the text leaves out what stopped it. `logprobs`: one entry a token, if asked.
    `ttft_s`: from the call to the first token. `cached_tokens`: of the prompt, found in the prefix cache.
    `prompt_logprobs`: one entry a token of the prompt, if asked: None for the first one and those not wanted.
    """

    prompt: tuple[int, ...]
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ttft_s: float = 0.0
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """A sequence under way."""

    completion: Completion
    stream: TextStream


class LLM:
    """A model ready to complete text. Not for use from two threads.

    `LLM("smollm2-135m", max_num_batched_tokens=256)`: the options are those of `EngineConfig`. Raises ModelError,
    ConfigError, OutOfMemory.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, on_load: ReportProgress | None = None, **options: Any) -> None:
        # Nobody else asks here: a step planned ahead would gain nothing but a thread.
        self.config = EngineConfig.of(model, {"async_scheduling": False, **options})
        if self.config.policy == "fair":
            raise ConfigError("policy fair shares among tenants, and offline there is one; choose slo or fcfs")
        report = on_load or _ignore
        path = resolve_model(self.config, lambda done, total: report("fetching", done, total))
        self.text = open_text(self.config, path)
        self.engine, self.info = build_engine(self.config, path, report)
        self.generated_tokens = 0
        """Tokens generated since the model was loaded."""
        self._ids = itertools.count(1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, in their order, n for each. A prompt is text or token ids.

        `progress`: a bar on stderr; None: if that is a terminal. Raises RequestError before anything is computed.
        """
        return self._complete([self._tokens(prompt) for prompt in _listed(prompts)], sampling, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answers to one conversation or to several. A conversation is a list of {"role": ..., "content": ...}."""
        several: Sequence[Any] = messages if messages and not isinstance(messages[0], dict) else [messages]
        return self._complete([self.chat_tokens(one) for one in several], sampling, progress)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of one completion's text as they come. Leaving the loop early ends the request."""
        params = sampling or SamplingParams()
        if params.n != 1:
            raise RequestError("a stream has one sequence; use generate for n > 1", field="n")
        runs: dict[int, _Run] = {}
        pieces: list[str] = []
        try:
            self._submit(runs, [self._tokens(prompt)], params)
            while runs:
                self._advance(runs, time.perf_counter(), lambda run, text: pieces.append(text))
                yield from pieces
                pieces.clear()
        finally:
            self._abandon(runs)

    def close(self) -> None:
        """Writes what `kv_cache_dir` is still to get, within seconds. Not needed otherwise; also as `with LLM(…)`."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat_tokens(self, messages: Conversation) -> tuple[int, ...]:
        """The tokens of a conversation, as its chat template writes it, ready for the answer."""
        return tuple(self.text.encode_chat(self.text.render([dict(message) for message in messages])))

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        tokens = tuple(self.text.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        if not tokens:
            raise RequestError("the prompt is empty; it needs at least 1 token", field="prompt")
        if min(tokens) < 0 or max(tokens) >= self.text.vocab:
            raise RequestError(f"prompt has a token id outside 0 to {self.text.vocab - 1}", field="prompt")
        return tokens

    def _complete(
        self, prompts: list[tuple[int, ...]], sampling: SamplingParams | None, progress: bool | None
    ) -> list[Completion]:
        params = sampling or SamplingParams()
        runs: dict[int, _Run] = {}
        started_s = time.perf_counter()
        try:
            completions = self._submit(runs, prompts, params)
            show = sys.stderr.isatty() if progress is None else progress
            with _Bar(len(completions), show) as bar:
                while runs:
                    before = len(runs)
                    generated = self._advance(runs, started_s, _collect)
                    bar.update(before - len(runs), generated)
        finally:
            self._abandon(runs)
        return completions

    def _submit(
        self, runs: dict[int, _Run], prompts: list[tuple[int, ...]], params: SamplingParams
    ) -> list[Completion]:
        params.check_vocabulary(self.text.vocab)
        context = self.engine.state.context
        for prompt in prompts:
            if len(prompt) >= context:
                raise PromptTooLong(
                    f"the prompt has {len(prompt)} tokens; {context} fit, of which the answer needs at least 1",
                    field="prompt",
                )
        completions, seed = [], random_seed()
        for prompt in prompts:
            rule = params.stop_rule(eos_ids=self.text.eos_ids, room=context - len(prompt))
            prompt_logprobs: list[TokenLogprobs | None] = []  # the first of n fills it for all
            for index in range(params.n):
                sampling = params.sampling(index, seed=seed, score_prompt=index == 0)
                now_s = time.perf_counter()
                due_s = math.inf if self.config.ttft_ms is None else now_s + self.config.ttft_ms / 1000
                request = Request(next(self._ids), prompt, sampling, rule, now_s, due_s=due_s)
                self.engine.submit(request)
                if sampling.prompt_logprobs is not None:
                    first, stop = request.scored_rows
                    prompt_logprobs.extend([None] * (len(prompt) - stop + first))
                completion = Completion(prompt, index, prompt_logprobs=prompt_logprobs)
                run = _Run(completion, TextStream(self.text.token_bytes, params.stop, params.min_tokens))
                runs[request.request_id] = run
                completions.append(run.completion)
        return completions

    def _advance(self, runs: dict[int, _Run], started_s: float, show: Callable[[_Run, str], None]) -> int:
        """One step: text to `show`, finished runs out of `runs`. Returns the tokens generated."""
        events = self.engine.step()
        ended = {finished.request_id: finished for finished in events.finished}
        for request_id, tokens in events.cached:
            if request_id in runs:
                runs[request_id].completion.cached_tokens = tokens
        for scored in events.prompt_logprobs:
            if scored.request_id in runs:
                runs[scored.request_id].completion.prompt_logprobs.extend(scored.entries)
        for column, (request_id, token_id) in enumerate(zip(events.request_ids, events.token_ids, strict=True)):
            run = runs.get(request_id)
            if run is not None:
                self._take(runs, run, request_id, token_id, _logprobs(events, column), ended.get(request_id), show)
                if len(run.completion.token_ids) == 1:
                    run.completion.ttft_s = time.perf_counter() - started_s
        for finished in ended.values():
            if finished.request_id in runs and finished.reason == "error":
                raise EngineError(finished.message)
        self.generated_tokens += len(events.token_ids)
        return len(events.token_ids)

    def _take(
        self,
        runs: dict[int, _Run],
        run: _Run,
        request_id: int,
        token_id: int,
        logprobs: TokenLogprobs | None,
        ended: Finished | None,
        show: Callable[[_Run, str], None],
    ) -> None:
        completion, stream = run.completion, run.stream
        completion.token_ids.append(token_id)
        if logprobs is not None:
            completion.logprobs.append(logprobs)
        reason = ended.reason if ended is not None else ""
        text = stream.finish() if reason == "stop" else stream.feed(token_id)
        if stream.stop_hit is not None:
            self.engine.abort(request_id)
            reason = "stop"
        elif reason == "length":
            text += stream.finish()
        if text:
            show(run, text)
        if reason:
            completion.finish_reason = reason
            del runs[request_id]

    def _abandon(self, runs: dict[int, _Run]) -> None:
        """Takes back what is unfinished, after an error or an interrupt."""
        for request_id in runs:
            self.engine.abort(request_id)
        runs.clear()


class _Bar:
    """A progress bar on stderr: sequences done, tokens a second. Nothing at all when not wanted."""

    def __init__(self, total: int, show: bool) -> None:
        self._progress: Any = None
        self._generated = 0
        self._started_s = time.perf_counter()
        if show and total:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[speed]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task("completing", total=total, speed="")

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, finished: int, generated: int) -> None:
        if self._progress is not None:
            self._generated += generated
            speed = self._generated / max(time.perf_counter() - self._started_s, 1e-9)
            self._progress.update(self._task, advance=finished, speed=f"{speed:,.0f} tok/s")


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _collect(run: _Run, text: str) -> None:
    run.completion.text += text


def _logprobs(events: StepEvents, column: int) -> TokenLogprobs | None:
    return events.logprobs[column] if events.logprobs else None


def _ignore(stage: str, done: int, total: int) -> None:
    pass


__all__ = ["LLM", "Completion", "LegatoError", "SamplingParams"]
