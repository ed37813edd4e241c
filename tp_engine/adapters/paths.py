"""Where adapters may be read from. A path is always local: nothing is looked up elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tp_engine.adapters.errors import AdapterError, shown


def resolve_adapter_path(path: str | os.PathLike[str], root: Path | None = None) -> Path:
    """The real directory of an adapter.

    Args:
        path: what an operator named; without ``root``, it may lie anywhere. ``~`` is not expanded.
        root: directory that it must lie in, after symbolic links are resolved. ``path`` is then
            relative to it, and may not be absolute or contain ``..`` or ``~``.

    Raises:
        AdapterError: ``path_refused`` if it leaves ``root`` or is no directory.
    """
    text = os.fspath(path)
    if not text.strip() or "\0" in text:
        raise AdapterError("path_refused", f"adapter path {shown(text)} is blank or has a NUL")
    if root is not None:
        parts = Path(text).parts
        if Path(text).is_absolute() or any(p == ".." or p.startswith("~") for p in parts):
            reason = f"must be relative to {root}, without '..' and '~'"
            raise AdapterError("path_refused", f"adapter path {shown(text)} {reason}")
    real = _resolve(Path(text) if root is None else root / text)
    if root is not None and not real.is_relative_to(_resolve(root)):
        raise AdapterError("path_refused", f"adapter path {shown(text)} leads out of {root}")
    if not os.path.isdir(real):  # which a name that is too long, or hidden from us, is not either
        raise AdapterError("path_refused", f"adapter path {shown(text)} is not a directory")
    return real


def file_inside(directory: Path, name: str) -> Path | None:
    """A regular file of a resolved adapter directory, None if there is none by that name.

    Raises:
        AdapterError: ``path_refused`` if it is a symbolic link out of the directory, or no
            regular file.
    """
    path = directory / name
    if not os.path.lexists(path):
        return None
    real = _resolve(path)
    if not real.is_relative_to(directory):
        raise AdapterError("path_refused", f"{path} is a link out of the adapter's directory")
    if not real.is_file():
        raise AdapterError("path_refused", f"{path} is not a regular file")
    return real


def first_present(directory: Path, names: Sequence[str]) -> str | None:
    """The first of the names that exists in the directory, whatever it is."""
    return next((name for name in names if os.path.lexists(directory / name)), None)


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise AdapterError("path_refused", f"{path} can't be resolved: {error}") from None
