"""Uniform random numbers that depend on a seed and a position, and on nothing else.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014): number i of a stream is a hash of its start plus i times an odd constant, so any
number can be had without the ones before it. int64 arithmetic wraps on every device alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mix", "uniform"]


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


GAMMA = _signed(0x9E37_79B9_7F4A_7C15)
_FIRST = _signed(0xBF58_476D_1CE4_E5B9)
_SECOND = _signed(0x94D0_49BB_1331_11EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    # >> copies the sign bit: drop the copies.
    return torch.bitwise_and(x >> bits, 2 ** (64 - bits) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's output function: a bijection of int64 words that hides their structure."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) with 53 random bits, float64 of the inputs' shape.

    Args:
        seeds: int64, any value. Streams of neighbouring seeds are unrelated: a seed is hashed
            before it becomes the start of its stream.
        positions: int64, same shape.
    """
    start = mix(seeds + GAMMA)
    word = mix(start + positions * GAMMA)
    return _shift(word, 11).to(torch.float64).div(2.0**53)
