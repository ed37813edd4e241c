"""The second check: layer outputs, logits and greedy tokens against one unsharded rank.

Rank 0 loads the model once more, whole, in a world of its own. Both run the same sequences, a few
at a time, so that no more than one group's outputs are held.

Legend: T rows of a group, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from launch.validation.batch import Batch
from launch.validation.forward import Recorded, RecordingDecoder
from launch.validation.loading import Loaded, load
from launch.validation.result import Check, Mismatch, Result
from launch.validation.tokens import TokenCheck
from launch.validation.tolerance import EXACT, TOLERANCES, row_errors
from tp_engine.adapters import AdapterRevision
from tp_engine.ranks.comm import Comm

GROUP = 8
"""Sequences that are run at a time."""


def check_outputs(loaded: Loaded, adapters: Mapping[str, AdapterRevision], batch: Batch) -> Result:
    """Compare with world size 1; every rank must call it, rank 0 gets the result."""
    comm, start = loaded.rank.comm, time.perf_counter()
    alone: Loaded | None = None
    if comm.rank == 0:
        joined = replace(loaded.rank.joined, comm=Comm.alone(comm.device))
        alone = load(joined, adapters, batch)
    sharded = RecordingDecoder(loaded)
    whole = None if alone is None else RecordingDecoder(alone)
    comparison = _Comparison(loaded, batch)
    ran = run_check("load and run unsharded", batch, start)
    for group, sequences, revisions in groups(loaded, adapters, batch):
        comm.gather_numbers([1])  # nobody waits in a collective while rank 0 works alone
        mine = sharded.run(sequences, revisions)
        if whole is not None:
            comparison.add(group, mine, whole.run(sequences, revisions))
    if alone is not None:
        comparison.tokens.compare_runs(alone.tokens)
    result = comparison.result()
    result.checks.insert(0, ran)
    return result


def run_check(name: str, batch: Batch, start: float) -> Check:
    """A line for a run of the batch that began at ``start``: sequences and their new tokens."""
    count = len(batch.prompts)
    seconds = time.perf_counter() - start
    return Check(name=name, tensors=count, elements=count * batch.new_tokens, seconds=seconds)


def groups(
    loaded: Loaded, adapters: Mapping[str, AdapterRevision], batch: Batch
) -> Iterator[tuple[range, list[list[int]], list[AdapterRevision | None]]]:
    """The batch in groups: which sequences, their tokens but the last, their revisions."""
    revisions = {revision.digest: revision for revision in adapters.values()}
    for start in range(0, len(batch.prompts), GROUP):
        group = range(start, min(start + GROUP, len(batch.prompts)))
        sequences = [batch.prompts[i] + loaded.tokens[i][:-1] for i in group]
        yield group, sequences, [revisions.get(batch.digests[i]) for i in group]


class _Comparison:
    """Adds up the groups."""

    def __init__(self, loaded: Loaded, batch: Batch) -> None:
        self._batch = batch
        self._tolerance = TOLERANCES[loaded.rank.config.dtype]
        names = ("embedding rows", "attention outputs", "MLP outputs", "logits")
        self._checks = {name: Check(name=name) for name in names}
        self._mismatches: list[Mismatch] = []
        self.tokens = TokenCheck("greedy tokens", batch, loaded.tokens, self._tolerance)

    def add(self, group: range, sharded: Recorded, whole: Recorded) -> None:
        """Compare one group's pass."""
        assert sharded.logits is not None and whole.logits is not None
        self._compare("embedding rows", "embedding", sharded.sums[0], whole.sums[0], group)
        for i, (mine, other) in enumerate(zip(sharded.sums[1:], whole.sums[1:], strict=True)):
            layer, block = divmod(i, 2)
            name = ("attention", "MLP")[block]
            self._compare(f"{name} outputs", f"layer {layer} {name}", mine, other, group)
        self._compare("logits", "logits", sharded.logits, whole.logits, group)
        self.tokens.add(group, whole.logits)

    def _compare(self, name: str, tensor: str, found: Tensor, whole: Tensor, group: range) -> None:
        """One tensor [T, _]; the embedding is a sum with zeros, so it is exact."""
        check, start = self._checks[name], time.perf_counter()
        check.tensors += 1
        check.elements += whole.numel()
        difference = row_errors(found, whole, [self._batch.lengths[i] - 1 for i in group])
        check.error = max(check.error, difference.largest)
        limit = EXACT if tensor == "embedding" else self._tolerance
        count, row, col = difference.beyond(limit)
        check.seconds += time.perf_counter() - start
        if count:
            check.mismatches += count
            self._mismatches.append(
                Mismatch(
                    check=name,
                    tensor=tensor,
                    rank=None,
                    index=f"[{row}, {col}] (row, column) of {self._names(group)}",
                    detail=f"{count} of {len(whole)} rows are not within tolerance",
                )
            )

    def _names(self, group: range) -> str:
        names: Sequence[str] = [self._batch.names[i] for i in group]
        return "sequences " + ", ".join(names)

    def result(self) -> Result:
        """Of all groups."""
        result = Result(checks=list(self._checks.values()), mismatches=self._mismatches)
        result.add(self.tokens.result())
        return result
