"""The engine's side of the sockets, without an engine: deterministic tokens, in this event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from tp_engine.messages import (
    Abort,
    AdapterAnswer,
    AdapterCall,
    AdapterReply,
    Admitted,
    Failed,
    Goodbye,
    Message,
    ModelCard,
    Output,
    Ready,
    Submit,
    ToEngine,
    TokenLogprobs,
    decode_to_engine,
    encode_all,
)

MODELS = [
    ModelCard(name="base", root="/models/base"),
    ModelCard(name="team/sql-lora", root="/adapters/sql", parent="base", revision="ab" * 32),
]
REVISIONS = {card.name: card.revision or "ba" * 32 for card in MODELS}
VOCAB = 320
CONTEXT = 512
STOP_TOKEN = 264
"""The tiny tokenizer's ``<|end|>``."""


class FakeEngine:
    """Answers every `Submit` with ``reply(submit)``, ``step`` tokens a message.

    A reply that is shorter than ``max_tokens`` ends with `STOP_TOKEN`, else with the limit.
    """

    def __init__(self, directory: Path) -> None:
        self.to_engine = f"ipc://{directory}/to-engine"
        self.to_front_end = f"ipc://{directory}/to-front-end"
        self.reply: Callable[[Submit], list[int]] = lambda submit: submit.prompt * 600
        self.step = 1
        self.delay = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        """Closed: requests are accepted but nothing comes."""
        self.received: list[int] = []
        """How many messages travelled together each time."""
        self.calls: list[AdapterCall] = []
        self.answer: Callable[[AdapterCall], AdapterAnswer] = lambda call: AdapterReply(
            call_id=call.call_id, revision="cd" * 32, applied=14, expected=14
        )
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.said_goodbye = asyncio.Event()
        self.running: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> FakeEngine:
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        self._pull.bind(self.to_engine)
        self._push.bind(self.to_front_end)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exception: object) -> None:
        tasks = [self._reader, *self.running.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._pull.close(linger=0)
        self._push.close(linger=0)
        self._context.term()

    async def send(self, message: Message) -> None:
        await self._push.send(encode_all([message]))

    async def announce(self) -> None:
        await self.send(Ready(models=MODELS, max_model_len=CONTEXT, vocab_size=VOCAB))

    async def settled(self, aborts: int) -> None:
        """Return when nothing runs and so many aborts came; fail after two seconds."""
        async with asyncio.timeout(2):
            while self.running or len(self.aborts) < aborts:
                await asyncio.sleep(0.005)

    async def _read(self) -> None:
        while True:
            messages = decode_to_engine(await self._pull.recv())
            self.received.append(len(messages))
            for message in messages:
                self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Goodbye):
            self.said_goodbye.set()
        elif isinstance(message, Abort):
            self.aborts.append(message)
            if (task := self.running.pop(message.request_id, None)) is not None:
                task.cancel()
        elif isinstance(message, AdapterCall):
            self.calls.append(message)
            self.running[message.call_id] = asyncio.create_task(self._answer(message))
        else:
            assert isinstance(message, Submit)
            self.submits.append(message)
            self.running[message.request_id] = asyncio.create_task(self._run(message))

    async def _answer(self, call: AdapterCall) -> None:
        await self.gate.wait()
        await self.send(self.answer(call))
        self.running.pop(call.call_id, None)

    async def _run(self, submit: Submit) -> None:
        await self.gate.wait()
        if submit.model not in {card.name for card in MODELS}:
            await self._fail(submit, "model_not_found", f"the model {submit.model!r} is unknown")
        elif submit.model == "base" and submit.prompt[0] == 0:
            await self._fail(submit, "overloaded", "the queue is full")
        else:
            revision = REVISIONS[submit.model]
            await self.send(Admitted(request_id=submit.request_id, revision=revision))
            await self._generate(submit)
        self.running.pop(submit.request_id, None)

    async def _fail(self, submit: Submit, code: str, message: str) -> None:
        await self.send(Failed(request_id=submit.request_id, code=code, message=message))

    async def _generate(self, submit: Submit) -> None:
        limit = submit.params.max_tokens
        assert limit is not None
        tokens = self.reply(submit)
        stops = len(tokens) < limit
        tokens = tokens[:limit]
        parts = [tokens[at : at + self.step] for at in range(0, len(tokens), self.step)] or [[]]
        done = 0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            done += len(part)
            await self.send(
                Output(
                    request_id=submit.request_id,
                    tokens=part,
                    logprobs=self._logprobs(submit, part),
                    finish_reason=("stop" if stops else "length") if last else None,
                    stop_token=STOP_TOKEN if last and stops else None,
                    cached_tokens=1,
                    completion_tokens=done + (last and stops),
                )
            )
            await asyncio.sleep(self.delay)

    def _logprobs(self, submit: Submit, tokens: list[int]) -> list[TokenLogprobs] | None:
        wanted = submit.params.logprobs
        if wanted is None:
            return None
        others = [[(token + i) % VOCAB for i in range(wanted)] for token in tokens]
        return [
            TokenLogprobs(
                token=token,
                logprob=-0.5,
                top_ids=top,
                top_logprobs=[-0.5 - i for i in range(wanted)],
            )
            for token, top in zip(tokens, others, strict=True)
        ]
