"""A pass over whole sequences that records what each layer adds, on a rank's live weights.

The decoder is the serving one, over the same weights and the same arena. What makes it record is
its `Comm`: every block of a tensor-parallel layer ends in one sum over ranks, so the results of
those sums are the outputs of the embedding, and of attention and MLP of each layer, in order.

Legend: S sequences, T rows (all their tokens but the last), V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels import AttentionBatch, LoraBatch, LoraSegments, ops_for
from kernels.lora.tiles import tile_table
from launch.validation.loading import Loaded
from tp_engine.adapters import AdapterRevision, AdapterTraits
from tp_engine.layers import StepInput
from tp_engine.memory import PageLayout, kv_views
from tp_engine.models import Decoder
from tp_engine.rank import Rank
from tp_engine.ranks.comm import Comm
from tp_engine.steps.plan import NO_ADAPTER


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorded:
    """One pass."""

    sums: list[Tensor]
    """[T, H] each, on the CPU: embedding, then attention and MLP of each layer."""
    logits: Tensor | None
    """float32 [T, V] on the CPU of rank 0, None elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingComm(Comm):
    """A rank's collectives, which keep the results of all sums."""

    sums: list[Tensor] = field(default_factory=list)
    """On the CPU, in order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """As `Comm.all_reduce`."""
        total = Comm.all_reduce(self, x)
        self.sums.append(total.to("cpu", copy=True))
        return total


class RecordingDecoder:
    """A second decoder over a loaded rank's weights."""

    def __init__(self, loaded: Loaded) -> None:
        """Of the same rank, config and collectives as the serving one."""
        positions = loaded.rank.config.max_model_len
        assert positions is not None
        self._loaded = loaded
        self._rank: Rank = loaded.rank
        comm = self._rank.comm
        collectives = {name: getattr(comm, name) for name in Comm.__dataclass_fields__}
        # Without mailboxes, through which sums and norms would be taken at once.
        self._comm = RecordingComm(**{**collectives, "mailboxes": None})
        self._decoder = Decoder(
            self._rank.joined.spec,
            self._rank.cuts[comm.rank],
            self._rank.weights,
            ops_for(comm.device, deterministic=self._rank.config.deterministic),
            self._comm,
            max_positions=positions,
        )

    @torch.inference_mode()
    def run(
        self, sequences: Sequence[Sequence[int]], revisions: Sequence[AdapterRevision | None]
    ) -> Recorded:
        """Run all rows of some sequences in one step; every rank must call it.

        Args:
            sequences: token ids.
            revisions: of each; None for the base. Without any, the step has no adapters.
        """
        rank = self._rank
        lengths = [len(sequence) for sequence in sequences]
        pages = sum(map(rank.layout.blocks, lengths))
        size = pages * rank.layout.page_bytes
        memory = torch.zeros(size, dtype=torch.uint8, device=rank.comm.device)
        kv = kv_views(memory, rank.layout, rank.dims, rank.cuts[rank.comm.rank])
        at = torch.cat([torch.arange(length) for length in lengths]).to(rank.comm.device)
        step = StepInput(
            tokens=torch.tensor([t for s in sequences for t in s], device=rank.comm.device),
            positions=at,
            attention=_attention(lengths, rank.layout, rank.comm.device),
            logit_rows=torch.arange(sum(lengths), device=rank.comm.device),
            kv=tuple(kv),
            lora=self._lora(lengths, revisions),
            ends=rank.worker.runner.ends.of_step(
                np.array(self._numbers(revisions)),
                np.cumsum([0, *lengths]),
                np.arange(sum(lengths)),
            ),
        )
        self._comm.sums.clear()
        logits = self._gather(self._decoder.forward(step))
        return Recorded(sums=list(self._comm.sums), logits=logits)

    def _lora(
        self, lengths: Sequence[int], revisions: Sequence[AdapterRevision | None]
    ) -> LoraBatch | None:
        adapters = [revision for revision in revisions if revision is not None]
        max_rank = max((revision.max_rank for revision in adapters), default=0)
        if max_rank == 0:
            return None
        arena, device = self._rank.worker.runner.arena, self._rank.comm.device
        numbers = np.array(self._numbers(revisions), dtype=np.int64)
        segments = LoraSegments(
            offsets=_offsets(lengths).to(device),
            descriptors=torch.from_numpy(numbers).to(device),
            max_rank=max_rank,
            affine=any(revision.traits & AdapterTraits.AFFINE for revision in adapters),
            # For the kernels that serve few rows.
            tiles=torch.from_numpy(tile_table(np.array(lengths), numbers)).to(device),
        )
        return LoraBatch(arena=arena.memory, descriptors=arena.descriptors, segments=segments)

    def _numbers(self, revisions: Sequence[AdapterRevision | None]) -> list[int]:
        """The descriptor number of each revision."""
        known = self._loaded.descriptors
        return [NO_ADAPTER if each is None else known[each.digest] for each in revisions]

    def _gather(self, logits: Tensor) -> Tensor | None:
        """[T, V of this rank] of all ranks, side by side."""
        cuts = self._rank.cuts
        missing = cuts[0].vocab_padded - logits.shape[1]
        padded = torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
        parts = self._rank.comm.gather_to_zero(padded)
        if parts is None:
            return None
        sized = zip(parts, cuts, strict=True)
        return torch.cat([part[:, : cut.vocab.size].cpu().float() for part, cut in sized], dim=1)


def _offsets(lengths: Sequence[int]) -> Tensor:
    """int32 [S + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _attention(lengths: Sequence[int], layout: PageLayout, device: torch.device) -> AttentionBatch:
    """Each sequence whole, its pages one after the other."""
    counts = [layout.blocks(length) for length in lengths]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    for row, first, count in zip(table, firsts, counts, strict=True):
        row[:count] = torch.arange(first, first + count)
    rows = [(i, position) for i, length in enumerate(lengths) for position in range(length)]
    block = layout.block_tokens
    return AttentionBatch(
        query_offsets=_offsets(lengths).to(device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table.to(device),
        write_pages=torch.stack([table[i, position // block] for i, position in rows]).to(device),
        write_slots=torch.tensor([p % block for _, p in rows], dtype=torch.int32, device=device),
        max_query=max(lengths),
        max_context=max(lengths),
    )
