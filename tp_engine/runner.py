"""One rank's execution of plans: slots, page tables, the arena, the forward pass, sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import AttentionBatch, LoraSegments
from tp_engine.adapters import AdapterImage, relocate
from tp_engine.layers import LoraBatch, StepInput
from tp_engine.memory import PageLayout
from tp_engine.models import Decoder
from tp_engine.plan import LAST_SAMPLED, IntArray, SlotInit, StepPlan
from tp_engine.sampling import Sampled, Sampler, SlotStates


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """A rank's pages and the descriptors of the adapters in them; their addresses never change."""

    memory: Tensor
    """uint8 [pages * page_bytes]."""
    descriptors: Tensor
    """int64 [words]: descriptor records of resident adapters."""
    layout: PageLayout

    @classmethod
    def allocate(
        cls, layout: PageLayout, pages: int, descriptor_words: int, device: torch.device
    ) -> Arena:
        """Reserve the memory; pages are written before they are read, so they are not cleared."""
        return cls(
            memory=torch.empty(pages * layout.page_bytes, dtype=torch.uint8, device=device),
            descriptors=torch.zeros(descriptor_words, dtype=torch.int64, device=device),
            layout=layout,
        )

    def publish(self, image: AdapterImage, descriptor: int, pages: list[int], layers: int) -> None:
        """Copy an adapter into its pages and write its record with their addresses."""
        page_bytes = self.layout.page_bytes
        rows = self.memory.view(-1, page_bytes)
        rows[torch.tensor(pages, device=rows.device)] = image.pages.to(rows.device)
        record = relocate(image.record, pages, layers, page_bytes)
        self.descriptors[descriptor : descriptor + record.numel()] = record.to(rows.device)


class Runner:
    """Executes StepPlans on one rank. Every rank runs the same plans in the same order."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        sampler: Sampler,
        states: SlotStates,
        arena: Arena,
        kv: list[tuple[Tensor, Tensor]],
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._states = states
        self.arena = arena
        self._kv = tuple(kv)
        self._device = device
        self._images: dict[int, AdapterImage] = {}
        blocks = arena.layout.blocks(max_model_len)
        self._tables = torch.zeros((max_num_seqs, blocks), dtype=torch.int32, device=device)
        self.forward_calls = 0

    def register(self, handle: int, image: AdapterImage) -> None:
        """Keep this rank's images of an adapter, ready to be published."""
        self._images[handle] = image

    def unregister(self, handle: int) -> None:
        """Forget an adapter's images."""
        del self._images[handle]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled | None:
        """Run one step.

        Returns:
            On rank 0 the sampled tokens, in the order of the plan's sampling sequences; None on
            the other ranks.
        """
        for init in SlotInit.decode_all(plan.opens):
            self._states.open(init)
        self._update_tables(plan.page_updates.reshape(-1, 3))
        self._publish(plan.publish)
        sequences = plan.sequences.reshape(-1, 4)
        step = self._step_input(plan, sequences)
        logits = self._decoder.forward(step)
        self.forward_calls += 1
        chosen = sequences[sequences[:, 3] == 1]
        return self._sampler.step(
            logits,
            chosen[:, 0],
            chosen[:, 2],
            candidates=plan.candidates,
            full_rows=plan.full_rows,
        )

    def _to_device(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)

    def _update_tables(self, updates: IntArray) -> None:
        if len(updates):
            columns = self._to_device(updates.T)
            self._tables[columns[0], columns[1]] = columns[2].to(torch.int32)

    def _publish(self, words: IntArray) -> None:
        numbers = words.tolist()
        while numbers:
            handle, descriptor, count = numbers[:3]
            pages, numbers = numbers[3 : 3 + count], numbers[3 + count :]
            self.arena.publish(self._images[handle], descriptor, pages, len(self._kv))

    def _step_input(self, plan: StepPlan, sequences: IntArray) -> StepInput:
        slots, rows, contexts, samples = sequences.T
        ends = np.cumsum(rows)
        # Row t of a sequence that ends at row e with context c has position c - (e - t).
        positions = np.arange(ends[-1]) + np.repeat(contexts - ends, rows)
        row_slots = self._to_device(np.repeat(slots, rows))
        at = self._to_device(positions)
        tokens = self._to_device(plan.tokens)
        tokens = torch.where(tokens == LAST_SAMPLED, self._states.last_token[row_slots], tokens)
        return StepInput(
            tokens=tokens,
            positions=at,
            attention=self._attention(slots, rows, contexts, row_slots, at),
            logit_rows=self._to_device(ends[samples == 1] - 1),
            kv=self._kv,
            lora=self._lora(plan),
        )

    def _attention(
        self, slots: IntArray, rows: IntArray, contexts: IntArray, row_slots: Tensor, at: Tensor
    ) -> AttentionBatch:
        block = self.arena.layout.block_tokens
        longest = int(contexts.max())
        offsets = np.concatenate([[0], np.cumsum(rows)])
        tables = self._tables[self._to_device(slots), : self.arena.layout.blocks(longest)]
        return AttentionBatch(
            query_offsets=self._to_device(offsets).to(torch.int32),
            context_lens=self._to_device(contexts).to(torch.int32),
            page_table=tables,
            write_pages=self._tables[row_slots, at // block],
            write_slots=(at % block).to(torch.int32),
            max_query=int(rows.max()),
            max_context=longest,
        )

    def _lora(self, plan: StepPlan) -> LoraBatch | None:
        if plan.max_rank == 0:
            return None
        lengths, descriptors = plan.segments.reshape(-1, 2).T
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        segments = LoraSegments(
            offsets=self._to_device(offsets).to(torch.int32),
            descriptors=self._to_device(descriptors),
            max_rank=plan.max_rank,
        )
        return LoraBatch(
            arena=self.arena.memory, descriptors=self.arena.descriptors, segments=segments
        )
