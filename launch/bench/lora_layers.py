"""What adapters add to whole layers, in a captured chain as a decode step has it.

A layer alone would not show it: deltas are made beside the base products and added by what reads
these. So layers of the engine's own parts run one after the other, each with weights and rank-rows
of its own, once with and once without adapters.

Legend: T rows of a step, one token each at the end of a context of `CONTEXT`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import DenseWeight, LoraBatch, Weight
from kernels.dispatch import ops_for
from launch.bench.attention.memory import DIM, KV_HEADS, Q_HEADS, paged
from launch.bench.graphs import graph_us
from launch.bench.lora_arena import INPUTS, MODULES, Module
from launch.bench.lora_step import Step
from launch.bench.tune_nf4 import random_packed
from tp_engine.layers import (
    MLP,
    Attention,
    ColumnParallel,
    LoraSites,
    RowParallel,
    StepInput,
    sum_add_norm,
)
from tp_engine.ranks.comm import Comm

CONTEXT = 128
LAYERS = 6
"""At most; their weights are several times the L2 cache."""
EPS = 1e-5


class Layers:
    """Layers of Llama-3.1-8B's shapes with random weights."""

    def __init__(self, device: torch.device, *, nf4: bool) -> None:
        self._ops, self._comm, self._nf4 = ops_for(device), Comm.alone(device), nf4
        self._device = device
        self._norm = torch.ones(INPUTS[0], dtype=torch.bfloat16, device=device)
        self._cos_sin = torch.rand(CONTEXT, DIM, device=device)
        self._blocks = [self._block(layer) for layer in range(LAYERS)]

    def added(self, step: Step) -> tuple[float, float]:
        """Microseconds a layer without adapters, and what a step's adapters add to them."""
        count = min(LAYERS, step.case.adapters.layers)
        base, both = (self._time(step.case.rows, each, count) for each in (None, step.batch))
        return base, both - base

    def _time(self, rows: int, lora: LoraBatch | None, layers: int) -> float:
        batch = paged(1, [CONTEXT] * rows, 1)
        positions = torch.full((rows,), CONTEXT - 1, device=self._device)
        step = StepInput(
            tokens=positions,
            positions=positions,
            attention=batch.batches[0],
            logit_rows=None,
            kv=tuple(batch.caches),
            lora=lora,
        )
        x = torch.randn(rows, INPUTS[0], device=self._device).bfloat16()
        return graph_us([lambda: self._run(x, step, layers)]) / layers

    def _run(self, x: Tensor, step: StepInput, layers: int) -> None:
        """The layers of `tp_engine.models.decoder.Decoder`, up to the last sum."""
        add: dict[str, Any] = {"ops": self._ops, "comm": self._comm}
        normed, residual = self._ops.rms_norm(x, self._norm, EPS), x
        for index, (attention, mlp) in enumerate(self._blocks[:layers]):
            qkv = attention.qkv(normed, step.lora)
            part = attention(qkv, step, self._cos_sin, step.kv[index % len(step.kv)])
            normed, residual = sum_add_norm(part, residual, self._norm, EPS, **add)
            if step.lora is None:
                part = mlp(mlp.gate_up(normed, None), None)
            else:
                part = mlp.of_rows(normed, step.lora)
            normed, residual = sum_add_norm(part, residual, self._norm, EPS, **add)

    def _block(self, layer: int) -> tuple[Attention, MLP]:
        qkv, o, gate_up, down = MODULES
        attention = Attention(
            qkv=self._column(layer, qkv),
            o=self._row(layer, o),
            q_heads=Q_HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            q_norm=None,
            k_norm=None,
            eps=EPS,
            window=None,
            ops=self._ops,
        )
        mlp = MLP(gate_up=self._column(layer, gate_up), down=self._row(layer, down), ops=self._ops)
        return attention, mlp

    def _column(self, layer: int, module: Module) -> ColumnParallel:
        lora = LoraSites(target=module.target(layer))
        return ColumnParallel(weights=(self._weight(module),), bias=None, lora=lora, ops=self._ops)

    def _row(self, layer: int, module: Module) -> RowParallel:
        lora = LoraSites(target=module.target(layer))
        return RowParallel(
            weight=self._weight(module), bias=None, lora=lora, ops=self._ops, comm=self._comm
        )

    def _weight(self, module: Module) -> Weight:
        if self._nf4:
            return random_packed(module.columns, module.width)
        shape = (module.columns, module.width)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return DenseWeight(weight=values.normal_(0.0, 0.02))


__all__ = ["LAYERS", "Layers"]
