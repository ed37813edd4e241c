"""The same semantics written out for one row in float64 and plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tp_engine.params import SamplingParams

Row = npt.NDArray[np.float64]


def processed(
    logits: Row,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    suppressed: Sequence[int] = (),
) -> Row:
    """Logits after bias, penalties and suppression."""
    row = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    counts = Counter(output)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in counts.items():
        row[token] -= params.presence_penalty + params.frequency_penalty * count
    row[list(suppressed)] = -math.inf
    return row


def distribution(row: Row, params: SamplingParams) -> Row:
    """Probabilities [V] with which tokens are drawn from processed logits."""
    order = sorted(range(row.size), key=lambda token: (-row[token], token))
    if params.temperature == 0:
        best = np.zeros(row.size)
        best[order[0]] = 1.0
        return best
    weights = {
        token: math.exp((row[token] - row[order[0]]) / params.temperature) for token in order
    }
    kept = order if params.top_k <= 0 else order[: params.top_k]
    total = math.fsum(weights[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if reached >= params.top_p and params.top_p < 1:
            break
        nucleus.append(token)
        reached += weights[token] / total
    kept = [token for token in nucleus if weights[token] >= params.min_p]
    total = math.fsum(weights[token] for token in kept)
    result = np.zeros(row.size)
    result[kept] = [weights[token] / total for token in kept]
    return result
