"""What a revision takes in memory, without its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tp_engine.adapters.packing import AdapterImage
from tp_engine.adapters.revision import AdapterRevision


class ImageSize(NamedTuple):
    """Of a revision's images, equal on all ranks, and what a step needs to know of it."""

    pages: int
    words: int
    """Length of its descriptor record."""
    max_rank: int
    traits: int
    """Bits of `tp_engine.adapters.AdapterTraits`."""
    row_bytes: int
    """Of its rank-rows, on the rank that has the most; the rest of its pages is waste."""

    @classmethod
    def of(cls, revision: AdapterRevision, images: Sequence[AdapterImage]) -> ImageSize:
        """Of a revision that is packed."""
        return cls(
            pages=int(images[0].pages.shape[0]),
            words=images[0].record.numel(),
            max_rank=revision.max_rank,
            traits=int(revision.traits),
            row_bytes=max(image.row_bytes for image in images),
        )
