"""Answers as tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

Entry = Mapping[str, Any]
_COLOURS = {"ready": "green", "failed": "red", "cancelled": "yellow", "draining": "yellow"}


def adapters(entries: Iterable[Entry]) -> Table:
    """One line an adapter."""
    table = _table(
        "name", "state", "revision", "LoRA rank", "modules", "pages", "where", "requests"
    )
    table.add_column("flags")
    table.add_column("source", overflow="fold")
    for entry in entries:
        table.add_row(
            Text(entry["name"]),
            _state(entry["state"]),
            entry["revision"][:12],
            *(_number(entry[field]) for field in ("max_rank", "modules", "pages")),
            _tier(entry),
            str(entry["requests"]),
            " ".join(flag for flag in ("pinned", "dirty") if entry[flag]),
            Text(entry["reason"] or entry["source"]),
        )
    return table


def adapter(entry: Entry) -> Table:
    """Everything about one adapter."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for field, value in entry.items():
        if field in ("manifest", "history") or value in (None, ""):
            continue
        shown = _when(value) if field == "last_use" else str(value)
        table.add_row(field, _state(shown) if field == "state" else Text(shown))
    for number, revision in enumerate(entry["history"]):
        table.add_row("history" if number == 0 else "", revision)
    for field, value in (entry["manifest"] or {}).items():
        if field not in ("digest", "source", "modules"):
            table.add_row(f"manifest.{field}", Text(_manifest(field, value)))
    return table


def modules(manifest: Entry) -> Table:
    """The modules that an adapter changes, those of equal form in one line."""
    forms: dict[tuple[Any, ...], list[str]] = {}
    for name, module in manifest["modules"].items():
        form = tuple(str(module.get(field)) for field in ("rank", "scale", "dtype", "a", "b"))
        forms.setdefault((name.rpartition(".")[2], *form), []).append(name)
    table = _table("module", "LoRA rank", "scale", "dtype", "A", "B", "layers")
    for form, names in forms.items():
        table.add_row(*form, str(len(names)))
    return table


def operations(entries: Iterable[Entry]) -> Table:
    """One line an operation."""
    table = _table("id", "name", "state", "bytes", "began", "seconds")
    table.add_column("source or error", overflow="fold")
    for entry in entries:
        total = entry["bytes_total"]
        done = "" if total is None else f"{decimal(entry['bytes_done'])} of {decimal(total)}"
        error = entry["error"]
        table.add_row(
            entry["id"],
            Text(entry["name"]),
            _state(entry["state"]),
            done,
            _when(entry["created"]),
            f"{(entry['ended'] or time.time()) - entry['created']:.1f}",
            Text(entry["source"] if error is None else error["message"]),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _state(state: str) -> Text:
    return Text(state, style=_COLOURS.get(state, "cyan"))


def _tier(entry: Entry) -> str:
    """The highest tier that an adapter stands on."""
    tiers = {"resident": "arena", "warm": "host", "on_disk": "disk"}
    return next((tier for field, tier in tiers.items() if entry[field]), "")


def _number(value: int) -> str:
    return str(value) if value else ""


def _when(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _manifest(field: str, value: Any) -> str:
    if field in ("file_bytes", "tensor_bytes"):
        return f"{value} ({decimal(value)})"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each}" for key, each in value.items())
    return str(value)
