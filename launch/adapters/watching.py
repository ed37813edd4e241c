"""Following what takes long, with a bar of its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from launch.adapters.client import Answer, ControlPlane

POLL_SECONDS: Final = 0.25
_OPEN: Final = ("fetching", "verifying", "preloading")


@contextmanager
def bar(title: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on standard error; what is given moves it: ``move(done, total, title)``."""
    errors = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,  # else it leaves an empty line
    )
    with progress:
        task = progress.add_task(title, total=total)

        def move(done: int, total: int | None = None, title: str | None = None) -> None:
            progress.update(task, completed=done, total=total, description=title)

        yield move


def watch(server: ControlPlane, begun: Answer) -> Answer:
    """Follow an operation; what it is at its end.

    Raises:
        KeyboardInterrupt: saying how it can be followed further.
    """
    path, seen = server.operation(begun["id"]), begun
    try:
        with bar(_title(begun), begun["bytes_total"]) as move:
            while seen["state"] in _OPEN:
                time.sleep(POLL_SECONDS)
                seen = server.ask("GET", path)
                move(seen["bytes_done"], seen["bytes_total"], _title(seen))
    except KeyboardInterrupt:
        number = begun["id"]
        text = f"operation {number} goes on in the server: `watch {number}` follows it"
        raise KeyboardInterrupt(text) from None
    return seen


def _title(operation: Answer) -> str:
    return f"{operation['name']}: {operation['state']}"
