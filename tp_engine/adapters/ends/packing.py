"""Copy the changes of the two ends into a rank's pages, and say in the record where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sharding import TOP, VOCAB_SITES, Span
from tp_engine.adapters.ends.layout import MatrixKey, chunked, end_matrices
from tp_engine.adapters.ends.record import end_words
from tp_engine.adapters.ends.replaced import Replaced
from tp_engine.adapters.layout import GroupKey, Run
from tp_engine.adapters.record import float_bits
from tp_engine.adapters.revision import LoraModule
from tp_engine.adapters.rows import cast_finite, copy_rows
from tp_engine.adapters.targets import VOCAB_MODULES, Place


def cast_replaced(replaced: Mapping[int, Replaced], dtype: torch.dtype) -> dict[int, Replaced]:
    """What is replaced, in another dtype; what two ends share they share afterwards.

    Raises:
        AdapterError: ``not_finite``, if a value is too large.
    """
    cast: dict[int, Tensor] = {}

    def once(end: int, tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and id(tensor) not in cast:
            cast[id(tensor)] = cast_finite(f"what replaces {VOCAB_MODULES[end]}", tensor, dtype)
        return None if tensor is None else cast[id(tensor)]

    return {
        end: Replaced(whole=once(end, each.whole), ids=each.ids, rows=once(end, each.rows))
        for end, each in replaced.items()
    }


def fill_ends(
    record: Tensor,
    modules: Mapping[Place, LoraModule],
    replaced: Mapping[int, Replaced],
    vocab: Span,
    layers: int,
    runs: Mapping[GroupKey, Sequence[Run]],
    pages: Tensor,
) -> Tensor:
    """Copy one rank's chunks into its pages; the record with their places, int64 [W].

    Args:
        record: of the layers.
        modules: in the dtype of the rows; of them those of `TOP`.
        replaced: likewise.
        vocab: the rank's vocabulary rows.
        layers: of the model.
        runs: by group; of a matrix that two ends share under the first one's.
        pages: uint8 [n, page_bytes].
    """
    matrices = end_matrices(modules, replaced, vocab)
    owners = {id(matrix): key for key, matrix in reversed(matrices.items())}
    offsets = {
        (end, role): copy_rows(
            chunked(matrix, pages.shape[1]), runs.get((TOP, *owners[id(matrix)]), []), pages
        )
        for (end, role), matrix in matrices.items()
    }
    heads: dict[MatrixKey, tuple[int, int]] = {}
    for end in range(len(VOCAB_SITES)):
        module = modules.get((TOP, end))
        if module is not None:
            heads[end, "tokens"] = (module.rank, float_bits(module.scale))
        for key in ((end, "whole"), (end, "rows")):
            if key in matrices:
                heads[key] = (0, matrices[key].shape[0])
    head, more = end_words(layers, offsets, heads, record.numel())
    for at, word in head.items():
        record[at] = word
    return torch.cat([record, more])
