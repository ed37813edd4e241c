"""What the engine shows of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_engine.messages import Stats

if TYPE_CHECKING:
    from tp_engine.engine import Engine


def collect_stats(engine: Engine) -> Stats:
    """Gauges and counters of now; what adapters are called is not the engine's to know."""
    scheduler, pool = engine.scheduler, engine.pool
    adapter_pages = sum(len(r.pages) for r in engine.residency.residents)
    kv_pages = pool.num_pages - pool.free - engine.prefix.evictable() - adapter_pages
    gauges = {
        "num_requests_running": float(len(scheduler.running)),
        "num_requests_waiting": float(len(scheduler.waiting) + scheduler.num_parked),
        "kv_cache_usage_perc": kv_pages / pool.num_pages,
        "pages_total": float(pool.num_pages),
        "pages_free": float(pool.free),
        "pages_kv": float(kv_pages),
        "pages_cached": float(engine.prefix.evictable()),
        "pages_adapters": float(adapter_pages),
        "waste_adapters_bytes": float(_adapter_waste(engine)),
        "waste_kv_tokens": float(_kv_waste(engine)),
        "host_pages_total": float(engine.tiers.host.num_pages),
        "host_pages_free": float(engine.tiers.host.free),
        "adapters_warm": float(engine.tiers.host.warm),
        "integrity_faults": float(len(engine.check_integrity())),
    }
    counters = engine.counters | scheduler.counters.as_dict()
    counters |= {
        "forward_calls": float(engine.worker.runner.forward_calls),
        "adapter_loads": float(engine.residency.loads),
        "adapter_evictions": float(engine.residency.evictions),
        "adapter_fetches": float(engine.tiers.fetches),
        "adapter_host_evictions": float(engine.tiers.host.evictions),
    }
    counters |= {
        f"pages_taken_over_by_{use.name.lower()}": float(n) for use, n in pool.taken_over.items()
    }
    return Stats(
        gauges=gauges,
        counters=counters,
        max_adapters=len(engine.adapters),
    )


def _adapter_waste(engine: Engine) -> int:
    """Bytes of a rank's arena that lie in adapters' pages and hold no row."""
    footprints = [resident.footprint for resident in engine.residency.residents]
    page_bytes = engine.layout.page_bytes
    return sum(each.pages * page_bytes - each.row_bytes for each in footprints)


def _kv_waste(engine: Engine) -> int:
    """Tokens that the pages of running requests have room for and do not hold."""
    block = engine.layout.block_tokens
    return sum(
        len(request.pages) * block - request.computed for request in engine.scheduler.running
    )
