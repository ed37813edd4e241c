"""One step's LoRA work on the device, checked against the reference and timed in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.lora import LoraBatch, decode, gpu, reference
from kernels.lora.plans import AddPlan
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan
from launch.bench.graphs import graph_us
from launch.bench.lora_arena import MODULES, Adapters, Module

Pair = tuple[PrefillShrinkPlan | None, PrefillExpandPlan | None]
Plans = AddPlan | Pair | None
CHOSEN = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step's rows and adapters."""

    name: str
    adapters: Adapters
    counts: list[int]
    who: list[int | None]
    target: float | None = None
    """Microseconds a cold layer that it should take."""

    @property
    def rows(self) -> int:
        """T."""
        return sum(self.counts)


@dataclass(kw_only=True, slots=True)
class Step:
    """The tensors of a case."""

    case: Case
    batch: LoraBatch
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Step:
        """Random rows."""
        device = case.adapters.arena.device
        step = cls(case=case, batch=case.adapters.batch(case.counts, case.who))
        for module in MODULES:
            x, y = (
                torch.randn(case.rows, size, device=device).bfloat16()
                for size in (module.width, module.columns)
            )
            step.inputs[module.name], step.outputs[module.name] = x, y
        return step

    def add(self, module: Module, layer: int, plans: Plans = CHOSEN, ops: Any = gpu) -> None:
        """The delta of one projection: in one launch with an `AddPlan`, in two with a pair."""
        x, y = self.inputs[module.name], self.outputs[module.name]
        target = module.target(layer)
        if plans is None:
            ops.lora_add_(y, x, self.batch, target)
        elif isinstance(plans, AddPlan):
            decode.add_(y, x, self.batch, target, plan=plans)
        else:
            h = gpu.lora_shrink(x, self.batch, target, plan=plans[0])
            gpu.lora_expand_(y, h, self.batch, target, plan=plans[1])

    def check(self, plans: dict[str, Plans] | None = None) -> float:
        """Return the largest error of any projection, as a share of the largest delta."""
        worst = 0.0
        for module in MODULES:
            before = self.outputs[module.name].clone()
            self.outputs[module.name].zero_()
            self.add(module, 0, (plans or {}).get(module.name, CHOSEN))
            ours = self.outputs[module.name].float()
            self.outputs[module.name].zero_()
            self.add(module, 0, ops=reference)
            truth = self.outputs[module.name].float()
            self.outputs[module.name].copy_(before)
            error = (ours - truth).abs().max() / truth.abs().max().clamp_min(1e-6)
            worst = max(worst, error.item() if torch.isfinite(ours).all() else float("inf"))
        return worst


class Bench:
    """Times steps; keeps the flush buffer and its time."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.zeros(48 << 20, dtype=torch.float32, device=device)  # 192 MiB
        self._sum = torch.zeros((), device=device)
        self._repeats = 8
        self._flush_time = graph_us([self._flushes])

    def _flushes(self) -> None:
        for _ in range(self._repeats):
            self._empty_cache()

    def _empty_cache(self) -> None:
        torch.sum(self._flush, 0, out=self._sum)  # reads only: no dirty lines to write back later

    def cold(self, step: Step, plans: dict[str, Plans] | None = None) -> float:
        """Microseconds a layer, L2 emptied before each."""
        layers = step.case.adapters.layers

        def run() -> None:
            for i in range(self._repeats):
                self._empty_cache()
                for module in MODULES:
                    step.add(module, i % layers, (plans or {}).get(module.name, CHOSEN))

        return (graph_us([run]) - self._flush_time) / self._repeats

    def turning(self, step: Step, modules: Sequence[Module], plans: Plans = CHOSEN) -> float:
        """Microseconds a layer of these projections, all layers in turn."""
        layers = step.case.adapters.layers

        def run() -> None:
            for layer in range(layers):
                for module in modules:
                    step.add(module, layer, plans)

        return graph_us([run]) / layers


__all__ = ["CHOSEN", "Bench", "Case", "Pair", "Plans", "Step"]
