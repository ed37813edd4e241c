"""Names of adapters, and the forms in which a request may write them.

    NAME    BASE:NAME    NAME@REVISION    BASE:NAME@REVISION

BASE is a served name of the base model, REVISION the first 8 or more hexadecimal digits of an
adapter's digest. A name that can be read as one of the longer forms can't be registered, whatever
else is registered, so that what a request means never depends on who came first.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from typing import Final

from tp_engine.adapters.errors import AdapterError, shown

MAX_NAME_LENGTH: Final = 256
"""Longest name, in characters."""

_REVISION: Final = re.compile(r"(?P<name>.*)@(?P<prefix>[0-9a-f]{8,64})", re.DOTALL)
_JOINERS: Final = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Invisible, but part of the spelling of some scripts."""
_REFUSED_CATEGORIES: Final = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")


def normalise(name: str) -> str:
    """The NFC form: names that look the same because they are canonically equivalent are one."""
    return unicodedata.normalize("NFC", name) if len(name) <= MAX_NAME_LENGTH else name


def check_name(name: str, base_names: Collection[str] = ()) -> str:
    """The name in the form it is registered under.

    Args:
        name: any Unicode text of 1 to 256 characters, without control characters and without
            white space at its ends. ``/``, ``-``, ``:`` and ``@`` have no meaning of their own.
        base_names: the served names of the base.

    Raises:
        AdapterError: ``name_refused``, with the reason.
    """
    name = normalise(name)
    if not name.strip():
        raise _refused(name, "a name must not be blank")
    if len(name) > MAX_NAME_LENGTH:
        raise _refused(name, f"{len(name)} characters; at most {MAX_NAME_LENGTH} are allowed")
    if name != name.strip():
        raise _refused(name, "a name must not begin or end with white space")
    for character in name:
        if character not in _JOINERS and unicodedata.category(character) in _REFUSED_CATEGORIES:
            raise _refused(name, f"control character U+{ord(character):04X} is not allowed")
    if all(unicodedata.category(character)[0] in "CMZ" for character in name):
        raise _refused(name, "a name must have a visible character")
    _check_ambiguous(name, [normalise(base) for base in base_names])
    return name


def split_base(model: str, base_names: Collection[str]) -> str | None:
    """NAME of ``BASE:NAME``, None if it does not begin with a served base name and a colon."""
    heads = [f"{base}:" for base in base_names if model.startswith(f"{base}:")]
    return model.removeprefix(max(heads, key=len)) if heads else None


def split_revision(model: str) -> tuple[str, str] | None:
    """(NAME, REVISION) of ``NAME@REVISION``, None if it does not end so."""
    match = _REVISION.fullmatch(model)
    return (match["name"], match["prefix"]) if match else None


def _check_ambiguous(name: str, base_names: Collection[str]) -> None:
    if name in base_names:
        raise _refused(name, "it is a name of the base model")
    if split_base(name, base_names) is not None:
        raise _refused(name, "it can be read as BASE:NAME of another adapter")
    if split_revision(name):
        raise _refused(name, "it can be read as NAME@REVISION of another adapter")
    for base in base_names:
        if f"{base}:{name}" in base_names:
            raise _refused(name, f"{shown(f'{base}:{name}')} is a name of the base model")


def _refused(name: str, reason: str) -> AdapterError:
    return AdapterError("name_refused", f"adapter name {shown(name)}: {reason}")
