"""Log-probabilities of prompts: the bits of one unchunked pass, whatever the chunks, the company, the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exec.backends import RandomCheckpoint, needs_native, reference_backend
from exec.fakes import FakeSource, plan
from exec.tiny_specs import TINY_SPECS
from legato.core.budget import StepBudget
from legato.core.plan import StepPlan, TokenLogprobs
from legato.core.policy import FCFS
from legato.core.request import Request, Sampling, StopRule
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState
from legato.errors import EngineError
from legato.exec.batch import Batch, build_batch
from legato.exec.executor import Backend, ModelExecutor
from legato.exec.ops import FloatArray

MIB = 1 << 20
PROMPTS = json.loads((Path(__file__).parent.parent / "exactness" / "prompts.json").read_text())
Entries = dict[int, list[TokenLogprobs | None]]


class Counted:
    """A backend that counts the rows whose logits it computes."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.logit_rows = 0

    def run(self, batch: Batch) -> FloatArray:
        self.logit_rows += len(batch.logit_rows)
        return self.backend.run(batch)


class Rig:
    """One state and one executor, for one request after another: what the first ones leave is cached for the next."""

    def __init__(self, backend: Backend, *, kv_blocks: int, block_tokens: int) -> None:
        self.backend = Counted(backend)
        self.executor = ModelExecutor(self.backend, block_tokens=block_tokens)
        self.state = SchedulerState(kv_blocks, block_tokens, max_model_len=2048)
        self.executor.bind(self.state)

    def serve(self, requests: Sequence[Request], budget: StepBudget, preempt_at: int = -1) -> Entries:
        """The entries of each prompt. `preempt_at`: the step before which everybody is preempted."""
        entries: Entries = {r.request_id: [None] * (r.scored_rows[0] + 1) for r in requests}
        for request in requests:
            self.state.submit(request)
        before, rows, steps = self.backend.logit_rows, 0, 0
        while self.state.has_work:
            step = plan_step(self.state, budget, FCFS)
            if steps == preempt_at:
                running = tuple(r.request_id for r in self.state.running)
                step = StepPlan(self.state.next_step, (), (), (), (), preempt=running)
            steps += 1
            self.state.apply(step)
            result = self.executor.execute(step)
            self.state.commit(result)
            rows += sum(step.samples) + sum(stop - start for _, start, stop in step.scores)
            for scored in result.prompt_logprobs:
                assert scored.start == len(entries[scored.request_id]), "an entry is lost or comes twice"
                entries[scored.request_id].extend(scored.entries)
        assert self.backend.logit_rows - before == rows, "logits that nobody wanted"
        return entries


def scored(request_id: int, prompt: Sequence[int], start: int = 0, top: int = 2) -> Request:
    sampling = Sampling(prompt_logprobs=top, prompt_logprobs_start=start)
    return Request(request_id, tuple(prompt), sampling, StopRule(max_tokens=2))


def neighbours(first_id: int) -> list[Request]:
    """Two that do not ask: one that decodes, one with a prompt of several chunks."""
    code = tuple(PROMPTS["code"])
    return [
        Request(first_id, code[:5], stop=StopRule(max_tokens=9)),
        Request(first_id + 1, code[7:77], Sampling(temperature=1.0), StopRule(max_tokens=3)),
    ]


def test_the_oracle_gives_the_same_entries_for_any_chunks_and_logits_a_step() -> None:
    checkpoint = RandomCheckpoint(replace(TINY_SPECS["qwen2"], layers=TINY_SPECS["qwen2"].layers[:1]))
    prompt = np.random.default_rng(3).integers(0, 101, 50).tolist()

    def entries(max_tokens: int, logit_rows: int, preempt_at: int) -> list[TokenLogprobs | None]:
        rig = Rig(
            reference_backend(checkpoint, blocks=16, block_tokens=16, positions=80), kv_blocks=16, block_tokens=16
        )
        budget = StepBudget(max_tokens, min(4, max_tokens), logit_rows)
        return rig.serve([scored(1, prompt)], budget, preempt_at)[1]

    alone = entries(100, 100, -1)
    assert len(alone) == 50 and alone[0] is None and None not in alone[1:]
    for case in [(1, 1, 20), (7, 64, 3), (16, 5, 8), (100, 13, 2)]:
        assert entries(*case) == alone, case


