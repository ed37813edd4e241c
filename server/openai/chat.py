"""``/v1/chat/completions``: from fields to a job, and from deltas to answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import InvalidRequest
from server.openai.fields import ChatFields
from server.openai.generation import Delta, Job
from server.openai.logprobs import chat_logprobs
from server.openai.prompts import chat_ids, output_limit
from server.openai.sampling import outputs_per_prompt, sampling_params
from server.openai.shapes import Chat, ChatChoice, ChatMessage, Usage
from tp_engine.messages import Ready
from tp_engine.text import Tokenizer

MAX_TOP_LOGPROBS = 20


async def chat_job(fields: ChatFields, tokenizer: Tokenizer, ready: Ready) -> Job:
    """What ``fields`` ask for. Raises `InvalidRequest`."""
    n = outputs_per_prompt(fields)
    if fields.echo:
        raise InvalidRequest("echo is not supported for chat", param="echo", code="unsupported")
    logprobs = _logprobs(fields)
    prompt = await chat_ids(fields, tokenizer, ready)
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    wanted: int | None = getattr(fields, name)
    limit = output_limit([prompt], wanted, ready, default=None, name=name)
    params = sampling_params(fields, ready, max_tokens=limit, logprobs=logprobs)
    return Job(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        model=fields.model,
        prompts=[prompt],
        n=n,
        params=params,
        salt=fields.cache_salt or "",
        wait_for_adapter=fields.wait_for_adapter is not False,
        skip_special_tokens=fields.skip_special_tokens is not False,
        continues=fields.continue_final_message or False,
    )


def _logprobs(fields: ChatFields) -> int | None:
    top = fields.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs={top} is not allowed: an integer from 0 to {MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )
    if not fields.logprobs:
        if top:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        return None
    return top or 0


class ChatFormat:
    """Lays out the answers of one chat request."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._created = int(time.time())

    def whole(self, outputs: Sequence[Delta], usage: Usage, *, revision: str | None) -> Chat:
        """See `Format`."""
        choices = [
            self._choice(output, message=ChatMessage(role="assistant", content=output.text))
            for output in outputs
        ]
        return self._chat("chat.completion", choices, usage, revision)

    def chunks(
        self, delta: Delta, usage: Usage | UnsetType | None, *, first: bool, revision: str | None
    ) -> list[msgspec.Struct]:
        """See `Format`."""
        chunks: list[msgspec.Struct] = []
        if first:
            opening = ChatChoice(index=delta.index, delta=ChatMessage(role="assistant", content=""))
            chunks.append(self._chunk([opening], usage, revision))
        text = ChatMessage(content=delta.text or UNSET)
        choice = self._choice(delta, delta_message=text)
        chunks.append(self._chunk([choice], usage, revision))
        return chunks

    def usage_chunk(self, usage: Usage, *, revision: str | None) -> Chat:
        """See `Format`."""
        return self._chunk([], usage, revision)

    def _chunk(
        self, choices: list[ChatChoice], usage: Usage | UnsetType | None, revision: str | None
    ) -> Chat:
        return self._chat("chat.completion.chunk", choices, usage, revision)

    def _chat(
        self,
        kind: str,
        choices: list[ChatChoice],
        usage: Usage | UnsetType | None,
        revision: str | None,
    ) -> Chat:
        job = self._job
        return Chat(
            id=job.id,
            object=kind,
            created=self._created,
            model=job.model,
            system_fingerprint=revision,
            choices=choices,
            usage=usage,
        )

    def _choice(
        self,
        delta: Delta,
        *,
        message: ChatMessage | UnsetType = UNSET,
        delta_message: ChatMessage | UnsetType = UNSET,
    ) -> ChatChoice:
        wanted = self._job.params.logprobs is not None
        return ChatChoice(
            index=delta.index,
            message=message,
            delta=delta_message,
            logprobs=chat_logprobs(delta.pieces, self._tokenizer) if wanted else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
