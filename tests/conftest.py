"""What all tests share: the real models, pulled once and then cached under $LEGATO_HOME, and the kernels' state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from legato.models.pull import pull

# Read by libgomp when the kernels are first imported, here and in the engines that tests start: threads that spin for a
# team-mate whose core is taken double the suite's time on a busy machine.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")


@pytest.fixture(autouse=True)
def _same_isa() -> Iterator[None]:
    """Puts back the instruction set that a test has changed: AVX2's integer activations give other texts."""
    from legato import _native

    before = _native.isa()
    yield
    _native.set_isa(before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the default model."""
    return pull("smollm2-135m", notice=print)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M."""
    return pull("gemma3-270m", notice=print)
