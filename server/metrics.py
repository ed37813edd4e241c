"""``/metrics`` in the Prometheus text format.

The engine's gauges and counters come with its latest `Stats`; the four that gateways read keep
the names of vLLM, all others are ``tp_engine:NAME``. Times are measured at this end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.engine_client import EngineClient

_VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics."""
    registry = request.app.state.services.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class HttpMetrics:
    """The application's registry and what it measures itself."""

    def __init__(self, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client))
        self.requests = Counter(
            "tp_engine:http_requests",
            "HTTP responses by route and status.",
            ("route", "status"),
            registry=self.registry,
        )
        self._first = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", _FIRST_BUCKETS
        )
        self._token = self._histogram(
            "time_per_output_token_seconds", "Mean time a token after the first.", _TOKEN_BUCKETS
        )
        self._whole = self._histogram(
            "request_latency_seconds", "From request to last token.", _WHOLE_BUCKETS
        )

    def observe(self, *, started: float, first: float, last: float, tokens: int) -> None:
        """Count a request that has ended well.

        Args:
            started: when it was submitted, by ``time.perf_counter``.
            first: when its first token came from the engine, however late the client reads it.
            last: when its last one did.
            tokens: of its longest output.
        """
        self._first.observe(first - started)
        self._whole.observe(last - started)
        if tokens > 1:
            self._token.observe((last - first) / (tokens - 1))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tp_engine:{name}", text, buckets=buckets, registry=self.registry)


class EngineCollector(Collector):
    """Reports the engine's latest `Stats`; zeros until there are any."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The metrics of one scrape."""
        stats = self._client.stats
        gauges = dict.fromkeys(_VLLM_GAUGES, 0.0) | (stats.gauges if stats else {})
        for name, value in gauges.items():
            prefix = "vllm" if name in _VLLM_GAUGES else "tp_engine"
            yield GaugeMetricFamily(f"{prefix}:{name}", _title(name), value=value)
        for name, value in (stats.counters if stats else {}).items():
            yield CounterMetricFamily(f"tp_engine:{name}", _title(name), value=value)
        if stats is not None:
            info = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Adapters resident and waited for; the value is the time of the scrape.",
                labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            )
            running = ",".join(stats.running_adapters)
            waiting = ",".join(stats.waiting_adapters)
            info.add_metric([str(stats.max_adapters), running, waiting], time.time())
            yield info


class MetricsMiddleware:
    """Counts responses by route template, so that the number of labels is bounded."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def _title(name: str) -> str:
    return name.replace("_", " ") + "."
