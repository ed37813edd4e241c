"""One mixed batch: the same question to the base and to every adapter, at the same time."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

__all__ = ["Answer", "ask_all"]

MAX_TOKENS = 80
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one model said, and how fast."""

    model: str
    """Name the request carried: the base's or an adapter's."""

    text: str
    """The whole answer, put together from the stream."""

    tokens: int
    """Completion tokens, as the server counted them."""

    seconds: float
    """From sending the request to the end of the stream."""

    error: str | None = None
    """Why there is no (whole) answer; None when there is."""

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens by wall time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def ask_all(url: str, models: Sequence[str], question: str) -> list[Answer]:
    """Ask every model at once through `url` (no trailing slash); answers in the order of models."""
    return asyncio.run(_ask_all(url, models, question))


async def _ask_all(url: str, models: Sequence[str], question: str) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
        return list(await asyncio.gather(*(_ask(http, model, question) for model in models)))


async def _ask(http: httpx.AsyncClient, model: str, question: str) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    tokens, error = 0, None
    started = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                detail = (await response.aread()).decode(errors="replace")
                error = f"HTTP {response.status_code}: {detail}"
            else:
                async for event in _events(response):
                    if "error" in event:
                        error = str(event["error"])
                    pieces += [c["delta"].get("content") or "" for c in event.get("choices", [])]
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.perf_counter() - started
    return Answer(model=model, text="".join(pieces), tokens=tokens, seconds=seconds, error=error)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a server-sent stream, up to `[DONE]`."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
