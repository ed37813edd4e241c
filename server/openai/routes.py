"""The routes of the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.connection import while_connected
from server.errors import InvalidRequest
from server.openai.body import read_fields
from server.openai.chat import ChatFormat, chat_job
from server.openai.completions import CompletionFormat, completion_job
from server.openai.fields import ChatFields, CompletionFields, SamplingFields, StreamOptions
from server.openai.formats import Format
from server.openai.generation import Delta, Generation, Job
from server.openai.models import model_list, model_object
from server.openai.sse import EventStream, events
from server.services import services_of

router = APIRouter(prefix="/v1")

MAX_REPORTS: Final = 2**23
"""Most log-probabilities of an answer in one piece: some 2 GB until it is sent."""

_completion_decoder = msgspec.json.Decoder(CompletionFields)
_chat_decoder = msgspec.json.Decoder(ChatFields)


@router.get("/models")
async def models(request: Request) -> Response:
    """List the base and the adapters."""
    services = services_of(request)
    return _json(model_list(services.client.require_serving(), services.started))


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe one model; names may contain slashes."""
    services = services_of(request)
    ready = services.client.require_serving()
    return _json(model_object(name, ready, services.started))


@router.post("/completions")
async def completions(request: Request) -> Response:
    """Continue prompts."""
    services = services_of(request)
    ready = services.client.require_serving()
    fields = await read_fields(request, _completion_decoder)
    options = _stream_options(fields)
    making = completion_job(fields, services.tokenizer, ready)
    job = await while_connected(request.receive, making)
    layout = CompletionFormat(fields, job, services.tokenizer)
    return await _respond(request, job, layout, options)


@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    services = services_of(request)
    ready = services.client.require_serving()
    fields = await read_fields(request, _chat_decoder)
    options = _stream_options(fields)
    job = await while_connected(request.receive, chat_job(fields, services.tokenizer, ready))
    layout = ChatFormat(job, services.tokenizer)
    return await _respond(request, job, layout, options)


def _stream_options(fields: SamplingFields) -> StreamOptions | None:
    """How the answer is streamed; None: it comes in one piece."""
    if fields.stream:
        return fields.stream_options or StreamOptions()
    if fields.stream_options is not None:
        raise InvalidRequest("stream_options needs stream=true", param="stream_options")
    return None


async def _respond(
    request: Request, job: Job, layout: Format, options: StreamOptions | None
) -> Response:
    services = services_of(request)
    generation = Generation(job, services.client, services.tokenizer, services.metrics)
    try:
        if options is None:
            outputs = await while_connected(request.receive, _collect(generation))
            answer = partial(_whole, generation, layout, outputs)
            # Long reports would hold up the event loop.
            return answer() if job.params.logprobs is None else await asyncio.to_thread(answer)
        parts = events(generation, layout, options)
        first = await while_connected(request.receive, _next(parts))
    except BaseException:
        generation.close()
        raise
    return EventStream(first, parts, generation.close)


async def _next(parts: AsyncIterator[bytes]) -> bytes:
    return await anext(parts)


async def _collect(generation: Generation) -> Sequence[Delta]:
    parts: dict[int, list[Delta]] = {}
    reports = 0
    async for delta in generation.deltas():
        parts.setdefault(delta.index, []).append(delta)
        reports += sum(1 + len(piece.logprobs.top_ids) for piece in delta.pieces)
        if reports > MAX_REPORTS:
            text = f"an answer in one piece has at most {MAX_REPORTS} log-probabilities: stream it"
            raise InvalidRequest(text, param="logprobs")
    return [_join(parts[index]) for index in sorted(parts)]


def _whole(generation: Generation, layout: Format, outputs: Sequence[Delta]) -> Response:
    return _json(layout.whole(outputs, generation.usage, revision=generation.revision))


def _join(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        pieces=tuple(piece for delta in deltas for piece in delta.pieces),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
