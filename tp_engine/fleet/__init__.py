"""Adapters that come, change and go while the engine serves.

Reading order: `fleet` (what may be asked for), `arriving`, `leaving`, `listing`; `loader` does what
is slow, `errands` is between them.
"""

from tp_engine.fleet.errands import CallError, Loader
from tp_engine.fleet.fleet import AdapterFleet
from tp_engine.fleet.loader import AdapterLoader
from tp_engine.fleet.start import StartingAdapters

__all__ = ["AdapterFleet", "AdapterLoader", "CallError", "Loader", "StartingAdapters"]
