"""Reading the options: a flag wins over the environment, the environment over the file."""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from launch.options.config import ServeConfig
from launch.options.fields import Option, all_options
from launch.options.sources import (
    CONFIG_VARIABLE,
    Given,
    OptionError,
    from_environment,
    from_file,
    from_flags,
    make_parser,
    shown,
)
from tp_engine.config import ConfigError, EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """A configuration and where its values came from."""

    config: ServeConfig
    """The checked configuration."""
    origins: Mapping[str, str]
    """For every field that was given: the flag, variable, or key and file it came from."""


def read_options(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Options:
    """Read and check the options; ``--help`` and ``--version`` print and exit.

    ``argv`` is without the program's name; both default to this process's own.

    Raises:
        OptionError: anything that is unknown, can't be read or is not allowed, with its origin.
    """
    environ = os.environ if environ is None else environ
    flags, path = from_flags(make_parser(version()), sys.argv[1:] if argv is None else argv)
    path = path if path is not None else environ.get(CONFIG_VARIABLE)
    file = from_file(path) if path is not None else {}
    given = {**file, **from_environment(environ), **flags}
    return Options(
        config=_build(given), origins={name: value.origin for name, value in given.items()}
    )


def read_options_or_exit(argv: Sequence[str] | None = None) -> Options:
    """``read_options`` for a program: on an error print one line and exit with status 2.

    Ranks of a host share their command line and environment, so that only the first one prints.
    """
    try:
        return read_options(argv)
    except OptionError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"serve.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _build(given: Mapping[str, Given]) -> ServeConfig:
    for option in all_options():
        if option.default is dataclasses.MISSING and option.name not in given:
            raise OptionError(
                f"{option.name} is required: give {option.flag}, {option.variable}, "
                f"or {option.name} in the --config file"
            )
    values: dict[type, dict[str, object]] = {EngineConfig: {}, ServeConfig: {}}
    for option in all_options():
        if option.name in given:
            values[option.owner][option.name] = given[option.name].value
    try:
        engine = EngineConfig(**values[EngineConfig])  # type: ignore[arg-type]
        return ServeConfig(engine=engine, **values[ServeConfig])  # type: ignore[arg-type]
    except ConfigError as error:
        origin = given[error.field].origin if error.field in given else "default"
        raise OptionError(f"{origin}: {error}") from error


def resolved(config: ServeConfig, origins: Mapping[str, str]) -> str:
    """The configuration as text, one line a field, with the origin of what is not a default.

    ``config`` may be a copy in which further values were chosen at start. It has no secrets:
    keys stay in the file that is named.
    """
    lines = [_line(option, config, origins) for option in all_options()]
    return "\n".join(["configuration:", *lines])


def _line(option: Option, config: ServeConfig, origins: Mapping[str, str]) -> str:
    value = getattr(config if option.owner is ServeConfig else config.engine, option.name)
    line = f"  {option.name} = {shown(value)}"
    if option.name in origins:
        return f"{line}  ({origins[option.name]})"
    return line if value == option.default else f"{line}  (chosen at start)"


def version() -> str:
    """The version of the checkout this runs from, else of the installed package."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return metadata.version("tp-engine")
