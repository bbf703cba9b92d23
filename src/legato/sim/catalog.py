"""Devices and models by name, from `catalog.toml`."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from legato.core.shape import Attention
from legato.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """What a data sheet says. `flops`: operations a second; `bandwidth`: bytes a second; `memory`: bytes."""

    key: str
    name: str
    flops: float
    bandwidth: float
    memory: float
    source: str


@dataclass(frozen=True, slots=True)
class Model:
    """What a model's configuration says. `active`: parameters that one token goes through; all of a dense model.

    `windows`: (layers, tokens) of those with a sliding window, or none.
    """

    key: str
    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    source: str
    active: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int, int] | None = None

    @property
    def attention(self) -> Attention:
        """What rows look back at. A step reads the keys of a chunk's prefix once: rows of all blocks share them."""
        windowed, tokens = self.windows or (0, 0)
        layers: tuple[tuple[int, int | None], ...] = ((self.layers - windowed, None),)
        if windowed:
            layers = (*layers, (windowed, tokens))
        return Attention(layers, block_rows=1 << 30)

    def parameters_read(self, rows: int) -> float:
        """Parameters that a step of so many tokens reads: of a mixture, the experts that any of them is likely to meet.

        Each token meets `experts_per_token` of `experts`, as if at random.
        """
        if not self.experts:
            return self.parameters
        met = self.experts_per_token / self.experts
        in_experts = (self.parameters - self.active) / (1.0 - met)
        return self.parameters - in_experts * (1.0 - met) ** rows


@functools.cache
def _catalog() -> dict[str, Any]:
    return tomllib.loads(resources.files("legato.sim").joinpath("catalog.toml").read_text(encoding="utf-8"))


def devices() -> dict[str, Device]:
    """Those that are known, by key."""
    return {key: Device(key=key, **values) for key, values in _catalog()["devices"].items()}


def models() -> dict[str, Model]:
    """Those that are known, by key."""
    found = {}
    for key, values in _catalog()["models"].items():
        given = dict(values)
        given.setdefault("active", given["parameters"])
        windows = given.pop("windows", None)
        found[key] = Model(key=key, windows=None if windows is None else (windows[0], windows[1]), **given)
    return found


def device(name: str) -> Device:
    """By key, whatever its case. Raises ConfigError with those there are."""
    found = devices().get(name.lower())
    if found is None:
        raise ConfigError(f"device '{name}' is not known; there are {', '.join(devices())}, and this")
    return found


def model(name: str) -> Model:
    """By key, whatever its case. Raises ConfigError with those there are."""
    found = models().get(name.lower())
    if found is None:
        raise ConfigError(f"model '{name}' is not known; there are {', '.join(models())}")
    return found
