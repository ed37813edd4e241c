"""What the routes share: one object per application, in ``app.state.services``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from server.engine_client import EngineClient
from server.metrics import HttpMetrics
from tp_engine.text import Tokenizer

if TYPE_CHECKING:
    from server.admin.loads import Loads


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """The application's collaborators."""

    client: EngineClient
    tokenizer: Tokenizer
    metrics: HttpMetrics
    loads: Loads
    started: int = field(default_factory=lambda: int(time.time()))
    """When the application was made, in Unix seconds."""


def services_of(request: Request) -> Services:
    """The services of the application that serves ``request``."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
