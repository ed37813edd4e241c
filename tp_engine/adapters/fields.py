"""Typed readers for single fields of an adapter's config; each names field, value and allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from tp_engine.adapters.errors import AdapterError, AdapterErrorCode, shown
from tp_engine.adapters.patterns import pattern_fault
from tp_engine.adapters.targets import ending, in_list

MAX_RANK: Final = 1024
"""Largest LoRA rank accepted."""
MAX_PATTERNS: Final = 16384
"""Most entries of one pattern map or list of names."""
MAX_PATTERN_LENGTH: Final = 4096
"""Longest pattern or name, in characters."""

Number = TypeVar("Number", int, float)


def field_error(
    name: str, value: object, allowed: str, code: AdapterErrorCode = "config_invalid"
) -> AdapterError:
    """The error for a field's value."""
    return AdapterError(code, f"adapter_config.json: {name}={shown(value)}: {allowed}")


def rank_of(name: str, value: object) -> int:
    """A LoRA rank."""
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise field_error(name, value, f"a whole number from 1 to {MAX_RANK}")
    return value


def alpha_of(name: str, value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise field_error(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise field_error(name, value, "a finite number")
    return number


def flag_of(on: Mapping[str, Any], name: str) -> bool:
    """A switch; absent is off."""
    value = on.get(name, False)
    if not isinstance(value, bool):
        raise field_error(name, value, "true or false")
    return value


def layers_of(on: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One layer index or a list of them; absent is empty."""
    value = on.get(name, [])
    layers = [value] if type(value) is int else value
    if not isinstance(layers, list) or not all(type(i) is int and i >= 0 for i in layers):
        raise field_error(name, value, "a layer index from 0, or a list of them")
    return tuple(layers)


def names_of(on: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """One regular expression or a list of them; absent is empty."""
    value = on.get(name) or []
    names = _strings(name, [value] if isinstance(value, str) else value)
    for pattern in names:
        _compile(name, pattern, in_list(pattern))
    return names


def modules_of(
    on: Mapping[str, Any], name: str, default: tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """A regular expression as text, or a list of names."""
    if name not in on:
        return default
    value = on[name]
    if isinstance(value, str):
        _compile(name, value, value)
        return value
    return _strings(name, value)


def pattern_of(
    on: Mapping[str, Any], name: str, number: Callable[[str, object], Number]
) -> dict[str, Number]:
    """A map from regular expressions to numbers, in the order of the file."""
    value = on.get(name, {})
    if not isinstance(value, dict):
        raise field_error(name, value, "an object of pattern: number")
    if len(value) > MAX_PATTERNS:
        raise field_error(name, len(value), f"at most {MAX_PATTERNS} entries")
    for pattern in value:
        _compile(name, pattern, ending(pattern))
    return {key: number(f"{name}[{shown(key)}]", entry) for key, entry in value.items()}


def _strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise field_error(name, value, "text or a list of text")
    if len(value) > MAX_PATTERNS:
        raise field_error(name, len(value), f"at most {MAX_PATTERNS} entries")
    return tuple(value)


def _compile(name: str, pattern: str, expression: str) -> None:
    """Refuse a pattern whose ``expression`` is no regular expression."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise field_error(name, pattern, f"patterns of at most {MAX_PATTERN_LENGTH} characters")
    if fault := pattern_fault(expression):
        raise field_error(name, pattern, f"not a regular expression ({fault})")
