"""The arena's pages: layout, ownership, prefix cache and adapter residency; the hosts' pages."""

from tp_engine.memory.demand import Demand
from tp_engine.memory.host import HostTier
from tp_engine.memory.layout import PageLayout, kv_block_bytes, kv_views
from tp_engine.memory.pool import PagePool, PageUse
from tp_engine.memory.prefix import PrefixCache, block_key, root_key
from tp_engine.memory.prices import Prices
from tp_engine.memory.residency import AdapterFootprint, AdapterResidency, Resident

__all__ = [
    "AdapterFootprint",
    "AdapterResidency",
    "Demand",
    "HostTier",
    "PageLayout",
    "PagePool",
    "PageUse",
    "PrefixCache",
    "Prices",
    "Resident",
    "block_key",
    "kv_block_bytes",
    "kv_views",
    "root_key",
]
