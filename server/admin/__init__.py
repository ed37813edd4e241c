"""The control plane: adapters come and go. For operators; without their keys it is not there.

`vllm` has the two routes of vLLM's clients, `adapters` the resource ``/admin/adapters``,
`lifecycle` what is done to an adapter that stays the same, `upload` bodies of files (`parts`),
`operation_routes` the resource ``/admin/operations``. `loads` brings an adapter from its source
(`remote`) to the engine as an operation (`operations`). `replies` has the answers.
"""

from fastapi import APIRouter

from server.admin import adapters, lifecycle, operation_routes, push, upload, vllm

__all__ = ["router"]

router = APIRouter()
for part in (vllm, lifecycle, upload, push, adapters, operation_routes):
    router.include_router(part.router)
