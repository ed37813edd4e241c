"""The application."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from server import admin, health, metrics, openai
from server.admin.loads import Loads
from server.admin.remote import RemoteSources
from server.auth import AuthMiddleware
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import install_handlers
from server.limits import BodyLimitMiddleware
from server.services import Services
from tp_engine.sources import FetchArea, FetchLimits
from tp_engine.text import Tokenizer

FORM_BYTES: Final = 64 << 10
"""What an upload may have besides its files."""


def create_app(client: EngineClient, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """The HTTP API over ``client``, which its caller starts and stops."""
    app = FastAPI(title="tp-engine", openapi_url=None, redirect_slashes=False)
    http_metrics = metrics.HttpMetrics(client)
    app.state.services = Services(
        client=client,
        tokenizer=tokenizer,
        metrics=http_metrics,
        loads=Loads(client, _remote_sources(config)),
    )
    install_handlers(app)
    for part in (health, metrics, openai):
        app.include_router(part.router)
    if config.admin_keys is not None:
        app.include_router(admin.router)
    # The last one added is the outermost.
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=config.max_body_bytes,
        max_file_bytes=config.max_adapter_bytes + FORM_BYTES,
    )
    app.add_middleware(AuthMiddleware, keys=config.api_keys, admin_keys=config.admin_keys)
    if config.allowed_origins:
        # A browser asks without a key whether it may ask with one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(metrics.MetricsMiddleware, metrics=http_metrics)
    return app


def _remote_sources(config: ServerConfig) -> RemoteSources | None:
    """What operators may have fetched; None without operators or a place for it."""
    if config.admin_keys is None or config.adapter_store is None:
        return None
    return RemoteSources(
        config.adapter_sources,
        FetchArea(config.adapter_store),
        FetchLimits(max_bytes=config.max_adapter_bytes),
    )
