"""Load the adapters that a service starts with, and report on each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tp_engine.adapters.ends.reader import BaseEnds
from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.names import check_name
from tp_engine.adapters.paths import resolve_adapter_path
from tp_engine.adapters.reader import read_adapter
from tp_engine.adapters.registry import AdapterRegistry
from tp_engine.adapters.revision import AdapterRevision

if TYPE_CHECKING:
    from tp_engine.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What became of one adapter."""

    name: str
    source: str
    """Directory as it was given."""
    seconds: float
    """Time it took."""
    applied: int = 0
    """Modules applied; 0 if it was refused."""
    expected: int = 0
    """Modules that its config targets; 0 if it was refused."""
    digest: str | None = None
    """Its revision; None if it was refused."""
    warnings: tuple[str, ...] = ()
    error: AdapterError | None = None
    """Why it was refused."""

    def __str__(self) -> str:
        head = f"adapter {shown(self.name)} from {shown(self.source)}"
        if self.error is not None:
            return f"{head} refused ({self.error.code}): {self.error}"
        done = f"{self.applied} of {self.expected} modules applied in {self.seconds:.2f} s"
        return f"{head}: {done}, revision {self.digest}"


class AdapterLoadError(ValueError):
    """Adapters were refused and may not be skipped; ``reports`` are those of the refused ones."""

    def __init__(self, reports: Sequence[LoadReport]) -> None:
        super().__init__("\n".join(str(report) for report in reports))
        self.reports = tuple(reports)


def load_adapters(
    specs: Sequence[tuple[str, str]],
    lora_dir: str | None,
    spec: ModelSpec,
    on_error: Literal["fail", "skip"],
    *,
    base_names: Collection[str],
    base_sources: Collection[str] = (),
    base: BaseEnds | None = None,
    take: Callable[[str, AdapterRevision], None] | None = None,
) -> tuple[AdapterRegistry, tuple[LoadReport, ...]]:
    """Read, check and register adapters; a bad one never keeps a good one out.

    Args:
        specs: (name, directory) of each; a directory may lie anywhere.
        lora_dir: its subdirectories (hidden ones aside) are adapters named as they are, in the
            order of their names, after those of ``specs``.
        spec: the base.
        on_error: ``fail`` looks at all adapters, then raises if any is refused.
        base_names: served names of the base.
        base_sources: what else the base is known as (see `read_adapter`).
        base: see `read_adapter`.
        take: called with each name and what was read, of which the registry keeps no tensor.

    Raises:
        AdapterLoadError: with ``fail``, with every refused adapter and its reason.
        AdapterError: ``lora_dir`` is no directory that can be read.
    """
    registry = AdapterRegistry(base_names)
    known = (*base_names, *base_sources)
    reports = [
        _load(registry, name, path, root, spec, known, base, take)
        for name, path, root in _wanted(specs, lora_dir)
    ]
    refused = [report for report in reports if report.error is not None]
    if refused and on_error == "fail":
        raise AdapterLoadError(refused)
    return registry, tuple(reports)


def _wanted(
    specs: Sequence[tuple[str, str]], lora_dir: str | None
) -> Iterator[tuple[str, str, Path | None]]:
    """(name, directory, root it must stay in) of every adapter to load."""
    for name, path in specs:
        yield name, path, None
    if lora_dir is not None:
        root = resolve_adapter_path(lora_dir)
        try:
            entries = sorted(root.iterdir())
        except OSError as error:
            raise AdapterError("unreadable", f"{shown(lora_dir)}: {error}") from None
        for entry in entries:
            if not entry.name.startswith(".") and (entry.is_dir() or entry.is_symlink()):
                yield entry.name, entry.name, root


def _load(
    registry: AdapterRegistry,
    name: str,
    path: str,
    root: Path | None,
    spec: ModelSpec,
    known: Collection[str],
    base: BaseEnds | None,
    take: Callable[[str, AdapterRevision], None] | None,
) -> LoadReport:
    start = time.perf_counter()
    source = path if root is None else str(root / path)
    try:
        check_name(name, registry.base_names)
        revision = read_adapter(path, spec, base_names=known, base=base, root=root)
        name = registry.register(name, revision)
        if take is not None:
            take(name, revision)
    except AdapterError as error:
        seconds = time.perf_counter() - start
        return LoadReport(name=name, source=source, seconds=seconds, error=error)
    return LoadReport(
        name=name,
        source=source,
        seconds=time.perf_counter() - start,
        applied=revision.applied,
        expected=revision.expected,
        digest=revision.digest,
        warnings=revision.warnings,
    )
