"""Adapters that come, change and go while the engine serves.

`fleet` has the order of events, `loader` what is slow, `errands` what is between them.
"""

from tp_engine.fleet.errands import CallError, Loader
from tp_engine.fleet.fleet import AdapterFleet
from tp_engine.fleet.loader import AdapterLoader

__all__ = ["AdapterFleet", "AdapterLoader", "CallError", "Loader"]
