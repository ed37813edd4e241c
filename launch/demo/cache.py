"""A directory cache that is either complete or absent.

An entry is built under a temporary name, described by a manifest of sizes and checksums, and
renamed into place; whoever finds a directory under its final name finds all of it. A lock per
entry keeps two processes from building the same one at once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_root", "ensure_directory", "is_intact", "sha256_of", "write_manifest"]

MANIFEST = "manifest.json"
HASH_ON_REUSE_BYTES = 64 * 1024
LOCK_TIMEOUT_S = 1800.0
LOCK_POLL_S = 0.2


def cache_root() -> Path:
    """Where demo files live: `$TP_ENGINE_CACHE`, else `tp-engine` in the user's cache folder."""
    explicit = os.environ.get("TP_ENGINE_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "tp-engine"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(directory: Path, recipe: str) -> None:
    """Record size and SHA-256 of every file in `directory`, and the recipe that made them."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
    }
    text = json.dumps({"recipe": recipe, "files": files}, indent=2)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def is_intact(directory: Path, recipe: str) -> bool:
    """True when `directory` was made by `recipe` and its files are as the manifest says.

    Sizes are compared for all files, checksums for the small ones only: weights were hashed
    when they were written, and reading them again would cost more than it finds.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if manifest.get("recipe") != recipe:
        return False
    return all(_matches(directory / name, entry) for name, entry in manifest["files"].items())


def _matches(path: Path, entry: dict[str, object]) -> bool:
    if not path.is_file() or path.stat().st_size != entry["size"]:
        return False
    return path.stat().st_size > HASH_ON_REUSE_BYTES or sha256_of(path) == entry["sha256"]


def ensure_directory(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """Return the cached directory `name`, calling `build(empty directory)` when it is missing.

    Raises `TimeoutError` when another process holds the entry's lock for too long, and whatever
    `build` raises; a failed build leaves nothing behind.
    """
    root = cache_root()
    target = root / name
    if is_intact(target, recipe):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{name}.lock"):
        if is_intact(target, recipe):
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
        try:
            build(scratch)
            write_manifest(scratch, recipe)
            scratch.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{path} has been locked for {LOCK_TIMEOUT_S:.0f} s"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield
