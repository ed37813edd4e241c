"""Adapters that come, change and go while the engine serves.

Reading order: `fleet` (what may be asked for), `loads`, `arriving` and `leaving` (revisions),
`names`, `dirty` (what the store does not know yet), `holds` and `preloading` (memory), `listing`.
`loader` and `keeper` do what is slow, in two other threads; `errands` is between them.
"""

from tp_engine.fleet.errands import CallError, Loader
from tp_engine.fleet.fleet import AdapterFleet
from tp_engine.fleet.loader import AdapterLoader
from tp_engine.fleet.start import StartingAdapters

__all__ = ["AdapterFleet", "AdapterLoader", "CallError", "Loader", "StartingAdapters"]
