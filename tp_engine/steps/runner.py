"""One rank's execution of plans: slots, page tables, the arena, the forward pass, sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.entry import SpellOut
from kernels.lora import RENEWAL, LoraRenew
from tp_engine.adapters.ends.record import EndSizes
from tp_engine.layers import EndRows
from tp_engine.memory import PageLayout
from tp_engine.models import Decoder
from tp_engine.sampling import Sampled, Sampler
from tp_engine.steps.graphs import StepGraphs, with_bounded_rank
from tp_engine.steps.host_step import HostStep
from tp_engine.steps.plan import IntArray, SlotInit, StepPlan
from tp_engine.steps.step import StepLogits, StepMemory
from tp_engine.steps.transfer import to_device
from tp_engine.tiers.resident_ends import ResidentEnds


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


class Runner:
    """Executes StepPlans on one rank. Every rank runs the same plans in the same order."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        sampler: Sampler,
        arena: Arena,
        end_sizes: EndSizes,
        kv: list[tuple[Tensor, Tensor]],
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device,
        spell_out: SpellOut,
        renew: LoraRenew | None,
        capture: bool,
    ) -> None:
        """Bind a rank's parts together.

        Args:
            sampler: with one slot more than ``max_num_seqs``, for padding.
            end_sizes: of the rank.
            capture: run decode steps, and others of few rows, as CUDA graphs.
        """
        self._decoder = decoder
        self._sampler = sampler
        self.arena = arena
        self.ends = ResidentEnds(arena.memory, end_sizes)
        self._device = device
        blocks = arena.layout.blocks(max_model_len)
        tables = torch.zeros((max_num_seqs + 1, blocks), dtype=torch.int32, device=device)
        tables[max_num_seqs] = -1
        self._memory = StepMemory(
            tables=tables,
            last_token=sampler.states.last_token,
            kv=tuple(kv),
            arena=arena.memory,
            adapter_records=arena.descriptors,
            block_tokens=arena.layout.block_tokens,
            spell_out=spell_out,
        )
        self._graphs: StepGraphs | None = None
        if capture:
            self._graphs = StepGraphs(
                self._compute,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_rows=max_num_batched_tokens,
                device=device,
            )
        self._renew = renew
        self.forward_calls = 0

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self._memory.kv)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled | None:
        """Run one step.

        Returns:
            On rank 0 the sampled tokens, in the order of the plan's sampling sequences; None on
            the other ranks.
        """
        for init in SlotInit.decode_all(plan.opens):
            self._sampler.states.open(init)
        self._update_tables(plan.page_updates.reshape(-1, 3))
        self.forward_calls += 1
        if self._renew is not None and self.forward_calls % RENEWAL == 0:
            self._renew(self._device)
        sequences = plan.sequences.reshape(-1, 4)
        chosen = sequences[sequences[:, 3] == 1]
        return self._sampler.step(
            self._forward(HostStep.of(plan)),
            chosen[:, 0],
            chosen[:, 2],
            candidates=plan.candidates,
            full_rows=plan.full_rows,
        )

    @torch.inference_mode()
    def capture(self, max_rank: int, traits: int) -> None:
        """Capture steps now rather than when they are first needed."""
        if self._graphs is not None:
            self._graphs.capture_all(max_rank, traits)

    def _forward(self, host: HostStep) -> StepLogits:
        ends = self.ends.of_step(host.descriptors, host.segment_offsets, host.logit_rows)
        if self._graphs is not None:
            if ends is None and (logits := self._graphs.run(host)) is not None:
                return logits
            host = with_bounded_rank(host)
        packed = host.pack(pinned=self._device.type == "cuda")
        return self._compute(host, packed.to(self._device, non_blocking=True), ends)

    def _compute(self, host: HostStep, packed: Tensor, ends: EndRows | None = None) -> StepLogits:
        """A step from its packed form on the device: all that a graph captures, without ends."""
        step = replace(self._memory.step_input(host, packed), ends=ends)
        logits = self._decoder.forward(step)
        return self._sampler.greedy(logits, self._memory.logit_slots(host, packed))

    def _update_tables(self, updates: IntArray) -> None:
        if len(updates):
            columns = to_device(updates.T, self._device)
            self._memory.tables[columns[0], columns[1]] = columns[2].to(torch.int32)
