"""What can be asked for on the command line."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launch.options.fields import PREFIX
from tp_engine.adapters import AdapterError
from tp_engine.adapters.names import check_name

URL_VARIABLE = PREFIX + "URL"
KEY_VARIABLE = PREFIX + "ADMIN_KEY"
KEY_FILE_VARIABLE = PREFIX + "ADMIN_KEY_FILE"
"""The server's own; its first key is taken."""
DEFAULT_URL = "http://127.0.0.1:8000"


class UsageError(ValueError):
    """Something on the command line or in the environment cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which server, and with what right."""

    url: str
    key: str | None
    origin: str = f"missing: give --key-file, {KEY_VARIABLE} or {KEY_FILE_VARIABLE}"
    """Which key it is."""


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The server and the key: from the flags, else from the environment.

    Raises:
        UsageError: the file of keys cannot be read, or there is no key that can be sent.
    """
    url, file = arguments.url, arguments.key_file
    if file is not None:
        return _with_key(url, _first_key(Path(file)), f"that of --key-file {file}")
    if key := os.environ.get(KEY_VARIABLE):
        return _with_key(url, key, f"that in {KEY_VARIABLE}")
    if file := os.environ.get(KEY_FILE_VARIABLE):
        return _with_key(url, _first_key(Path(file)), f"that of {KEY_FILE_VARIABLE}={file}")
    return Settings(url=url, key=None)


def _with_key(url: str, key: str, origin: str) -> Settings:
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"the key, {origin}, cannot be sent: printable ASCII is allowed")
    return Settings(url=url, key=key, origin=origin)


def _first_key(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"key file {path} cannot be read: {error}") from error
    for line in lines:
        if line and not line.startswith("#"):
            return line
    raise UsageError(f"key file {path} holds no key")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.adapters",
        description="Watch over the adapters of a running server.",
        epilog=f"The key is the first of --key-file, else {KEY_VARIABLE}, else the first in the "
        f"file that {KEY_FILE_VARIABLE} names. Options may also follow the command. Exit codes: "
        "0 done, 1 refused or failed, 2 wrong usage, 3 no server, 130 interrupted.",
    )
    url = os.environ.get(URL_VARIABLE, DEFAULT_URL)
    parser.set_defaults(url=url, key_file=None, json=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_looking(commands)
    _add_loading(commands)
    _add_names(commands)
    _add_operations(commands)
    for each in dict.fromkeys((parser, *commands.choices.values())):
        _add_common(each, url)
    return parser


def _add_common(parser: argparse.ArgumentParser, url: str) -> None:
    """What may stand before the command or behind it: what is not given is left to the other."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--url", help=f"server ({URL_VARIABLE}; now {url})")
    add("--key-file", metavar="FILE", help="file of operators' keys, one a line")
    add("--json", action="store_true", help="print what the server answers")


def _add_looking(commands: Any) -> None:
    listed = commands.add_parser("list", help="adapters, in the order of their names")
    listed.add_argument("--prefix", default="", help="only names that begin so")
    listed.add_argument(
        "--state", default="", help="only fetching, verifying, ready, draining or failed"
    )
    listed.add_argument("--base", default="", help="only of the base whose digest begins so")
    listed.add_argument("--limit", type=_count, metavar="N", help="at most so many")
    _name(commands.add_parser("show", help="one adapter, with its manifest"))


def _add_loading(commands: Any) -> None:
    load = commands.add_parser(
        "load",
        aliases=["register"],
        help="load an adapter from a directory of the server, or from s3://, https:// or hf://",
    )
    _name(load, type=_new_name)
    load.add_argument("source", help="directory of the server's host, or address")
    load.add_argument(
        "--sha256",
        action="append",
        default=[],
        metavar="FILE=HEX",
        help="that a remote file must have; may be repeated",
    )
    upload = commands.add_parser("upload", help="load an adapter from a directory of this machine")
    _name(upload, type=_new_name)
    upload.add_argument("directory", type=Path, help="of the adapter's two files")
    for parser in (load, upload):
        parser.add_argument("--replace", action="store_true", help="replace a loaded adapter")
        parser.add_argument("--no-wait", action="store_true", help="do not watch the operation")
    push = commands.add_parser("push", help="serve a directory's tensors at once, keep them later")
    _name(push, type=_new_name)
    push.add_argument("directory", type=Path, help="of the adapter's two files")


def _add_names(commands: Any) -> None:
    promote = commands.add_parser("promote", help="let a name mean a revision of the store")
    _name(promote)
    promote.add_argument(
        "revision", help="its digest, or the first 12 digits or more of one that the name has meant"
    )
    plain = {
        "rollback": "let a name mean what it meant before its last move",
        "pin": "keep an adapter in memory",
        "unpin": "let an idle adapter leave the memory",
        "resume": "give a drained adapter requests again",
    }
    for command, text in plain.items():
        _name(commands.add_parser(command, help=text))
    _name(commands.add_parser("unload", aliases=["delete"], help="unload an adapter, for good"))
    preload = commands.add_parser("preload", help="bring an adapter up before anybody asks for it")
    _name(preload)
    preload.add_argument("--tier", choices=("arena", "host"), default="arena", help="how far up")
    drain = commands.add_parser("drain", help="give an adapter no new requests")
    _name(drain)
    drain.add_argument(
        "--seconds", type=_seconds, metavar="X", help="that open requests may still take"
    )
    drain.add_argument("--remove", action="store_true", help="unload it when they have ended")
    flush = commands.add_parser("flush", help="write what was pushed to the store")
    flush.add_argument("name", nargs="?", help="only of this adapter")


def _add_operations(commands: Any) -> None:
    operations = commands.add_parser("operations", help="loads that run, and the last that ran")
    operations.add_argument("--state", default="", help="only in this state")
    operations.add_argument("--name", default="", help="only of this adapter")
    watch = commands.add_parser("watch", help="follow an operation to its end")
    cancel = commands.add_parser("cancel", help="end a fetch")
    for parser in (watch, cancel):
        parser.add_argument("id", help="of an operation")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 on")
    return seconds


def _name(parser: Any, **options: Any) -> None:
    parser.add_argument("name", help="of an adapter", **options)


def _new_name(text: str) -> str:
    """A name that an adapter may have, before any byte of one is sent; the server alone knows
    the names of the base."""
    try:
        return check_name(text)
    except AdapterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
