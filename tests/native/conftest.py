from collections.abc import Iterator

import pytest

from legato import _native


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
