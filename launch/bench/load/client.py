"""Client processes: they send requests and note when bytes come; all reading comes afterwards."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from launch.bench.load.answer import Answer, Received, read_answer
from launch.bench.load.workload import Request

START_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The server."""

    host: str
    port: int
    keys: tuple[str, ...] = ()
    """API key by tenant; none when the server asks for none."""
    timeout: float = 600.0
    """Seconds for an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What all clients saw."""

    answers: list[Answer]
    """In the order of the requests."""
    busy: float
    """Largest share of a core that a client process took; near 1 it was the limit, not the
    server."""


class _Connection(asyncio.Protocol):
    """Sends one request and keeps what comes until the server closes."""

    def __init__(self, message: bytes, received: Received) -> None:
        self._message = message
        self._received = received
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._received.parts.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._received.error = repr(error)
        if not self.closed.done():
            self.closed.set_result(None)


def message_of(request: Request, target: Target) -> bytes:
    """The HTTP request: a streamed greedy completion of exactly so many tokens."""
    body = json.dumps(
        {
            "model": request.model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {target.host}:{target.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    )
    if target.keys:
        head += f"authorization: Bearer {target.keys[request.tenant]}\r\n"
    return head.encode() + b"\r\n" + body


async def send(request: Request, target: Target) -> Received:
    """Send one request and read its answer to the end."""
    received = Received(index=request.index, sent=time.perf_counter())
    loop = asyncio.get_running_loop()
    message = message_of(request, target)
    try:
        async with asyncio.timeout(target.timeout):
            transport, connection = await loop.create_connection(
                lambda: _Connection(message, received), target.host, target.port
            )
            try:
                await connection.closed
            finally:
                transport.close()
    except (OSError, TimeoutError) as error:
        received.error = repr(error)
    return received


async def send_all(
    requests: Sequence[Request], target: Target, streams: int | None
) -> list[Received]:
    """Send requests when they are due, or, with ``streams``, so many at a time."""
    began = time.perf_counter()
    limit = asyncio.Semaphore(streams if streams is not None else len(requests) or 1)

    async def one(request: Request) -> Received:
        await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - began)))
        async with limit:
            return await send(request, target)

    return list(await asyncio.gather(*(one(request) for request in requests)))


def _work(
    requests: list[Request], target: Target, streams: int | None, ready: Barrier, out: Connection
) -> None:
    ready.wait(START_SECONDS)
    began, before = time.perf_counter(), time.process_time()
    received = asyncio.run(send_all(requests, target, streams))
    busy = (time.process_time() - before) / max(1e-9, time.perf_counter() - began)
    out.send(([read_answer(item) for item in received], busy))
    out.close()


def run_clients(
    requests: Sequence[Request], target: Target, *, streams: int | None, processes: int
) -> Seen:
    """Deal the requests over processes, start all at once, and gather the answers.

    Args:
        streams: requests that are open at a time, over all processes; None: as they are due.

    Raises:
        RuntimeError: a client process has died.
    """
    processes = min(processes, streams or processes, len(requests))
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes)
    pipes, workers = [], []
    for number in range(processes):
        mine, theirs = context.Pipe(duplex=False)
        share = None if streams is None else len(range(number, streams, processes))
        arguments = (list(requests[number::processes]), target, share, ready, theirs)
        worker = context.Process(target=_work, args=arguments, daemon=True)
        worker.start()
        theirs.close()
        pipes.append(mine)
        workers.append(worker)
    answers: list[Answer] = []
    busiest = 0.0
    try:
        for pipe in pipes:
            part, busy = pipe.recv()
            answers += part
            busiest = max(busiest, busy)
    except EOFError as error:
        raise RuntimeError("a client process has died; its traceback is above") from error
    for worker in workers:
        worker.join()
    return Seen(answers=sorted(answers, key=lambda answer: answer.index), busy=busiest)
