"""Legato: LLM serving that never stalls a token stream. `from legato import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.engine.params import SamplingParams
    from legato.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

_HOMES = {"LLM": "legato.llm", "Completion": "legato.llm", "SamplingParams": "legato.engine.params"}


def __getattr__(name: str) -> Any:
    """Imports the public names when first used, so that `import legato.core` stays free of third-party modules."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("legato-serve")
        except PackageNotFoundError:
            return "0+unknown"
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'legato' has no attribute {name!r}")
