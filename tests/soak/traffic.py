"""The clients of a soak: adapters by Zipf's law, and every way in which a client can behave."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.soak.http import PATIENCE, Response, Target, opened
from tests.soak.ledger import DRAINING, NOTHING, Ledger, Name
from tests.soak.material import VOCABULARY, ids_of

BASE = "base"
ZIPF = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What came of a request; every one is compared with the ledger, whole ones with the oracle."""

    name: str | None
    """None for the base."""
    sent: float
    answered: float
    """When the answer began, by ``time.monotonic``."""
    digest: str
    """Of the revision that answered; or `NOTHING` or `DRAINING`."""
    prompt: list[int]
    outputs: list[list[int]]
    """Token ids; none for a request that was not read to its end."""


class Traffic:
    """Clients that ask until it is time to end."""

    def __init__(self, target: Target, ledger: Ledger, seed: int) -> None:
        self._target = target
        self._ledger = ledger
        self._rng = random.Random(seed)
        ranks = range(1, len(ledger.names) + 1)
        self._popular = self._rng.sample(ledger.names, len(ledger.names))
        self._weights = [rank**-ZIPF for rank in ranks]
        self._shared = [self._random_ids(12, 70) for _ in range(6)]
        self.seen: list[Seen] = []

    def draw(self, rng: random.Random) -> Name:
        """A name, by Zipf's law."""
        return rng.choices(self._popular, self._weights)[0]

    async def client(self, number: int, going: Callable[[], bool]) -> None:
        """One client: one request after the other."""
        rng = random.Random(f"client {number} of {self._rng.random()}")
        while going():
            await self._ask(rng)
            if rng.random() < 0.1:
                await asyncio.sleep(rng.expovariate(4.0))

    async def _ask(self, rng: random.Random) -> None:
        name = None if rng.random() < 0.06 else self.draw(rng)
        body = self._body(rng, name)
        leaves_after = rng.choice([0, 1, 3, 8]) if rng.random() < 0.12 else None
        sent = time.monotonic()
        try:
            async with (
                asyncio.timeout(PATIENCE),
                opened(self._target, "POST", "/v1/completions", body) as response,
            ):
                if leaves_after == 0:
                    await asyncio.sleep(rng.random() * 0.05)
                    self._ledger.counts["left before an answer"] += 1
                    return
                await response.begin()
                seen = await self._read(response, body, name, sent, leaves_after)
        except (
            OSError,
            asyncio.IncompleteReadError,
            TimeoutError,
            ValueError,
            LookupError,
        ) as error:
            self._ledger.fault(f"request for {body['model']}: {error!r}")
            return
        if seen is not None:
            self.seen.append(seen)

    async def _read(
        self,
        response: Response,
        body: dict[str, Any],
        name: Name | None,
        sent: float,
        leaves_after: int | None,
    ) -> Seen | None:
        if response.status != 200 or not body["stream"]:
            answer = await response.json()
            answered = time.monotonic()
            if response.status == 404 and name is not None:
                self._ledger.counts["not found"] += 1
                return _seen(name, sent, answered, NOTHING, body, [])
            if response.status == 503 and answer["error"]["code"] == "adapter_draining":
                self._ledger.counts["drained"] += 1
                return _seen(name, sent, answered, DRAINING, body, [])
            if response.status != 200:
                self._ledger.fault(f"{body['model']}: {response.status} {answer}")
                return None
            self._ledger.counts["whole answers"] += 1
            texts = [choice["text"] for choice in answer["choices"]]
            return _seen(name, sent, answered, answer["system_fingerprint"], body, texts)
        texts = [""] * body["n"]
        answered, digest, count, event = 0.0, "", 0, None
        async for event in response.events():
            if event == "[DONE]":
                break
            if "error" in event:
                self._ledger.fault(f"{body['model']}: in a stream: {event}")
                return None
            if answered and event["system_fingerprint"] != digest:
                self._ledger.fault(f"{body['model']}: the revision changed within a stream")
            answered, digest = answered or time.monotonic(), event["system_fingerprint"]
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
            count += 1
            if count == leaves_after:
                self._ledger.counts["left within a stream"] += 1
                return _seen(name, sent, answered, digest, body, [])
        if event != "[DONE]":
            self._ledger.fault(f"{body['model']}: a stream broke off")
            return None
        self._ledger.counts["whole streams"] += 1
        return _seen(name, sent, answered, digest, body, texts)

    def _body(self, rng: random.Random, name: Name | None) -> dict[str, Any]:
        prompt = self._random_ids(1, 60, rng)
        if rng.random() < 0.3:
            prompt = rng.choice(self._shared) + prompt[: rng.randrange(3)]
        long = rng.random() < 0.03
        return {
            "model": BASE if name is None else name.name,
            "prompt": prompt,
            "max_tokens": rng.randint(80, 150) if long else rng.randint(1, 32),
            "n": 2 if rng.random() < 0.05 else 1,
            "stream": rng.random() < 0.7,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }

    def _random_ids(self, low: int, high: int, rng: random.Random | None = None) -> list[int]:
        rng = rng or self._rng
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]


def _seen(
    name: Name | None,
    sent: float,
    answered: float,
    digest: str,
    body: dict[str, Any],
    texts: list[str],
) -> Seen:
    outputs = [ids_of(text) for text in texts]
    if any(len(ids) != body["max_tokens"] for ids in outputs):
        raise ValueError(f"{body['max_tokens']} tokens were asked for, texts are {texts}")
    return Seen(
        name=None if name is None else name.name,
        sent=sent,
        answered=answered,
        digest=digest,
        prompt=body["prompt"],
        outputs=outputs,
    )
