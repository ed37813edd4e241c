"""Regular expressions of an adapter's config, compared with names of modules within bounds.

Whoever wrote the adapter wrote them. On some, Python's `re` takes years, and no other thread may
run meanwhile: a config of a few bytes would stop the service. `regex` reads the same language, lets
other threads run and takes a limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

import regex

from tp_engine.adapters.errors import AdapterError, shown

MATCH_SECONDS: Final = 1.0
"""Longest comparison with one name; a sensible one takes microseconds."""
MAX_SIZE: Final = 100_000
"""Longest pattern in characters, what is counted written out so often."""

_COUNT: Final = re.compile(r"\{(?:([0-9]+)(?:,[0-9]*)?|,[0-9]+)\}")


def pattern_fault(expression: str) -> str:
    """Why a pattern is no regular expression that is understood here; empty if it is one."""
    if fault := _difference(expression):
        return fault
    try:
        re.compile(expression)  # PEFT's own: what this refuses was never applied
        regex.compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        return str(error) or type(error).__name__
    return ""


def _difference(expression: str) -> str:
    """What `regex` would read in another way than `re`, or spell out in memory."""
    counts = _COUNT.findall(expression)
    if expression.count("{") != len(counts):
        return "a brace that begins no count, as {2} or {1,3} does"
    if "[:" in expression:
        return "[: in a set"
    if len(expression) * math.prod(max(1, int(least or 1)) for least in counts) > MAX_SIZE:
        return f"spelt out it has more than {MAX_SIZE} characters"
    return ""


def match_start(expression: str, name: str) -> regex.Match[str] | None:
    """The match of an expression with the beginning of a name, as `re.match`.

    Raises:
        AdapterError: it takes too long, or is no regular expression.
    """
    return _within_bounds(regex.match, expression, name)


def matches_whole(expression: str, name: str) -> bool:
    """Whether an expression matches a whole name, as `re.fullmatch`.

    Raises:
        AdapterError: it takes too long, or is no regular expression.
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
    except regex.error as error:  # what was checked stands in another expression than this
        message = f"adapter_config.json: pattern {shown(expression)}: {error}"
        raise AdapterError("config_invalid", message) from None
