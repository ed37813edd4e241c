"""The adapters that a service knows, on disk: content-addressed files under an SQLite index.

    ROOT/index.sqlite            revisions, names, moves of names   (`index`)
    ROOT/revisions/DIGEST/       the two files of a revision        (`files`)
    ROOT/incoming/               what is being written
    ROOT/fetching/               what is being fetched              (`tp_engine.sources.area`)

A write goes to ``incoming``, is synced, renamed into place and only then entered in the index; a
removal leaves the index first. So whatever moment a process dies at, the index names only complete
files, and `AdapterStore` sweeps the rest away when it is opened: also revisions without
a name as yet, for then no load was acknowledged.
"""

from tp_engine.adapters.store.errors import StoreError
from tp_engine.adapters.store.index import Alias, Move, RevisionRow, RevisionState
from tp_engine.adapters.store.manifest import LAYOUT_VERSION, Manifest, ModuleEntry
from tp_engine.adapters.store.names import Flags, Hold
from tp_engine.adapters.store.store import AdapterStore

__all__ = [
    "LAYOUT_VERSION",
    "AdapterStore",
    "Alias",
    "Flags",
    "Hold",
    "Manifest",
    "ModuleEntry",
    "Move",
    "RevisionRow",
    "RevisionState",
    "StoreError",
]
