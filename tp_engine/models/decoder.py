"""The forward pass of one rank's shard.

Legend: T rows of a step, R rows with logits, V local vocabulary rows, H hidden size, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.dispatch import Ops
from kernels.lora import LoraBatch
from sharding import LayerCut, RankCut, weight_slice
from tp_engine.layers import (
    MLP,
    Attention,
    ColumnParallel,
    LMHead,
    LoraSites,
    Projected,
    RowParallel,
    StepInput,
    VocabEmbedding,
    has_deltas,
    sum_add_norm,
)
from tp_engine.models.rope import cos_sin_table
from tp_engine.models.spec import ModelSpec

if TYPE_CHECKING:
    from tp_engine.ranks.comm import Comm
    from tp_engine.weights import LayerWeights, RankWeights

__all__ = ["Decoder"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layer:
    """One pre-norm decoder layer."""

    input_norm: Tensor
    """[H]."""
    attention: Attention
    post_norm: Tensor
    """[H]."""
    mlp: MLP


class Decoder:
    """A pre-norm decoder: every rank runs it on the same rows and ends with its own logits."""

    def __init__(
        self,
        spec: ModelSpec,
        cut: RankCut,
        weights: RankWeights,
        ops: Ops,
        comm: Comm,
        max_positions: int,
    ) -> None:
        """``max_positions`` is the length of the rotary table: the longest context to serve."""
        self.spec = spec
        self._ops = ops
        self._comm = comm
        self._embedding = VocabEmbedding(
            weight=weights.embedding, span=cut.vocab, ops=ops, comm=comm
        )
        self._layers = [
            _build_layer(spec, layer, cut.layers[layer], weights.layers[layer], ops, comm)
            for layer in range(spec.num_layers)
        ]
        self._norm = weights.norm
        self._head = LMHead(weight=weights.lm_head, ops=ops)
        device = weights.embedding.device
        self._cos_sin = cos_sin_table(spec.rope, spec.head_dim, max_positions, device)

    def forward(self, step: StepInput) -> Tensor:
        """Run one step, writing its keys and values into ``step.kv``.

        Returns:
            [R, V] of the model's dtype: logits of ``step.logit_rows`` for the rank's own vocabulary
            rows.
        """
        residual = self._embedding(step.tokens, step.ends)  # [T, H]
        part: Projected | None = None
        for layer, kv in zip(self._layers, step.kv, strict=True):
            column, norm = layer.attention.qkv, layer.input_norm
            qkv, residual = self._project(column, part, residual, norm, step.lora)
            part = layer.attention(qkv, step, self._cos_sin, kv)
            column, norm = layer.mlp.gate_up, layer.post_norm
            if step.lora is not None and has_deltas(step.lora):
                x, residual = self._add_norm(part, residual, norm)
                part = layer.mlp.of_rows(x, step.lora)
            else:
                gate_up, residual = self._project(column, part, residual, norm, None)
                part = layer.mlp(gate_up, None)
        if (rows := step.logit_rows) is not None:
            part, residual = None if part is None else part.of_rows(rows), residual[rows]
        x, _ = self._add_norm(part, residual, self._norm)
        return self._head(x, step.ends)

    def _project(
        self,
        column: ColumnParallel,
        part: Projected | None,
        residual: Tensor,
        norm: Tensor,
        lora: LoraBatch | None,
    ) -> tuple[Projected, Tensor]:
        """``column`` of what `_add_norm` gives, and the total."""
        if part is not None and self._comm.world == 1:
            # Nothing to add, but some look at the sums.
            part = replace(part, base=self._comm.all_reduce(part.base))
            return column.after_norm(part, residual, norm, self.spec.rms_norm_eps, lora)
        x, total = self._add_norm(part, residual, norm)
        return column(x, lora), total

    def _add_norm(
        self, part: Projected | None, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The normalised total and the total of a block's parts and what went into it; before the
        first layer there is nothing to add."""
        eps = self.spec.rms_norm_eps
        if part is None:
            return self._ops.rms_norm(residual, weight, eps), residual
        return sum_add_norm(part, residual, weight, eps, ops=self._ops, comm=self._comm)


def _build_layer(
    spec: ModelSpec, index: int, cut: LayerCut, weights: LayerWeights, ops: Ops, comm: Comm
) -> _Layer:
    dims = spec.dims()

    def sites(*names: str) -> LoraSites:
        widths = [weight_slice(dims, cut, name).rows.size for name in names]
        return LoraSites.of(index, names, widths)

    attention = Attention(
        qkv=ColumnParallel(
            weights=weights.qkv,
            bias=weights.qkv_bias,
            lora=sites("q_proj", "k_proj", "v_proj"),
            ops=ops,
        ),
        o=RowParallel(
            weight=weights.o, bias=weights.o_bias, lora=sites("o_proj"), ops=ops, comm=comm
        ),
        q_heads=cut.q_heads.size,
        kv_heads=cut.kv_heads.size,
        head_dim=spec.head_dim,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        eps=spec.rms_norm_eps,
        window=spec.windows[index],
        ops=ops,
    )
    mlp = MLP(
        gate_up=ColumnParallel(
            weights=weights.gate_up,
            bias=weights.gate_up_bias,
            lora=sites("gate_proj", "up_proj"),
            ops=ops,
        ),
        down=RowParallel(
            weight=weights.down, bias=weights.down_bias, lora=sites("down_proj"), ops=ops, comm=comm
        ),
        ops=ops,
    )
    return _Layer(
        input_norm=weights.input_norm,
        attention=attention,
        post_norm=weights.post_norm,
        mlp=mlp,
    )
