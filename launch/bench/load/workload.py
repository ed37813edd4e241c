"""The requests of a run, all decided before it: when they come, for which adapter, how long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a run."""

    index: int
    at: float
    """Seconds after the start; 0 for all in a closed loop, which sends as answers end."""
    model: str
    prompt: list[int]
    tokens: int
    """Exactly so many are generated."""
    tenant: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a run's requests are drawn from."""

    requests: int
    models: tuple[str, ...]
    """Names to choose from, the most popular first."""
    popularity: str
    """``power``, ``uniform`` or ``turns``."""
    alpha: float
    """Of the power law: 1 is uniform, smaller is more skewed."""
    prompt_tokens: tuple[int, int]
    """Least and most, drawn uniformly."""
    output_tokens: tuple[int, int]
    vocab: int
    """Prompt tokens are drawn from `FIRST_TOKEN` up to this."""
    tenants: int
    rate: float | None
    """Requests a second; None is a closed loop."""
    cv: float
    """Coefficient of variation of the gaps between arrivals: 1 is a Poisson process."""
    seed: int

    def __post_init__(self) -> None:
        for name in ("requests", "tenants"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: at least 1")
        if not self.models:
            raise ValueError("models=() is not allowed: at least one name")
        if self.popularity not in POPULARITIES:
            raise ValueError(f"popularity={self.popularity!r}: one of {', '.join(POPULARITIES)}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} is not allowed: above 0, at most 1")
        if self.cv <= 0 or (self.rate is not None and self.rate <= 0):
            raise ValueError(f"cv={self.cv}, rate={self.rate}: both must be above 0")
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name}={low},{high} is not allowed: 1 <= least <= most")
        if self.vocab <= FIRST_TOKEN:
            raise ValueError(f"vocab={self.vocab} is not allowed: above {FIRST_TOKEN}")

    def draw(self) -> list[Request]:
        """The requests; the same for the same fields."""
        rng = random.Random(self.seed)
        times = arrivals(self.requests, self.rate, self.cv, rng)
        models = choose(self.models, self.requests, self.popularity, self.alpha, rng)
        return [
            Request(
                index=index,
                at=times[index],
                model=models[index],
                prompt=[
                    rng.randrange(FIRST_TOKEN, self.vocab)
                    for _ in range(rng.randint(*self.prompt_tokens))
                ],
                tokens=rng.randint(*self.output_tokens),
                tenant=index % self.tenants,
            )
            for index in range(self.requests)
        ]


POPULARITIES = ("power", "uniform", "turns")
FIRST_TOKEN = 256
"""Lower ids are bytes and special tokens of most vocabularies."""


def arrivals(count: int, rate: float | None, cv: float, rng: random.Random) -> list[float]:
    """When each request comes: gaps of a Gamma distribution with mean 1 / rate.

    The Gamma distribution of shape 1 / cv² has the coefficient of variation cv; cv = 1 gives the
    exponential gaps of a Poisson process.
    """
    if rate is None:
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        now += rng.gammavariate(1 / cv**2, cv**2 / rate)
        times.append(now)
    return times


def power_law(count: int, alpha: float) -> list[float]:
    """Shares of ``count`` adapters, such that the k most popular ones get (k / count) ** alpha.

    The distribution of S-LoRA's synthetic workloads (Sheng et al., 2023).
    """
    heads = [(k / count) ** alpha for k in range(count + 1)]
    return [after - before for before, after in pairwise(heads)]


def choose(
    models: Sequence[str], count: int, popularity: str, alpha: float, rng: random.Random
) -> list[str]:
    """The model of each request."""
    if popularity == "turns":
        return [models[i % len(models)] for i in range(count)]
    if popularity == "uniform":
        return [rng.choice(models) for _ in range(count)]
    return rng.choices(models, weights=power_law(len(models), alpha), k=count)
