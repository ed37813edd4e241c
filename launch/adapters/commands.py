"""What each command does."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.adapters import tables
from launch.adapters.arguments import UsageError
from launch.adapters.client import Answer, ControlPlane
from launch.adapters.watching import bar, watch
from tp_engine.sources import CONFIG_NAME, WEIGHTS_NAME


class Failed(Exception):
    """An operation ended without an adapter."""


class Output:
    """Standard output: for people, or for programs."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._console = Console(soft_wrap=False, highlight=False)
        if not self._console.is_terminal:
            self._console = Console(width=240, highlight=False)  # lines are not to be broken

    def show(self, answer: Any, *shown: Any) -> None:
        """The answer itself, or what stands for it."""
        if self._json:
            print(json.dumps(answer, ensure_ascii=False, indent=2))
            return
        for each in shown:
            self._console.print(each, markup=False)


def run(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    """Carry out the command of a parsed command line.

    Raises:
        Refused: the server says no.
        Failed: the operation that it began has failed.
        UsageError: a file or an argument cannot be used.
    """
    _COMMANDS[arguments.command](arguments, server, output)


# --- looking -------------------------------------------------------------------------------------


def _list(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    query = {field: getattr(arguments, field) for field in ("prefix", "state", "base")}
    found = list(server.pages("adapters", "name", arguments.limit, **query))
    output.show(found, tables.adapters(found))


def _show(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    found = server.ask("GET", server.adapter(arguments.name))
    shown = [tables.adapter(found)]
    if found["manifest"]:
        shown.append(tables.modules(found["manifest"]))
    output.show(found, *shown)


def _operations(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    query = {"state": arguments.state, "name": arguments.name}
    found = list(server.pages("operations", "id", None, **query))
    output.show(found, tables.operations(found))


# --- loading -------------------------------------------------------------------------------------


def _load(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    body = {
        "name": arguments.name,
        "source": arguments.source,
        "replace": arguments.replace,
        "sha256": dict(_pair(item) for item in arguments.sha256),
    }
    begun = server.ask("POST", "/adapters", json=body)
    _begun(begun, arguments, server, output)


def _upload(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    replace = "true" if arguments.replace else "false"
    begun = _send(arguments, server, "upload", replace=replace)
    _begun(begun, arguments, server, output)


def _push(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    _tell(_send(arguments, server, "tensors"), output)


def _send(arguments: Namespace, server: ControlPlane, action: str, **query: str) -> Answer:
    directory: Path = arguments.directory
    files = [directory / name for name in (CONFIG_NAME, WEIGHTS_NAME)]
    total = sum(path.stat().st_size for path in files if path.is_file())
    with bar(f"{arguments.name}: sending", total) as move:
        path = server.adapter(arguments.name, action)
        return server.send(path, directory, lambda sent: move(min(sent, total), total), **query)


def _begun(begun: Answer, arguments: Namespace, server: ControlPlane, output: Output) -> None:
    if arguments.no_wait:
        output.show(begun, f"{begun['name']}: operation {begun['id']} is {begun['state']}")
    else:
        _ended(watch(server, begun), output)


def _watch(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    begun = server.ask("GET", server.operation(arguments.id))
    _ended(watch(server, begun), output)


def _ended(operation: Answer, output: Output) -> None:
    """Tell how an operation has ended."""
    if operation["state"] != "ready":
        error = operation["error"] or {"message": "cancelled", "code": None}
        code = f" ({error['code']})" if error["code"] else ""
        raise Failed(f"{operation['name']!r} from {operation['source']}: {error['message']}{code}")
    _tell(operation["result"], output, operation)


def _cancel(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    seen = server.ask("POST", server.operation(arguments.id, "cancel"))
    output.show(seen, f"operation {seen['id']} of {seen['name']} is told to end")


# --- names ---------------------------------------------------------------------------------------


def _promote(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    path = server.adapter(arguments.name, "promote")
    _tell(server.ask("POST", path, json={"revision": arguments.revision}), output)


def _preload(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    path = server.adapter(arguments.name, "preload")
    answer = server.ask("POST", path, json={"tier": arguments.tier})
    if "id" in answer:  # it takes longer: an operation
        _ended(watch(server, answer), output)
    else:
        _tell(answer, output)


def _drain(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    body: dict[str, Any] = {"remove": arguments.remove}
    if arguments.seconds is not None:
        body["seconds"] = arguments.seconds
    _tell(server.ask("POST", server.adapter(arguments.name, "drain"), json=body), output)


def _flush(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    path = "/flush" if arguments.name is None else server.adapter(arguments.name, "flush")
    answer = server.ask("POST", path)
    written = ", ".join(answer["written"])
    output.show(answer, f"written: {written}" if written else "nothing was to be written")


def _unload(arguments: Namespace, server: ControlPlane, output: Output) -> None:
    _tell(server.ask("DELETE", server.adapter(arguments.name)), output)


def _plain(action: str) -> Command:
    """A command that needs nothing but a name."""

    def command(arguments: Namespace, server: ControlPlane, output: Output) -> None:
        _tell(server.ask("POST", server.adapter(arguments.name, action)), output)

    return command


# -------------------------------------------------------------------------------------------------


def _tell(done: Answer, output: Output, whole: Answer | None = None) -> None:
    """What the server says it has done."""
    lines = [done["message"], f"revision {done['revision']}"]
    if done.get("modules_expected"):
        lines.append(f"{done['modules_applied']} of {done['modules_expected']} modules applied")
    if done.get("requests"):
        lines.append(f"{done['requests']} requests are open")
    lines += [f"warning: {warning}" for warning in done.get("warnings", ())]
    output.show(whole or done, *lines)


def _pair(item: str) -> tuple[str, str]:
    name, _, value = item.partition("=")
    if not value:
        raise UsageError(f"--sha256 {item!r} must be FILE=HEX")
    return name, value


Command = Callable[[Namespace, ControlPlane, Output], None]
_COMMANDS: dict[str, Command] = {
    "list": _list,
    "show": _show,
    "load": _load,
    "register": _load,
    "upload": _upload,
    "push": _push,
    "promote": _promote,
    "rollback": _plain("roll_back"),
    "pin": _plain("pin"),
    "unpin": _plain("unpin"),
    "preload": _preload,
    "drain": _drain,
    "resume": _plain("resume"),
    "flush": _flush,
    "unload": _unload,
    "delete": _unload,
    "operations": _operations,
    "watch": _watch,
    "cancel": _cancel,
}
