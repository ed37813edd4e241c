"""Typed access to the fields of a ``config.json``, with errors that name field and value."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

__all__ = ["MISSING", "Fields", "UnsupportedModel"]

MAX_CONFIG_BYTES: Final = 1 << 20
MISSING: Final[Any] = object()
"""As a default: the field must be there."""


class UnsupportedModel(ValueError):
    """The model's configuration asks for something that this engine does not compute."""


class Fields:
    """The values of one JSON object. A field that is null counts as absent."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        """``source`` names the object in messages, such as the path of the file."""
        self._values = {name: value for name, value in values.items() if value is not None}
        self._nulls = {name for name, value in values.items() if value is None}
        self.source = source

    @classmethod
    def from_file(cls, path: Path) -> Fields:
        """Read a JSON object.

        Raises:
            UnsupportedModel: the file is missing, too large, or no JSON object.
        """
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise UnsupportedModel(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UnsupportedModel(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnsupportedModel):
                raise
            raise UnsupportedModel(f"{path}: not UTF-8 JSON: {error}") from error
        if not isinstance(values, dict):
            raise UnsupportedModel(f"{path}: must hold a JSON object")
        return cls(values, str(path))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that are set, in file order."""
        return tuple(self._values)

    def get(self, name: str) -> Any:
        """The value as parsed; None when absent or null."""
        return self._values.get(name)

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null: some defaults are for absent fields only."""
        return name in self._nulls

    def integer(self, name: str, default: Any = MISSING, *, low: int = 1) -> int:
        """A whole number of at least ``low``."""
        value = self._value(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < low:
            raise self.refuse(name, f"a whole number of at least {low}", value)
        return int(value)

    def number(self, name: str, default: Any = MISSING) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or value <= 0:
            raise self.refuse(name, "a finite number above 0", value)
        return float(value)

    def flag(self, name: str, default: Any = MISSING) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false", value)
        return value

    def ids(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A token id or a list of them."""
        value = self._values.get(name, list(default))
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
            raise self.refuse(name, "a token id or a list of token ids", value)
        return tuple(listed)

    def object(self, name: str) -> Fields | None:
        """A nested object, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object", value)
        return Fields(value, f"{self.source}: {name}")

    def refuse(self, name: str, allowed: str, value: Any = MISSING) -> UnsupportedModel:
        """The error for a field with another value than is allowed, to be raised by the caller."""
        shown = repr(self.get(name) if value is MISSING else value)
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        return UnsupportedModel(f"{self.source}: {name}={shown} is not supported: {allowed}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name, default)
        if value is MISSING:
            raise UnsupportedModel(f"{self.source}: {name} is missing")
        return value
