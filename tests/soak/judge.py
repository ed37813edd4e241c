"""Whether what came was right: by the ledger the revision, by PEFT alone the tokens.

Legend: B outputs, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from tests.distributed.agreement import compare
from tests.helpers.tiny_models import load_oracle
from tests.soak.ledger import Ledger
from tests.soak.traffic import Seen

BATCH = 64
"""Outputs that the oracle looks at together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """On all outputs."""

    outputs: int
    positions: int
    near_ties: int
    revisions: int
    """How many different ones answered."""
    wrong: list[str]


def check_revisions(seen: Sequence[Seen], ledger: Ledger) -> list[str]:
    """Requests that were answered by what their name did not mean, in words."""
    names = {name.name: name for name in ledger.names}
    wrong = []
    for each in seen:
        if each.name is None:
            continue
        allowed = names[each.name].meanings(each.sent, each.answered)
        if each.digest not in allowed:
            wrong.append(f"{each.name} was answered by {each.digest or 'nobody'}, meant {allowed}")
    return wrong


def check_outputs(model: Path, directories: Mapping[str, Path], seen: Sequence[Seen]) -> Verdict:
    """Compare every whole output with the oracle's choice after each of its tokens."""
    by_digest: dict[Path | None, Counter[tuple[tuple[int, ...], tuple[int, ...]]]]
    by_digest = defaultdict(Counter)
    for each in seen:
        for output in each.outputs:
            directory = None if each.name is None else directories[each.digest]
            by_digest[directory][tuple(each.prompt), tuple(output)] += 1
    positions = near_ties = outputs = 0
    wrong: list[str] = []
    for directory, counted in by_digest.items():
        for (prompt, output), logits in _oracle(model, directory, sorted(counted)):
            agreement = compare(output, logits)
            times = counted[prompt, output]
            outputs += times
            positions += agreement.positions * times
            near_ties += agreement.near_ties * times
            name = "the base" if directory is None else directory.name
            wrong += [f"{name} after {list(prompt)}: {text}" for text in agreement.wrong[:1]]
    return Verdict(
        outputs=outputs,
        positions=positions,
        near_ties=near_ties,
        revisions=len(by_digest),
        wrong=wrong,
    )


Pair = tuple[tuple[int, ...], tuple[int, ...]]


@torch.inference_mode()
def _oracle(
    model: Path, directory: Path | None, pairs: list[Pair]
) -> Iterator[tuple[Pair, Tensor]]:
    """Logits [T, V] that choose each token of each output, in float64."""
    network: Any = load_oracle(model, dtype=torch.float64)
    if directory is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a bias of B cannot be merged into the base
            network = peft.PeftModel.from_pretrained(copy.deepcopy(network), directory)
        network.to(torch.float64).eval()
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        rows = [[*prompt, *output[:-1]] for prompt, output in batch]
        longest = max(map(len, rows))
        # What is padded comes later than all that is looked at, and is never attended to.
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits: Tensor = network(tokens, use_cache=False).logits
        for pair, row, each in zip(batch, rows, logits, strict=True):
            yield pair, each[len(row) - len(pair[1]) : len(row)]
