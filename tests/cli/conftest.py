from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.fake_engine import build
from server.fake_model import fake_model


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `LLM` runs the made-up engine, which repeats its prompt."""

    def engine(config: Any, path: Path, report: Any) -> Any:
        return build(report, max_seqs=config.max_num_seqs, chunk=config.max_num_batched_tokens)

    monkeypatch.setattr("legato.llm.resolve_model", lambda config, progress: Path("fake.gguf"))
    monkeypatch.setattr("legato.llm.open_text", lambda config, path: fake_model().text)
    monkeypatch.setattr("legato.llm.build_engine", engine)
