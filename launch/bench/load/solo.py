"""Whether answers under load are the answers that their requests get alone."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.bench.load.answer import Answer
from launch.bench.load.client import Target
from launch.bench.load.workload import Request

NEAR_TIE = 0.1
"""Two best log-probabilities that differ by less may change places with the batch's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solo:
    """What a request gave alone."""

    text: str
    offsets: list[int]
    """Characters before each token."""
    gaps: list[float]
    """Log-probability of the best token above that of the second best."""


def ask_alone(request: Request, target: Target) -> Solo:
    """Send one request while nothing else runs.

    Raises:
        urllib.error.HTTPError: the status is not 200.
    """
    body: dict[str, Any] = {
        "model": request.model, "prompt": request.prompt, "max_tokens": request.tokens,
        "temperature": 0, "ignore_eos": True, "logprobs": 2,
    }  # fmt: skip
    headers = {"content-type": "application/json"}
    if target.keys:
        headers["authorization"] = f"Bearer {target.keys[request.tenant]}"
    url = f"http://{target.host}:{target.port}/v1/completions"
    message = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(message, timeout=target.timeout) as response:
        choice = json.load(response)["choices"][0]
    logprobs = choice["logprobs"]
    best = [sorted(each.values(), reverse=True) for each in logprobs["top_logprobs"]]
    return Solo(
        text=choice["text"],
        offsets=logprobs["text_offset"],
        gaps=[values[0] - values[1] for values in best],
    )


def first_difference(solo: Solo, text: str) -> int | None:
    """Number of the token in which ``text`` leaves the solo text; None when it does not.

    ``text`` may go on; then the last solo token need not be the whole of a character.
    """
    known = solo.text[: solo.offsets[-1]]
    if text.startswith(known):
        return None
    pairs = enumerate(zip(known, text, strict=False))
    equal = next((at for at, (a, b) in pairs if a != b), len(text))
    return max((n for n, offset in enumerate(solo.offsets) if offset <= equal), default=0)


def disagreements(
    samples: Sequence[tuple[Request, Solo]], answers: Sequence[Answer], near_tie: float
) -> list[str]:
    """Answers that leave their solo text at a token which is no near-tie."""
    found = []
    for request, solo in samples:
        at = first_difference(solo, answers[request.index].text)
        # Tokens that share a character's offset are looked at together.
        if at is None:
            continue
        around = [
            gap
            for gap, offset in zip(solo.gaps, solo.offsets, strict=True)
            if offset == solo.offsets[at]
        ]
        if min(around) > near_tie:
            found.append(
                f"request {request.index} differs from itself alone at token {at}, where the best "
                f"token is {min(around):.3f} ahead"
            )
    return found


def sample(requests: Sequence[Request], count: int, tokens: int) -> list[Request]:
    """Evenly spaced requests, cut to at most ``tokens``."""
    step = max(1, len(requests) // max(1, count))
    chosen = requests[::step][:count]
    return [replace(request, tokens=min(request.tokens, tokens)) for request in chosen]
