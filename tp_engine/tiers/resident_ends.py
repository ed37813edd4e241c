"""Which adapters in the arena change the embedding or the LM head, and which rows of a step do.

Most adapters do neither. So nothing of this travels with a plan: every rank reads it from the
record that it copies there, and looks it up by the descriptor numbers of a step's segments.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tp_engine.adapters.ends.record import EndPlaces, EndSizes, MatrixPlace, end_places
from tp_engine.adapters.ends.replaced import EMBEDDING, HEAD
from tp_engine.layers import ArenaMatrix, EndRows, TokenRows, slabs_of
from tp_engine.steps.plan import IntArray
from tp_engine.steps.transfer import to_device


class ResidentEnds:
    """One rank's."""

    def __init__(self, arena: Tensor, sizes: EndSizes) -> None:
        """Begin with none.

        Args:
            arena: uint8, flat.
            sizes: of the rank.
        """
        self._arena = arena
        self._values = arena.view(sizes.dtype)
        self._sizes = sizes
        self._by_descriptor: dict[int, dict[int, TokenRows]] = {}

    def publish(self, descriptor: int, record: Tensor, on_host: Tensor, memory: Tensor) -> None:
        """Know what an adapter changes; whatever began in its record's words before is forgotten.

        Any thread may call it, for a number that no step uses as yet.

        Args:
            descriptor: its number.
            record: int64, on the host, with its places in the arena.
            on_host: likewise, with its places in ``memory``.
            memory: uint8, of the host: what is copied into the arena.
        """
        placed, packed = end_places(record, self._sizes), end_places(on_host, self._sizes)
        changes = {
            end: self._token_rows(places, packed[end], memory) for end, places in placed.items()
        }
        words = range(descriptor, descriptor + record.numel())
        for gone in [each for each in self._by_descriptor if each in words]:
            del self._by_descriptor[gone]
        if changes:
            self._by_descriptor[descriptor] = changes

    def changes(self, descriptor: int) -> Mapping[int, TokenRows]:
        """What the adapter of a record changes, by end."""
        return self._by_descriptor.get(descriptor, {})

    def of_step(
        self, descriptors: IntArray, segment_offsets: IntArray, logit_rows: IntArray
    ) -> EndRows | None:
        """Which rows of a step are changed at which end; None: none at either.

        Args:
            descriptors: [G], of each segment.
            segment_offsets: [G + 1].
            logit_rows: [R], ascending: the rows that the head sees.
        """
        if not self._by_descriptor:
            return None
        heads = np.searchsorted(logit_rows, segment_offsets)
        ends: tuple[list[tuple[slice, TokenRows]], ...] = ([], [])
        for i, descriptor in enumerate(descriptors.tolist()):
            changes = self.changes(descriptor)
            for end, bounds in ((EMBEDDING, segment_offsets), (HEAD, heads)):
                rows = slice(int(bounds[i]), int(bounds[i + 1]))
                if end in changes and rows.start < rows.stop:
                    ends[end].append((rows, changes[end]))
        if not any(ends):
            return None
        return EndRows(embedding=tuple(ends[EMBEDDING]), head=tuple(ends[HEAD]))

    def _token_rows(self, places: EndPlaces, packed: EndPlaces, memory: Tensor) -> TokenRows:
        matrices = {
            role: self._matrix(place)
            for role, place in places.matrices.items()
            if role != "ids" and place.rows and place.columns
        }
        ids = packed.matrices.get("ids")
        return TokenRows(
            whole=matrices.get("whole"),
            ids=to_device(_read_ids(ids, memory), self._arena.device) if ids and ids.rows else None,
            replaced=matrices.get("rows"),
            tokens=matrices.get("tokens"),
            hidden=matrices.get("hidden"),
            scale=places.scale,
        )

    def _matrix(self, place: MatrixPlace) -> ArenaMatrix:
        starts = place.offsets // place.dtype.itemsize
        shape = place.rows, place.columns, place.chunk_rows
        return ArenaMatrix(
            values=self._values,
            starts=to_device(starts.numpy(), self._arena.device),
            slabs=slabs_of(self._values, starts.tolist(), *shape),
            columns=place.columns,
            chunk_rows=place.chunk_rows,
        )


def _read_ids(place: MatrixPlace, memory: Tensor) -> IntArray:
    """int64 [n]."""
    size = place.chunk_rows * torch.int64.itemsize
    flat = memory.view(-1)
    chunks = [flat[at : at + size].view(torch.int64) for at in place.offsets.tolist()]
    return torch.cat(chunks)[: place.rows].numpy()
