"""Regular expressions of an adapter's config, compared with names of modules within bounds.

Whoever wrote the adapter wrote them. On some, Python's `re` takes years, and no other thread may
run meanwhile: a config of a few bytes would stop the service. `regex` reads the same language, lets
other threads run and takes a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import regex

from tp_engine.adapters.errors import AdapterError, shown

MATCH_SECONDS: Final = 1.0
"""Longest comparison with one name; a sensible one takes microseconds."""


def pattern_fault(expression: str) -> str:
    """Why a pattern is no regular expression; empty if it is one."""
    try:
        re.compile(expression)  # PEFT's own: what this refuses was never applied
        regex.compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        return str(error) or type(error).__name__
    return ""


def match_start(expression: str, name: str) -> regex.Match[str] | None:
    """The match of an expression with the beginning of a name, as `re.match`.

    Raises:
        AdapterError: it takes too long.
    """
    return _within_bounds(regex.match, expression, name)


def matches_whole(expression: str, name: str) -> bool:
    """Whether an expression matches a whole name, as `re.fullmatch`.

    Raises:
        AdapterError: it takes too long.
    """
    return _within_bounds(regex.fullmatch, expression, name) is not None


def _within_bounds(
    function: Callable[..., regex.Match[str] | None], expression: str, name: str
) -> regex.Match[str] | None:
    try:
        return function(expression, name, timeout=MATCH_SECONDS, concurrent=True)
    except TimeoutError:
        reason = f"it takes more than {MATCH_SECONDS:g} s to compare it with {name}"
        message = f"adapter_config.json: pattern {shown(expression)}: {reason}"
        raise AdapterError("config_unsupported", message) from None
