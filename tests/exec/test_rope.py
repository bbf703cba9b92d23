import numpy as np
import pytest

from legato.exec.rope import rope_nbytes, rope_table
from legato.exec.spec import RopeSpec


def test_angles_are_position_times_frequency_over_factor_and_scale() -> None:
    table = rope_table(RopeSpec(100.0, 4, interleaved=False, linear_scale=8.0, factors=(1.0, 2.0)), 3000)
    angle = 2999 * np.array([1.0, 100.0**-0.5 / 2]) / 8
    np.testing.assert_allclose(table.cos[2999], np.cos(angle), rtol=1e-6)
    np.testing.assert_allclose(table.sin[2999], np.sin(angle), rtol=1e-6)


@pytest.mark.parametrize("positions", [1, 1023, 1024, 1025, 5000])
def test_a_longer_table_begins_with_the_shorter_one(positions: int) -> None:
    """Else a rotation would depend on how far a request may go, and chunked prompts on the chunk."""
    spec = RopeSpec(500_000.0, 64, interleaved=True)
    long, short = rope_table(spec, 6000), rope_table(spec, positions)
    assert short.cos.tobytes() == long.cos[:positions].tobytes()
    assert short.sin.tobytes() == long.sin[:positions].tobytes()
    assert short.nbytes == rope_nbytes(spec, positions)
