"""One HTTP request's outputs: fanned out to the engine, turned into text, counted.

prompts × n ── Submit ──> engine ── Output ──> Batch ──> OutputText ──> Delta
index = prompt · n + i
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from server.engine_client import EngineClient
from server.metrics import HttpMetrics
from server.openai.sampling import seed_of_output
from server.openai.shapes import CachedTokens, Usage
from tp_engine.messages import Output, Submit
from tp_engine.params import SamplingParams
from tp_engine.text import OutputText, Piece, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a request asks for, checked."""

    id: str
    """Of the response; engine requests are ``id-index``."""
    model: str
    prompts: list[list[int]]
    n: int
    """Outputs per prompt."""
    params: SamplingParams
    salt: str
    wait_for_adapter: bool
    """Rather than be refused while the adapter is being loaded."""
    skip_special_tokens: bool
    continues: bool
    """Whether outputs continue the prompt's text, rather than begin a text of their own."""

    def submits(self) -> list[Submit]:
        """The engine requests, in index order."""
        return [
            Submit(
                request_id=f"{self.id}-{index}",
                model=self.model,
                prompt=self.prompts[index // self.n],
                params=msgspec.structs.replace(
                    self.params, seed=seed_of_output(self.params.seed, index % self.n)
                ),
                salt=self.salt,
                wait_for_adapter=self.wait_for_adapter,
            )
            for index in range(len(self.prompts) * self.n)
        ]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step adds to output ``index``."""

    index: int
    text: str
    pieces: tuple[Piece, ...]
    finish_reason: str | None
    """Set in an output's last delta."""
    stop_reason: str | int | None


class Generation:
    """Runs a `Job`. Iterate over `deltas` once, and `close` it whatever happens."""

    def __init__(
        self, job: Job, client: EngineClient, tokenizer: Tokenizer, metrics: HttpMetrics
    ) -> None:
        self.job = job
        self._prompt_tokens = sum(len(ids) for ids in job.prompts)
        # Before anything is made for each of them.
        client.check_room(len(job.prompts) * job.n, self._prompt_tokens * job.n)
        submits = job.submits()
        self._texts = [
            OutputText(
                tokenizer,
                stops=job.params.stop,
                min_tokens=job.params.min_tokens,
                skip_special_tokens=job.skip_special_tokens,
                continues=job.continues,
            )
            for _ in submits
        ]
        self._completion_tokens = [0] * len(submits)
        self._cached_tokens = [0] * len(submits)
        self._metrics = metrics
        self._started = time.perf_counter()
        self._batch = client.submit(submits)

    def close(self) -> None:
        """Abort what is still running."""
        self._batch.close()

    async def deltas(self) -> AsyncIterator[Delta]:
        """The outputs as they come; raises `ApiError` when one is lost."""
        async for index, output in self._batch:
            delta = self._advance(index, output)
            if delta.text or delta.pieces or delta.finish_reason:
                yield delta
        self._metrics.observe(
            started=self._started,
            first=self._batch.first,
            last=self._batch.last,
            tokens=max(self._completion_tokens),
        )

    @property
    def revision(self) -> str | None:
        """SHA-256 of what answers, once it has begun to."""
        return self._batch.revision

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        completion = sum(self._completion_tokens)
        cached = sum(self._cached_tokens[:: self.job.n])
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._prompt_tokens + completion,
            prompt_tokens_details=CachedTokens(cached_tokens=cached),
        )

    def _advance(self, index: int, output: Output) -> Delta:
        text = self._texts[index]
        new = text.push(output.tokens, output.logprobs)
        added, pieces = new.text, new.pieces
        if output.finish_reason is not None:
            rest = text.flush()
            added, pieces = added + rest.text, pieces + rest.pieces
        self._completion_tokens[index] = output.completion_tokens
        self._cached_tokens[index] = max(self._cached_tokens[index], output.cached_tokens)
        reason = output.finish_reason
        cause: str | int | None = None  # of the model's own end
        if output.stop_token in self.job.params.stop_token_ids:
            cause = output.stop_token
        if text.stopped_by is not None:
            # The engine may have run on: its surplus tokens are neither shown nor counted.
            self._completion_tokens[index] = text.tokens
            self._batch.finish(index)
            reason, cause = "stop", text.stopped_by
        return Delta(
            index=index, text=added, pieces=pieces, finish_reason=reason, stop_reason=cause
        )
