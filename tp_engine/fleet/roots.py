"""Where adapters may be loaded from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tp_engine.adapters.errors import shown
from tp_engine.adapters.paths import resolve_adapter_path
from tp_engine.fleet.errands import CallError
from tp_engine.messages import LoadAdapter


class Roots:
    """The directories of this host that calls may lead to."""

    def __init__(self, roots: Sequence[Path], fetched: Path | None) -> None:
        """Allow ``roots`` to operators, and ``fetched`` to the front end alone."""
        self._roots = [root.resolve() for root in roots]
        self._fetched = [] if fetched is None else [fetched.resolve()]

    def allowed(self, call: LoadAdapter) -> Path:
        """The directory of a load, with links resolved: to be asked in the reader's thread.

        Raises:
            CallError: it is not inside an allowed one.
            AdapterError: it is not a directory.
        """
        path, allowed = call.path, self._fetched if call.source else self._roots
        if not allowed:
            reason = "the server was started without --adapter-root"
            raise CallError("path_refused", f"adapter path {shown(path)} is refused: {reason}")
        directory = resolve_adapter_path(path)
        if not any(directory.is_relative_to(root) for root in allowed):
            roots = ", ".join(map(str, allowed))
            raise CallError("path_refused", f"adapter path {shown(path)} is not inside {roots}")
        return directory
