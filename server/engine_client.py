"""The front end's side of the socket pair to the engine.

The engine binds both endpoints, one a direction, in a directory that only its user may enter;
the front end connects. Sends never wait: what may be in flight is bounded by the number of open
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from server.batch import Batch
from server.errors import EngineDead, InvalidRequest, NoAnswer, Unavailable
from tp_engine.messages import (
    Abort,
    AdapterAnswer,
    AdapterCall,
    Admitted,
    Draining,
    Failed,
    Goodbye,
    Models,
    Output,
    Phase,
    Ready,
    Stats,
    Submit,
    ToEngine,
    ToFrontEnd,
    decode_to_front_end,
    encode_all,
)

logger = logging.getLogger(__name__)

MAX_GROUP_TOKENS: Final = 2**22
"""Most prompt tokens that a group of requests may bring, a shared prompt counted for each: the
engine takes a group in one turn, while all others wait."""
MAX_OPEN_TOKENS: Final = 2**26
"""Most prompt tokens of all open requests: a few GB of the engine's memory."""
_BURST = 32
"""Steps' messages handled in a row at most."""


class EngineClient:
    """Submits requests and hands out their outputs; knows the engine's state.

    Use as an asynchronous context manager, inside the event loop that uses it.
    """

    def __init__(
        self,
        to_engine: str,
        to_front_end: str,
        *,
        max_open: int = 4096,
        call_timeout: float = 300.0,
    ) -> None:
        """Prepare for an engine; nothing is connected yet.

        Args:
            to_engine: ZeroMQ endpoint on which the engine receives.
            to_front_end: ZeroMQ endpoint on which the engine sends.
            max_open: most engine requests that may be open at a time.
            call_timeout: seconds that the engine may take over a call about adapters.
        """
        self._endpoints = (to_engine, to_front_end)
        self._max_open = max_open
        self._call_timeout = call_timeout
        self._open: dict[str, tuple[Batch, int]] = {}
        """By request id, with the tokens of the prompt."""
        self._open_tokens = 0
        self._calls: dict[str, asyncio.Future[AdapterAnswer]] = {}
        self.phase = "starting"
        """What the engine is doing until it is ready."""
        self.ready: Ready | None = None
        """The engine's announcement, once it serves."""
        self.draining = False
        """Whether the engine takes no new request."""
        self.dead: str | None = None
        """Why the engine is lost, once it is."""
        self.stats: Stats | None = None
        """The latest counters."""
        self._changed = asyncio.Event()

    async def __aenter__(self) -> EngineClient:
        self._context = zmq.asyncio.Context()
        self._push = zmq.Context(self._context).socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        self._push.set(zmq.SNDHWM, 0)
        self._pull.set(zmq.RCVHWM, 0)
        self._push.connect(self._endpoints[0])
        self._pull.connect(self._endpoints[1])
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        # A last Goodbye may still be on its way, but a lost engine will never take it.
        self._push.close(linger=0 if self.dead else 1000)
        self._pull.close(linger=0)
        self._context.term()

    @property
    def open_requests(self) -> int:
        """Engine requests that have not ended."""
        return len(self._open)

    def submit(self, submits: Sequence[Submit]) -> Batch:
        """Start a group of engine requests, all or none.

        Raises:
            EngineDead: the engine is lost.
            Unavailable: it has not started, is draining, or too much is open.
            InvalidRequest: the group alone is more than may be open.
        """
        tokens = sum(len(submit.prompt) for submit in submits)
        self.check_room(len(submits), tokens)
        batch = Batch([submit.request_id for submit in submits], self._closed)
        for submit in submits:
            assert submit.request_id not in self._open, submit.request_id
            self._open[submit.request_id] = batch, len(submit.prompt)
        self._open_tokens += tokens
        self._send(*submits)
        return batch

    def check_room(self, count: int, tokens: int) -> None:
        """Raise as `submit` does of so many requests with so many prompt tokens in all."""
        self.require_serving()
        if count > self._max_open:
            raise InvalidRequest(
                f"the request asks for {count} outputs: at most {self._max_open}", param="n"
            )
        if tokens > MAX_GROUP_TOKENS:
            raise InvalidRequest(
                f"the prompts of {count} outputs have {tokens} tokens: at most {MAX_GROUP_TOKENS}",
                param="n",
            )
        if len(self._open) + count > self._max_open:
            raise Unavailable(f"too many open requests: the limit is {self._max_open}")
        if self._open_tokens + tokens > MAX_OPEN_TOKENS:
            raise Unavailable(f"too many open prompt tokens: the limit is {MAX_OPEN_TOKENS}")

    async def call(self, message: AdapterCall, *, patient: bool = False) -> AdapterAnswer:
        """Have something done about adapters, and wait for what becomes of it.

        A caller that goes away leaves the call to its end.

        Args:
            message: what to do.
            patient: whether to wait as long as it takes.

        Raises:
            EngineDead: the engine is lost.
            Unavailable: it has not started, or is draining.
            NoAnswer: it has not answered in time; it goes on with the call.
        """
        self.require_serving()
        reply: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = reply
        self._send(message)
        try:
            async with asyncio.timeout(None if patient else self._call_timeout):
                return await reply
        except TimeoutError:
            raise NoAnswer(
                f"the engine has not answered within {self._call_timeout:g} s; it may still do "
                "what was asked: look at the adapter before asking again"
            ) from None
        finally:
            del self._calls[message.call_id]

    def require_serving(self) -> Ready:
        """The engine's announcement. Raises as `submit` does when it takes no request."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.draining:
            raise Unavailable("the server is shutting down", code="shutting_down")
        if self.ready is None:
            raise Unavailable(f"the server is starting: {self.phase}", code="not_ready")
        return self.ready

    def engine_died(self, reason: str) -> None:
        """Fail all open requests and refuse new ones."""
        if self.dead is not None:
            return
        logger.error("engine lost: %s", reason)
        self.dead = reason
        for request_id, (batch, _) in list(self._open.items()):
            batch.deliver(Failed(request_id=request_id, code="engine_dead", message=reason))
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDead(reason))
        self._changed.set()

    def goodbye(self) -> None:
        """Tell the engine that this front end leaves."""
        self._send(Goodbye())

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition``, a function of this client's state, holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _send(self, *messages: ToEngine) -> None:
        if self.dead is None:
            self._push.send(encode_all(messages), zmq.NOBLOCK)

    def _closed(self, request_id: str, finished: bool | None) -> None:
        _, tokens = self._open.pop(request_id)
        self._open_tokens -= tokens
        if finished is not None:
            self._send(Abort(request_id=request_id, finished=finished))
        self._changed.set()

    async def _read(self) -> None:
        try:
            for number in itertools.count():
                for message in decode_to_front_end(await self._pull.recv()):
                    self._handle(message)
                # A receive that need not wait does not yield: let the streams have their turn.
                if number % _BURST == 0:
                    await asyncio.sleep(0)
        except Exception as error:
            logger.exception("cannot go on reading from the engine")
            self.engine_died(f"unreadable message from the engine: {type(error).__name__}")

    def _handle(self, message: ToFrontEnd) -> None:
        if isinstance(message, Failed) and message.code == "engine_dead":
            self.engine_died(message.message)
            return
        if isinstance(message, (Admitted, Output, Failed)):
            # Outputs of aborted requests may still be under way: they are dropped.
            if (found := self._open.get(message.request_id)) is not None:
                found[0].deliver(message)
            return
        if isinstance(message, AdapterAnswer):
            if (reply := self._calls.get(message.call_id)) is not None and not reply.done():
                reply.set_result(message)
            return
        if isinstance(message, Phase):
            self.phase = message.name
        elif isinstance(message, Ready):
            self.phase, self.ready = "ready", message
        elif isinstance(message, Models) and self.ready is not None:
            self.ready = msgspec.structs.replace(
                self.ready, models=message.models, max_model_len=message.max_model_len
            )
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, Draining):
            self.draining = True
        self._changed.set()
