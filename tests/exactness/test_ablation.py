"""The ablation's control: with each row multiplied by itself, schedules change no bit.

So what `benchmarks/ablation.py` finds with other linear layers comes from these. Whether a vendor's library is
row-invariant is its own affair, differs by machine, and is not asserted: only that the same model is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("legato._native")

from benchmarks.ablation import (
    BLOCK_TOKENS,
    COMPANY,
    Bf16VendorOps,
    Difference,
    VendorOps,
    blocks_for,
    differences,
    numpy_run,
    products,
    round_to_bf16,
)

from exec.backends import RandomCheckpoint, reference_backend
from exec.tiny_specs import TINY_SPECS
from legato.exec.ops import FloatArray
from legato.exec.reference.ops import ReferenceOps, Rows

SPEC = TINY_SPECS["llama"]
TOKENS = 4
PROMPTS = [list(range(start, start + length)) for start, length in ((0, 70), (9, 33), (50, 1))]


def measured(ops: type[ReferenceOps]) -> list[Difference]:
    width = blocks_for(PROMPTS, TOKENS)
    backend = reference_backend(
        RandomCheckpoint(SPEC), blocks=COMPANY * width, block_tokens=BLOCK_TOKENS, positions=width * BLOCK_TOKENS
    )
    return differences("", numpy_run(ops, SPEC, backend.weights, backend.kv), PROMPTS, TOKENS, SPEC.vocab)


def test_row_by_row_no_schedule_changes_a_bit() -> None:
    for found in measured(ReferenceOps):
        assert found.logits == len(PROMPTS) * TOKENS * SPEC.vocab
        assert (found.other_logits, found.max_abs, found.other_tokens) == (0, 0.0, 0), found.schedule
        assert found.same_tokens == [None] * len(PROMPTS)


@pytest.mark.parametrize(("ops", "tolerance"), [(VendorOps, 1e-4), (Bf16VendorOps, 0.5)])
def test_vendor_layers_compute_the_same_model_up_to_rounding(ops: type[ReferenceOps], tolerance: float) -> None:
    for found in measured(ops):
        assert found.max_abs < tolerance, found.schedule


def test_a_linear_layer_that_depends_on_the_number_of_rows_is_seen_on_every_schedule() -> None:
    class CountingOps(ReferenceOps):
        def linear(
            self, x: Rows, weights: Sequence[Rows], bias: FloatArray | None = None, residual: Rows | None = None
        ) -> Rows:
            return super().linear(x, weights, bias, residual) * np.float32(1 + len(x) % 7 * 2**-20)

    for found in measured(CountingOps):
        assert found.other_logits > 0, found.schedule


def test_a_text_diverges_at_its_first_other_token() -> None:
    found = Difference("", "", same_tokens=[None, None])
    alone = np.array([0, 1, 2], np.float32)
    for position, other in enumerate([[0, 1, 2], [0, 3, 2], [5, 1, 2]]):
        found.add(1, position, np.array(other, np.float32), alone)
    assert (found.same_tokens, found.other_tokens, found.other_logits, found.logits) == ([None, 1], 2, 2, 9)
    assert (found.diverged(1), found.diverged(2), found.max_abs, found.median_same_tokens()) == (0, 1, 5.0, 1)


def test_products_of_512_rows_are_compared_with_themselves() -> None:
    assert products([(32, 64)])[-1]["other_than_512"] == 0


def test_round_to_bf16_takes_the_nearest_and_ties_to_even() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.3], np.float32)
    assert round_to_bf16(values).tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7, -3.296875]
