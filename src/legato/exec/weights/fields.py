"""Checked reading of a model's description: GGUF key-values or a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping

from legato.errors import ModelCorrupt, ModelUnsupported

# Bounds that no model comes near: they keep a flipped bit from becoming a loop over billions or a MemoryError.
MAX_LAYERS = 4096
MAX_WIDTH = 1 << 22
MAX_CONTEXT = 1 << 31


class Fields:
    """Typed access to `values`. Every error is a ModelCorrupt naming `source`, the key and what was found."""

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        self.source = source
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def raw(self, key: str) -> object:
        """The value as it is, None if absent."""
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_WIDTH) -> int:
        """An integer in [low, high]. A list (GGUF's per-layer form) must repeat one value."""
        value = self._get(key, default)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise ModelUnsupported(
                    f"{self.source}: {self._prefix}{key} differs from layer to layer, not implemented"
                )
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, value, "an integer")
        if not low <= value <= high:
            raise self._wrong(key, value, f"between {low:,} and {high:,}")
        return value

    def token_id(self, key: str, vocab: int) -> int | None:
        """A token id below `vocab`; None if absent or anything else: who needs the token checks it."""
        value = self.raw(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab else None

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite float, above zero unless said otherwise."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        if positive and value <= 0:
            raise self._wrong(key, value, "above zero")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested mapping, None if absent or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self.source}, {key}")

    def is_null(self, key: str) -> bool:
        """Whether the key is there, with null: not the same as absent where the default is not null."""
        return self._prefix + key in self._values and self.raw(key) is None

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """The same with `defaults` for what is absent."""
        return Fields({**defaults, **self._values}, self.source, self._prefix)

    def _get(self, key: str, default: object) -> object:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise ModelCorrupt(f"{self.source}: {self._prefix}{key} is missing")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.source}: {self._prefix}{key} is {str(value)[:60]!r}, it should be {wanted}")


def check_dimensions(source: str, *, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """ModelCorrupt unless the heads fit together."""
    if heads % kv_heads:
        raise ModelCorrupt(f"{source}: {heads} attention heads are not a multiple of {kv_heads} key-value heads")
    if head_dim % 2:
        raise ModelCorrupt(f"{source}: head dimension {head_dim} is odd")
    if max(heads * head_dim, hidden) > MAX_WIDTH:
        raise ModelCorrupt(f"{source}: {heads} heads of {head_dim} exceed the width of any model")
