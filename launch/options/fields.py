"""The options, derived from the fields of the configuration dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from launch.options.config import ServeConfig
from tp_engine.config import Bytes, EngineConfig, literal_options, parse_size

PREFIX = "TP_ENGINE_"
"""Environment variables that begin so are ours."""

_TRUTH = {"true": True, "yes": True, "on": True, "1": True}
_TRUTH |= {"false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One configuration field as it is reached from outside."""

    name: str
    """Field name, which is also the key in a configuration file."""
    owner: type
    """The dataclass it belongs to."""
    hint: Any
    """Its annotation, ``Annotated`` included."""
    help: str
    """Its docstring."""
    default: Any
    """Its default; ``dataclasses.MISSING`` when it must be given."""

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()

    @property
    def kind(self) -> Any:
        """Its annotation without the None of an optional one."""
        if get_origin(self.hint) not in (Union, UnionType):
            return self.hint
        return next(part for part in get_args(self.hint) if part is not type(None))

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in get_args(self.hint)

    @property
    def many(self) -> bool:
        """Whether it is a list of values."""
        return get_origin(self.kind) is tuple

    @property
    def pairs(self) -> bool:
        """Whether it is a list of NAME=VALUE pairs."""
        return self.many and get_origin(get_args(self.kind)[0]) is tuple

    @property
    def metavar(self) -> str:
        """Its value in the help text."""
        if literal_options(self.hint):
            return "{" + ",".join(literal_options(self.hint)) + "}"
        if self.pairs:
            return "NAME=PATH"
        words = {int: "N", float: "X", Bytes: "SIZE"}
        return words.get(self.kind, "TEXT")

    def convert(self, given: Any) -> Any:
        """The field's value for what a source gave; what is not text passes to the checks.

        Raises:
            ValueError: a text can't be read as this field's type.
        """
        if self.pairs and isinstance(given, dict):
            return tuple(given.items())
        if self.many and isinstance(given, (list, str)):
            items = [given] if isinstance(given, str) else given
            return tuple(_pair(item) if self.pairs else item for item in items)
        return self._from_text(given.strip()) if isinstance(given, str) else given

    def _from_text(self, text: str) -> Any:
        if self.optional and text.lower() == "none":
            return None
        if self.kind is bool:
            if text.lower() not in _TRUTH:
                raise ValueError(f"{text!r} is not true or false")
            return _TRUTH[text.lower()]
        if self.kind == Bytes:
            return parse_size(text)
        if self.kind in (int, float):
            return _number(text, self.kind)
        return text


def _number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        word = "a whole number" if kind is int else "a number"
        raise ValueError(f"{text!r} is not {word}") from None


def _pair(item: Any) -> tuple[str, str]:
    if isinstance(item, str) and item.partition("=")[1]:
        name, _, value = item.partition("=")
        return name.strip(), value.strip()
    raise ValueError(f"{item!r} is not NAME=PATH")


@cache
def all_options() -> tuple[Option, ...]:
    """Every option in the order of the fields: the engine's, then the server's."""
    return (*_options_of(EngineConfig), *_options_of(ServeConfig))


def _options_of(owner: type) -> list[Option]:
    hints, texts = get_type_hints(owner, include_extras=True), _docstrings(owner)
    return [
        Option(
            name=field.name,
            owner=owner,
            hint=hints[field.name],
            help=texts[field.name],
            default=field.default,
        )
        for field in dataclasses.fields(owner)
        if not dataclasses.is_dataclass(hints[field.name])
    ]


def _docstrings(owner: type) -> dict[str, str]:
    """The string under each field; Python keeps them in the source only."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts
