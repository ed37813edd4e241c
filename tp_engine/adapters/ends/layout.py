"""What an adapter's changes of the two ends take on one rank: matrices, in chunks of whole rows.

Legend: V local vocabulary rows, H hidden size, r LoRA rank, n replaced rows of the rank.

A matrix with a row a token has rows as short as a LoRA rank and columns longer than a page. So it
is kept token by token (lora_embedding_A, which PEFT stores as [r, vocabulary], is transposed), and
what is placed in pages are its *chunks*: as many whole rows as fill an eighth of a page, the last
chunk with room for as many. Each chunk is a row to `tp_engine.adapters.layout.place_rows`.

By role, the matrices of an end W: ``tokens`` [V, r] and ``hidden`` [r, H], whose product times the
scale is added; ``whole`` [V, H], in the place of W; ``rows`` [n, H], in the place of the rows
``ids`` [n, 1] (int64, counted from the rank's first row).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sharding import TOP, VOCAB_SITES, Span
from tp_engine.adapters.ends.replaced import EMBEDDING, Replaced
from tp_engine.adapters.layout import EndRole, Group
from tp_engine.adapters.revision import LoraModule
from tp_engine.adapters.targets import Place

MatrixKey = tuple[int, EndRole]
"""(end, role)."""
CHUNKS_A_PAGE: Final = 8


def chunk_rows(rows: int, row_bytes: int, page_bytes: int) -> int:
    """Rows of a chunk: at least 1, and no more than there are."""
    return max(1, min(rows, page_bytes // CHUNKS_A_PAGE // row_bytes))


def end_matrices(
    modules: Mapping[Place, LoraModule], replaced: Mapping[int, Replaced], vocab: Span
) -> dict[MatrixKey, Tensor]:
    """Views of what a rank holds; two ends that are tied share one.

    Args:
        modules: of which those of `TOP` matter.
        replaced: by end.
        vocab: the rank's vocabulary rows.
    """
    found: dict[MatrixKey, Tensor] = {}
    whole: dict[int, MatrixKey] = {}
    for end in range(len(VOCAB_SITES)):
        module, change = modules.get((TOP, end)), replaced.get(end)
        if module is not None:
            embeds = end == EMBEDDING
            tokens, hidden = (module.a.T, module.b.T) if embeds else (module.b, module.a)
            found[end, "tokens"] = tokens[vocab.slice]
            found[end, "hidden"] = hidden
        if change is not None and change.whole is not None:
            first = whole.setdefault(id(change.whole), (end, "whole"))
            found[end, "whole"] = found.get(first, change.whole[vocab.slice])
        if change is not None and change.ids is not None and change.rows is not None:
            ids = change.ids
            start, stop = torch.searchsorted(ids, torch.tensor([vocab.start, vocab.stop])).tolist()
            found[end, "rows"] = change.rows[start:stop]
            found[end, "ids"] = (ids[start:stop] - vocab.start)[:, None]
    return found


def end_groups(
    matrices: Mapping[MatrixKey, Tensor], dtype: torch.dtype, page_bytes: int
) -> Iterator[Group]:
    """The chunks of each matrix, as rows to be placed; one that two ends share comes once.

    Args:
        dtype: of all but the ids.
    """
    seen: set[int] = set()
    for (end, role), matrix in matrices.items():
        if id(matrix) not in seen and matrix.numel():
            seen.add(id(matrix))
            rows, columns = matrix.shape
            row_bytes = columns * (torch.int64 if role == "ids" else dtype).itemsize
            count = chunk_rows(rows, row_bytes, page_bytes)
            yield Group((TOP, end, role), -(-rows // count), count * row_bytes)


def chunked(matrix: Tensor, page_bytes: int) -> Tensor:
    """A matrix [rows, columns] in the dtype that it is placed in, as its chunks [chunks, width]."""
    rows, columns = matrix.shape
    if not matrix.numel():
        return matrix.new_empty(0, columns)
    count = chunk_rows(rows, columns * matrix.dtype.itemsize, page_bytes)
    return pad(matrix, (0, 0, 0, -rows % count)).reshape(-1, count * columns)
