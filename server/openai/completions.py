"""``/v1/completions``: from fields to a job, and from deltas to answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UnsetType

from server.errors import InvalidRequest
from server.openai.fields import CompletionFields
from server.openai.generation import Delta, Job
from server.openai.logprobs import completion_logprobs
from server.openai.prompts import completion_ids, output_limit, split_prompts
from server.openai.sampling import outputs_per_prompt, sampling_params
from server.openai.shapes import Completion, CompletionChoice, CompletionLogprobs, Usage
from tp_engine.messages import Ready
from tp_engine.text import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completion_job(fields: CompletionFields, tokenizer: Tokenizer, ready: Ready) -> Job:
    """What ``fields`` ask for. Raises `InvalidRequest`."""
    n = outputs_per_prompt(fields)
    if fields.echo and fields.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs is not supported: there are none for prompts", param="echo"
        )
    prompts = await completion_ids(fields, tokenizer, ready)
    limit = output_limit(
        prompts, fields.max_tokens, ready, default=DEFAULT_MAX_TOKENS, name="max_tokens"
    )
    params = sampling_params(fields, ready, max_tokens=limit, logprobs=fields.logprobs)
    return Job(
        id=f"cmpl-{uuid.uuid4().hex}",
        model=fields.model,
        prompts=prompts,
        n=n,
        params=params,
        salt=fields.cache_salt or "",
        wait_for_adapter=fields.wait_for_adapter is not False,
        skip_special_tokens=fields.skip_special_tokens is not False,
        continues=True,
    )


class CompletionFormat:
    """Lays out the answers of one completions request."""

    def __init__(self, fields: CompletionFields, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._echoes: list[str] = []
        if fields.echo:
            self._echoes = [
                prompt
                if isinstance(prompt, str)
                else tokenizer.decode(prompt, skip_special_tokens=job.skip_special_tokens)
                for prompt in split_prompts(fields.prompt)
            ]

    def whole(self, outputs: Sequence[Delta], usage: Usage, *, revision: str | None) -> Completion:
        """See `Format`."""
        choices = [self._choice(output, self._echo(output.index)) for output in outputs]
        return self._completion(choices, usage, revision)

    def chunks(
        self, delta: Delta, usage: Usage | UnsetType | None, *, first: bool, revision: str | None
    ) -> list[msgspec.Struct]:
        """See `Format`."""
        choice = self._choice(delta, self._echo(delta.index) if first else "")
        return [self._completion([choice], usage, revision)]

    def usage_chunk(self, usage: Usage, *, revision: str | None) -> Completion:
        """See `Format`."""
        return self._completion([], usage, revision)

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        revision: str | None,
    ) -> Completion:
        return Completion(
            id=self._job.id,
            created=self._created,
            model=self._job.model,
            system_fingerprint=revision,
            choices=choices,
            usage=usage,
        )

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._job.n] if self._echoes else ""

    def _choice(self, delta: Delta, echo: str) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None
        if self._job.params.logprobs is not None:
            logprobs = completion_logprobs(delta.pieces, self._tokenizer)
        return CompletionChoice(
            index=delta.index,
            text=echo + delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
