"""Adapters: reading and checking them, their names, and their page images.

Reading order: `config`, `targets` and `patterns` (what PEFT's fields mean), `keys` (tensor names),
`reader`, `revision` (identity), `registry` and `names`, `loading` (at start), `layout`, `record`,
`packing`.

Importing it is cheap; the names below are loaded on first use, so that the front end can check a
name without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_engine.adapters.card import KnownRevision, RevisionCard
    from tp_engine.adapters.errors import AdapterError
    from tp_engine.adapters.layout import longest_row_bytes
    from tp_engine.adapters.loading import AdapterLoadError, LoadReport, load_adapters
    from tp_engine.adapters.packing import AdapterImage, pack_adapter, pages_needed
    from tp_engine.adapters.paths import resolve_adapter_path
    from tp_engine.adapters.reader import read_adapter
    from tp_engine.adapters.record import head_words, relocate, rows_of
    from tp_engine.adapters.registry import AdapterRegistry, ModelHeld, ResolvedModel, UnknownModel
    from tp_engine.adapters.revision import AdapterRevision, LoraModule, digest_of
    from tp_engine.adapters.size import ImageSize
    from tp_engine.adapters.traits import AdapterTraits

_HOMES = {
    "card": ("KnownRevision", "RevisionCard"),
    "errors": ("AdapterError",),
    "layout": ("longest_row_bytes",),
    "loading": ("AdapterLoadError", "LoadReport", "load_adapters"),
    "packing": ("AdapterImage", "pack_adapter", "pages_needed"),
    "paths": ("resolve_adapter_path",),
    "reader": ("read_adapter",),
    "record": ("head_words", "relocate", "rows_of"),
    "registry": ("AdapterRegistry", "ModelHeld", "ResolvedModel", "UnknownModel"),
    "revision": ("AdapterRevision", "LoraModule", "digest_of"),
    "size": ("ImageSize",),
    "traits": ("AdapterTraits",),
}

__all__ = [
    "AdapterError",
    "AdapterImage",
    "AdapterLoadError",
    "AdapterRegistry",
    "AdapterRevision",
    "AdapterTraits",
    "ImageSize",
    "KnownRevision",
    "LoadReport",
    "LoraModule",
    "ModelHeld",
    "ResolvedModel",
    "RevisionCard",
    "UnknownModel",
    "digest_of",
    "head_words",
    "load_adapters",
    "longest_row_bytes",
    "pack_adapter",
    "pages_needed",
    "read_adapter",
    "relocate",
    "resolve_adapter_path",
    "rows_of",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
