"""Liveness and readiness."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.errors import EngineDead
from server.services import services_of

router = APIRouter()

_PROBES = ["GET", "HEAD"]


@router.api_route("/health", methods=_PROBES)
async def health(request: Request) -> Response:
    """200 with the engine's phase while it lives, loading included; 503 once it is lost."""
    client = services_of(request).client
    if client.dead is not None:
        raise EngineDead(client.dead)
    return JSONResponse({"status": "ok", "phase": client.phase})


@router.api_route("/ready", methods=_PROBES)
async def ready(request: Request) -> Response:
    """200 while requests are taken; 503 with the reason before and after."""
    services_of(request).client.require_serving()
    return JSONResponse({"status": "ready"})