def test_an_entry_is_the_log_softmax_of_the_row_before() -> None:
    checkpoint = RandomCheckpoint(TINY_SPECS["qwen2"])
    prompt = tuple(np.random.default_rng(4).integers(0, 101, 9).tolist())
    rig = Rig(reference_backend(checkpoint, blocks=4, block_tokens=16, positions=40), kv_blocks=4, block_tokens=16)
    found = rig.serve([scored(1, prompt)], StepBudget(64, 4))[1]
    source = FakeSource()
    source.add(Request(1, prompt), blocks=[0])
    whole = replace(plan((1, 0, 9, True)), scores=((1, 0, 8),))
    batch = build_batch(whole, source, 16)
    assert batch.logit_rows.tolist() == [8, *range(8)], "those that sample come first"
    logits = reference_backend(checkpoint, blocks=4, block_tokens=16, positions=40).run(batch)[1:].astype(np.float64)
    values = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for position, row in enumerate(values, 1):
        entry = found[position]
        assert entry is not None
        assert entry.chosen == pytest.approx(row[prompt[position]], abs=1e-5)
        assert entry.rank == 1 + (row > row[prompt[position]]).sum()
        assert [token for token, _ in entry.top] == np.argsort(-row)[:2].tolist()


def test_a_row_of_a_prompt_that_is_not_finite_fails_the_step_and_names_the_request() -> None:
    class Damaged:
        def run(self, batch: Batch) -> FloatArray:
            logits = np.zeros((len(batch.logit_rows), 5), np.float32)
            logits[2, 1] = np.nan
            return logits

    executor, source = ModelExecutor(Damaged(), block_tokens=16), FakeSource()
    source.add(scored(3, (1, 2, 3, 4)), blocks=[0])
    source.add(Request(4, (1, 2)), blocks=[1])
    executor.bind(source)
    with pytest.raises(EngineError, match="request 3 are not finite"):
        executor.execute(replace(plan((3, 0, 3, False), (4, 0, 2, True)), scores=((3, 0, 3),)))


@needs_native
@pytest.mark.timeout(900)
def test_smollm2_gives_the_same_bits_from_many_starts_in_chunks_of_32_beside_neighbours(smollm2_path: Path) -> None:
    """vllm#8268, #14239, sglang#31639: L = 100, C = 32. Against one pass alone without chunks, bit for bit.

    Every third start, and those around blocks. All go through one prefix cache, every third run is preempted on its
    way, and every fifth has few logits.
    """
    from legato.exec.model import load_model

    model = load_model(
        smollm2_path, max_num_batched_tokens=256, max_num_seqs=8, max_logit_rows=128, kv_tokens=4096, threads=1
    )
    prompt = PROMPTS["prose"][:100]
    alone = Rig(model.backend, kv_blocks=model.kv_blocks, block_tokens=model.block_tokens)
    wanted = alone.serve([scored(1, prompt)], StepBudget(256, 8, 128))[1]
    assert alone.state.next_step == 2, "one pass, and one more token"
    assert len(wanted) == 100 and wanted[0] is None and None not in wanted[1:]
    rig = Rig(model.backend, kv_blocks=model.kv_blocks, block_tokens=model.block_tokens)
    starts = [start for start in range(100) if start % 3 == 0 or start % 32 in (0, 1, 31)]
    for number, start in enumerate(starts):
        request = scored(3 * start, prompt, start)
        one, other = neighbours(3 * start + 1)
        budget = StepBudget(32, 4, 7 if number % 5 == 4 else 64)
        preempt_at = number % 4 + 1 if number % 3 == 1 else -1
        found = rig.serve([one, request, other], budget, preempt_at)[request.request_id]
        assert found == [None] * max(start, 1) + wanted[max(start, 1) :], f"start {start}"
    assert rig.state.cached_tokens > 32 * 12, "starts from 33 on use the cache"


MEASURE = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from exec.test_prompt_logprobs import PROMPTS, Rig, scored
from legato.core.budget import StepBudget
from legato.exec.memory import process_memory
from legato.exec.model import load_model

model = load_model(Path(sys.argv[1]), max_num_batched_tokens=256, max_num_seqs=8, kv_tokens=4096, threads=1)
rig = Rig(model.backend, kv_blocks=model.kv_blocks, block_tokens=model.block_tokens)
peaks = []
for length in (200, 1600):
    entries = rig.serve([scored(length, PROMPTS["code"][:length])], StepBudget(256, 8))[length]
    assert len(entries) == length
    peaks.append(process_memory().peak)
print(json.dumps({"peaks": peaks, "predicted": model.footprint.peak}))
"""


@needs_native
def test_scoring_a_prompt_eight_times_as_long_takes_no_more_memory_than_its_answer(smollm2_path: Path) -> None:
    """1,600 rows of logits would be 300 MiB; the entries themselves are a few hundred bytes each."""
    paths = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    command = [sys.executable, "-c", MEASURE, str(smollm2_path), *paths]
    out = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout.splitlines()[-1])
    short, long = found["peaks"]
    print({key: np.array(value) // MIB for key, value in found.items()})
    assert long - short < 4 * MIB
    assert found["predicted"] == pytest.approx(long, rel=0.05)
