"""A step on the device: views of its packed form beside what outlives it, and what it gives.

Legend: R sampled rows, V vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels import AttentionBatch, LoraBatch, LoraSegments
from kernels.entry import SpellOut
from tp_engine.adapters import AdapterTraits
from tp_engine.layers import StepInput
from tp_engine.steps.host_step import HostStep


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """What a step refers to and what outlives it, on the device."""

    tables: Tensor
    """int32 [slots + 1, blocks]: page of each block by slot. The spare last slot has none: -1."""
    last_token: Tensor
    """int64 [slots + 1]."""
    kv: tuple[tuple[Tensor, Tensor], ...]
    """Key and value cache by layer."""
    arena: Tensor
    """uint8, flat."""
    adapter_records: Tensor
    """int64, flat."""
    block_tokens: int
    spell_out: SpellOut

    def logit_slots(self, host: HostStep, packed: Tensor) -> Tensor:
        """int64 [R], the slots of the rows with logits, from a packed step on the device."""
        return host.unpack(packed)["logit_slots"]

    def step_input(self, host: HostStep, packed: Tensor) -> StepInput:
        """The input of the decoder, from a packed step on the device."""
        fields = host.unpack(packed)
        rows = self.spell_out(
            fields["tokens"],
            fields["positions"],
            fields["row_slots"],
            fields["slots"],
            self.last_token,
            self.tables,
            block_tokens=self.block_tokens,
            blocks=-(-host.max_context // self.block_tokens),
        )
        return StepInput(
            tokens=rows.tokens,
            positions=fields["positions"],
            attention=AttentionBatch(
                query_offsets=fields["query_offsets"],
                context_lens=fields["contexts"],
                page_table=rows.page_table,
                write_pages=rows.write_pages,
                write_slots=rows.write_slots,
                max_query=host.max_query,
                max_context=host.max_context,
                decodes=host.decodes,
            ),
            # Where every row is wanted they are so in order.
            logit_rows=None if host.all_sample else fields["logit_rows"],
            kv=self.kv,
            lora=self._lora(host, fields),
        )

    def _lora(self, host: HostStep, fields: dict[str, Tensor]) -> LoraBatch | None:
        if host.max_rank == 0:
            return None
        segments = LoraSegments(
            offsets=fields["segment_offsets"],
            descriptors=fields["descriptors"],
            max_rank=host.max_rank,
            affine=bool(host.traits & AdapterTraits.AFFINE),
            max_rows=host.max_rows,
            tiles=fields["tiles"].view(-1, 4),
        )
        return LoraBatch(arena=self.arena, descriptors=self.adapter_records, segments=segments)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLogits:
    """What a forward pass leaves to the sampler, on the device."""

    logits: Tensor
    """[R, V of this rank]."""
    best: Tensor
    """int64 [R, 2], of each row as `kernels.sampling.Greedy` gives it."""
    slots: Tensor
    """int64 [R]."""

    def first(self, rows: int) -> StepLogits:
        """Without the padding behind the first rows."""
        return StepLogits(logits=self.logits[:rows], best=self.best[:rows], slots=self.slots[:rows])
