"""The control plane: adapters come and go. For operators; without their keys it is not there.

`vllm` has the two routes of vLLM's clients, `adapters` the resource ``/admin/adapters``,
`lifecycle` what is done to an adapter that stays the same, `replies` what they answer.
"""

from fastapi import APIRouter

from server.admin import adapters, lifecycle, vllm

__all__ = ["router"]

router = APIRouter()
for part in (vllm, lifecycle, adapters):
    router.include_router(part.router)
