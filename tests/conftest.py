"""The two real models that tests run on: pulled once, then cached under $LEGATO_HOME."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legato.models.pull import pull

# Read by libgomp when the kernels are first imported, here and in the engines that tests start: threads that spin for a
# team-mate whose core is taken double the suite's time on a busy machine.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the default model."""
    return pull("smollm2-135m", notice=print)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M."""
    return pull("gemma3-270m", notice=print)
