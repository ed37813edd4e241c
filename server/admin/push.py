"""Adapters from a training loop: served at once, kept later.

POST /admin/adapters/NAME/tensors    multipart/form-data with the two files, as for an upload

The answer says ``durable: false``: a kill before the next write-back would lose the push. See
`server.admin.lifecycle` for writing it back on demand.
"""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.admin.replies import as_json, done
from server.admin.upload import receive
from server.services import services_of
from tp_engine.messages import AdapterReply, PushAdapter

router = APIRouter(prefix="/admin/adapters")


@router.post("/{name:path}/tensors")
async def push(request: Request, name: str) -> Response:
    """Receive an adapter and let the name mean it; answers when requests may use it."""
    services = services_of(request)
    name = services.loads.allowed_name(name)
    claim = await receive(request)
    # From here on the engine deletes the files, whatever becomes of the call or its caller.
    call = PushAdapter(call_id=uuid.uuid4().hex, name=name, directory=str(claim.path))
    reply = await services.client.call(call)
    assert isinstance(reply, AdapterReply)
    return as_json(done(reply, name, "pushed"))
