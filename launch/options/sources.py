"""The three places options come from: flags, environment variables, a YAML file."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from launch.options.config import ServeConfig
from launch.options.fields import PREFIX, Option, all_options
from tp_engine.config import GIB, KIB, MIB, TIB, Bytes, EngineConfig

CONFIG_VARIABLE = PREFIX + "CONFIG"
"""Names the configuration file when ``--config`` does not."""
OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, *(PREFIX + name for name in ("CACHE", "URL", "ADMIN_KEY"))}
)
"""Variables with our prefix that are not options of the server."""

_OF_TORCHRUN = frozenset(
    "--" + name
    for name in [
        "nnodes",
        "nproc-per-node",
        "node-rank",
        "master-addr",
        "master-port",
        "standalone",
    ]
)
"""Its flags that may come to stand behind our script's name."""

_GROUPS = {EngineConfig: "engine", ServeConfig: "server"}

# Kubernetes puts these into every container beside a service that is named tp-engine.
_SERVICE_LINK = re.compile(PREFIX + r"(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_PORT = re.compile(r"(tcp|udp|sctp)://")


class OptionError(ValueError):
    """An option can't be used; the message begins with where it came from."""


class Given(NamedTuple):
    """One value and where it came from."""

    value: Any
    origin: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def make_parser(version: str) -> argparse.ArgumentParser:
    """The command line: one flag an option, values left as text."""
    parser = _Parser(
        prog="serve.py",
        description="Serve a language model and its LoRA adapters over an OpenAI-compatible API.",
        epilog=f"Every option can also stand in the --config file (port: 8000) or in the "
        f"environment ({PREFIX}PORT=8000, lists separated by commas). A flag wins over the "
        f"environment, the environment over the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tp-engine {version}")
    parser.add_argument("--config", metavar="FILE", help=f"YAML file ({CONFIG_VARIABLE})")
    groups = {owner: parser.add_argument_group(title) for owner, title in _GROUPS.items()}
    for option in all_options():
        _add(groups[option.owner], option)
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = option.help
    if default := default_of(option):
        text += f" Default: {default}."
    text = text.replace("%", "%%")
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
    elif option.many:
        text += " May be repeated."
        group.add_argument(
            option.flag, action="extend", nargs="+", metavar=option.metavar, help=text
        )
    else:
        group.add_argument(option.flag, metavar=option.metavar, help=text)


def shown(value: Any) -> str:
    """A value as it can be written in a configuration source."""
    if isinstance(value, tuple):
        return ",".join("=".join(item) if isinstance(item, tuple) else item for item in value)
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def default_of(option: Option) -> str:
    """An option's default as a source would give it; empty where there is none to show."""
    if not isinstance(option.default, (str, int, float)):
        return ""
    if option.kind == Bytes:
        return _size(int(option.default))
    return shown(option.default)


def _size(count: int) -> str:
    units = {TIB: "TiB", GIB: "GiB", MIB: "MiB", KIB: "KiB", 1: ""}
    size = next(size for size in units if count % size == 0)
    return f"{count // size}{units[size]}"


def from_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[dict[str, Given], str | None]:
    """The options on the command line by name, and the configuration file it names.

    Raises:
        OptionError: an unknown flag, a flag without its value, or a value that can't be read.
    """
    parsed, left = parser.parse_known_args(argv)
    known = [*(option.flag for option in all_options()), "--config", "--help", "--version"]
    for argument in left:
        if not argument.startswith("-"):
            raise OptionError(f"unexpected argument {argument!r}; every option is a --flag")
        flag = argument.partition("=")[0]
        if flag.replace("_", "-") in _OF_TORCHRUN:
            raise OptionError(f"{flag} is torchrun's: give it before launch/serve.py")
        raise OptionError(_unknown(f"flag {flag}", argument, known))
    values = vars(parsed)
    found = {
        option.name: _given(option, values[option.name], option.flag)
        for option in all_options()
        if option.name in values
    }
    return found, values.get("config")


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """The options in the environment by name.

    Raises:
        OptionError: a variable with our prefix is unknown, or its value can't be read.
    """
    options = {option.variable: option for option in all_options()}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable == PREFIX + "PORT" and _SERVICE_PORT.match(text):
            continue
        if variable in options:
            option = options[variable]
            items = [item.strip() for item in text.split(",") if item.strip()]
            found[option.name] = _given(option, items if option.many else text, variable)
        elif not _SERVICE_LINK.fullmatch(variable):
            known = [*options, *OTHER_VARIABLES]
            raise OptionError(_unknown(f"environment variable {variable}", variable, known))
    return found


def from_file(path: str) -> dict[str, Given]:
    """The options in a YAML file by name; keys are field names, with ``_`` or ``-``.

    Raises:
        OptionError: the file can't be read as a mapping, or a key is unknown or there twice.
    """
    options = {option.name: option for option in all_options()}
    found: dict[str, Given] = {}
    for key, value in _read_mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in options:
            raise OptionError(f"{path}: " + _unknown(f"key {key!r}", name, options))
        if name in found:
            raise OptionError(f"{path}: key {key!r} is there twice")
        found[name] = _given(options[name], value, f"{key} in {path}")
    return found


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping with a key repeated; the plain loader keeps the last one unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                text = f"key {key!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return super().construct_mapping(node, deep)


def _read_mapping(path: str) -> dict[Any, Any]:
    try:
        whole = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"configuration file {path} can't be read: {error}") from error
    if whole is None:
        return {}
    if not isinstance(whole, dict):
        raise OptionError(f"configuration file {path} is not a mapping of option names to values")
    return whole


def _given(option: Option, value: Any, origin: str) -> Given:
    try:
        return Given(option.convert(value), origin)
    except ValueError as error:
        raise OptionError(f"{origin}: {error}") from error


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.partition("=")[0], list(known), n=1, cutoff=0.6)
    return f"unknown {what}" + (f"; did you mean {near[0]}?" if near else "")
