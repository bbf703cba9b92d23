import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exec.fakes import FakeSource, plan
from legato.core.request import Request
from legato.exec.batch import build_batch


def test_columns_of_a_mixed_step_are_those_one_writes_by_hand() -> None:
    source = FakeSource()
    source.add(Request(7, prompt=(10, 11, 12)), blocks=[5], generated=[13])
    source.add(Request(9, prompt=tuple(range(100, 140))), blocks=[2, 8, 3])
    batch = build_batch(plan((7, 3, 1, True), (9, 15, 4, False)), source, block_tokens=16)
    assert batch.tokens.tolist() == [13, 115, 116, 117, 118]
    assert batch.positions.tolist() == [3, 15, 16, 17, 18]
    assert batch.seq_row_starts.tolist() == [0, 1, 5]
    assert batch.block_tables.tolist() == [[5, 0], [2, 8]]
    assert batch.logit_rows.tolist() == [0]


def test_an_empty_plan_gives_empty_columns() -> None:
    batch = build_batch(plan(), FakeSource(), block_tokens=16)
    assert (len(batch.tokens), len(batch.positions), len(batch.logit_rows)) == (0, 0, 0)
    assert batch.seq_row_starts.tolist() == [0]


entries = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 40), st.booleans(), st.integers(0, 9)), min_size=1, max_size=8
)


@given(entries)
def test_every_row_is_the_token_at_its_position_of_its_sequence(drawn: list[tuple[int, int, bool, int]]) -> None:
    source, block_tokens, planned = FakeSource(), 16, []
    for request_id, (start, count, samples, unplanned) in enumerate(drawn):
        prompt = tuple(1000 * request_id + p for p in range(start + count + unplanned))
        blocks = [100 * request_id + b for b in range(-(-len(prompt) // block_tokens))]
        source.add(Request(request_id, prompt), blocks)
        planned.append((request_id, start, count, samples))
    batch = build_batch(plan(*planned), source, block_tokens)
    expected = [(r, p) for r, start, count, _ in planned for p in range(start, start + count)]
    assert batch.tokens.tolist() == [1000 * r + p for r, p in expected]
    assert batch.positions.tolist() == [p for _, p in expected]
    for s, (r, start, count, _) in enumerate(planned):
        assert batch.seq_row_starts[s + 1] - batch.seq_row_starts[s] == count
        needed = -(-(start + count) // block_tokens)
        assert batch.block_tables[s, :needed].tolist() == [100 * r + b for b in range(needed)]
    assert batch.logit_rows.tolist() == [batch.seq_row_starts[s + 1] - 1 for s, entry in enumerate(planned) if entry[3]]
    for column in (batch.tokens, batch.positions, batch.seq_row_starts, batch.block_tables, batch.logit_rows):
        assert column.dtype == np.int32 and column.flags.c_contiguous
