"""Operations as a resource.

GET  /admin/operations               a page of them: ?after=ID&limit=N&state=S&name=ADAPTER
GET  /admin/operations/ID            one
POST /admin/operations/ID/cancel     end a fetch
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.admin.replies import as_json, page_limit
from server.services import services_of

router = APIRouter(prefix="/admin/operations")


@router.get("")
async def operations(request: Request) -> Response:
    """List a page of operations."""
    asked = request.query_params
    page = services_of(request).loads.operations.page(
        asked.get("after", ""), page_limit(request), asked.get("state", ""), asked.get("name", "")
    )
    return as_json(page)


@router.get("/{number}")
async def operation(request: Request, number: str) -> Response:
    """Show one operation."""
    return as_json(services_of(request).loads.operations.find(number).status())


@router.post("/{number}/cancel")
async def cancel(request: Request, number: str) -> Response:
    """End a fetch; what was fetched is kept for the next one of the same source."""
    return as_json(services_of(request).loads.operations.cancel(number).status(), 202)
