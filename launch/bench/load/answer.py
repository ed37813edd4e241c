"""One answer as its client saw it: raw bytes with times, and what they turn out to be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Received:
    """What came over one connection; times by ``time.perf_counter``."""

    index: int
    sent: float = 0.0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    """When each read ended, and its bytes."""
    error: str | None = None
    """Why the connection could not be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A streamed completion."""

    index: int
    sent: float
    ended: float
    events: list[float]
    """When each event with text came."""
    text: str
    tokens: int
    """As the server counted them."""
    error: str | None
    """Why it is not a whole answer."""

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.sent

    @property
    def whole_s(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds a token after the first."""
        more = self.tokens - 1
        return (self.events[-1] - self.events[0]) / more if more > 0 else None


def read_answer(received: Received) -> Answer:
    """Take the bytes of a whole connection apart."""
    ended = received.parts[-1][0] if received.parts else received.sent
    try:
        if received.error is not None:
            raise ValueError(received.error)
        lines, times = _events(received.parts)
        text, moments, tokens = _contents(lines, times)
    except ValueError as error:
        return Answer(
            index=received.index, sent=received.sent, ended=ended, events=[], text="", tokens=0,
            error=str(error),
        )  # fmt: skip
    return Answer(
        index=received.index, sent=received.sent, ended=ended, events=moments, text=text,
        tokens=tokens, error=None,
    )  # fmt: skip


def _contents(lines: list[bytes], times: list[float]) -> tuple[str, list[float], int]:
    """Text, times of the events that had some, and the number of tokens of a stream.

    Raises:
        ValueError: it has an error event, or no end, or no token counts.
    """
    if not lines or lines[-1] != b"[DONE]":
        raise ValueError(f"the stream broke off: {lines[-1:]!r}")
    texts, moments, tokens = [], [], None
    for line, moment in zip(lines[:-1], times, strict=False):
        body: dict[str, Any] = json.loads(line)
        if "error" in body:
            raise ValueError(f"error event: {body['error']}")
        for choice in body["choices"]:
            texts.append(choice["text"])
            moments.append(moment)
        if body.get("usage"):
            tokens = body["usage"]["completion_tokens"]
    if tokens is None or not moments:
        raise ValueError("the stream has no token counts" if moments else "the stream is empty")
    return "".join(texts), moments, tokens


def _events(parts: list[tuple[float, bytes]]) -> tuple[list[bytes], list[float]]:
    """Data of the events of a chunked response, and when each was complete.

    Raises:
        ValueError: the status is not 200.
    """
    data = b"".join(part for _, part in parts)
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise ValueError(f"{head.split(chr(13).encode())[0].decode()}: {body[:300]!r}")
    bounds, total = [], 0
    for moment, part in parts:
        total += len(part)
        bounds.append((total, moment))
    lines, times, at, reads = [], [], len(head) + 4, iter(bounds)
    until, moment = next(reads)
    while at < len(data):
        size_end = data.find(b"\r\n", at)
        size = int(data[at:size_end], 16) if size_end >= 0 else 0
        if size == 0:
            break
        at = size_end + 2 + size
        while until < at:
            until, moment = next(reads, (len(data) + at, moment))
        for event in data[size_end + 2 : at].split(b"\n\n"):
            if event:
                lines.append(event.removeprefix(b"data: "))
                times.append(moment)
        at += 2
    return lines, times
