"""Which part of every layer a rank holds: index arithmetic only.

Units are indivisible: a KV group with its query heads (attention), ``mlp_unit`` columns (MLP),
``vocab_unit`` rows (vocabulary). A rank may hold no unit of a module, so any world size works.
"""

from dataclasses import dataclass
from typing import Final

from sharding.heads import deal_groups
from sharding.units import Span, deal, spans_of

__all__ = [
    "SITES",
    "TOP",
    "VOCAB_SITES",
    "LayerCut",
    "ModelDims",
    "RankCut",
    "WeightSlice",
    "cut_model",
    "is_row_parallel",
    "weight_slice",
]

SITES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear modules of a layer; kernels and plans know a site by its position here."""
TOP: Final = -1
"""As a layer: that of the modules which belong to none, `VOCAB_SITES`."""
VOCAB_SITES: Final = ("embed_tokens", "lm_head")
"""Modules at the model's two ends, which have a row a token; as sites of `TOP`, by their position
here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Sizes of an unsharded model."""

    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the MLP."""
    heads: int
    """Query heads; a multiple of ``kv_heads``."""
    kv_heads: int
    """Key/value heads: the number of KV groups."""
    head_dim: int
    """Width of one head."""
    vocab: int
    """Rows of the embedding and of the LM head."""
    mlp_unit: int = 64
    """MLP columns that stay together: the quantisation block. The last unit may be partial."""
    vocab_unit: int = 64
    """Vocabulary rows that stay together. The last unit may be partial."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

    @property
    def group_heads(self) -> int:
        """Query heads of one KV group."""
        return self.heads // self.kv_heads

    @property
    def mlp_units(self) -> int:
        """Number of MLP units."""
        return -(-self.intermediate // self.mlp_unit)

    @property
    def vocab_units(self) -> int:
        """Number of vocabulary units."""
        return -(-self.vocab // self.vocab_unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCut:
    """What one rank holds of one layer, in unsharded indices."""

    q_heads: Span
    """Query heads."""
    kv_heads: Span
    """KV heads of those query heads; empty exactly when ``q_heads`` is."""
    mlp: Span
    """MLP columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCut:
    """What one rank holds of the model."""

    rank: int
    """The rank."""
    world: int
    """Number of ranks."""
    layers: tuple[LayerCut, ...]
    """One cut a layer; sizes may differ from layer to layer."""
    vocab: Span
    """Rows of the embedding and of the LM head."""
    vocab_padded: int
    """Largest ``vocab.size`` of all ranks: the common size for gathers of logits."""

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Local KV heads by layer."""
        return tuple(layer.kv_heads.size for layer in self.layers)

    @property
    def q_heads(self) -> tuple[int, ...]:
        """Local query heads by layer."""
        return tuple(layer.q_heads.size for layer in self.layers)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Local MLP columns by layer."""
        return tuple(layer.mlp.size for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlice:
    """The part of a weight [out, in] that a rank holds."""

    rows: Span
    """Rows: out-features."""
    cols: Span
    """Columns: in-features."""


def cut_model(dims: ModelDims, world: int) -> tuple[RankCut, ...]:
    """Cut a model for ``world`` ranks; deterministic, the same on every rank.

    Extra units go round the ranks from layer to layer, so that over all layers the ranks' totals
    of each kind of unit differ by at most one. Beyond one rank a KV group, query heads are dealt
    and KV heads replicated (see `sharding.heads`); beyond one rank a head, ranks stay empty.

    Raises:
        ValueError: if ``world`` is not positive.
    """
    if world < 1:
        raise ValueError(f"world={world} must be at least 1")
    attention = _cut_attention(dims, world)
    # Each kind of unit goes on where the one before it stopped, so extras do not pile on rank 0.
    turn = dims.layers * dims.kv_heads
    mlp = []
    for _ in range(dims.layers):
        spans = deal(dims.mlp_units, world, turn)
        mlp.append([span.times(dims.mlp_unit, dims.intermediate) for span in spans])
        turn += dims.mlp_units
    vocab = [
        span.times(dims.vocab_unit, dims.vocab) for span in deal(dims.vocab_units, world, turn)
    ]
    return tuple(
        RankCut(
            rank=rank,
            world=world,
            layers=tuple(
                LayerCut(q_heads=heads[rank][0], kv_heads=heads[rank][1], mlp=columns[rank])
                for heads, columns in zip(attention, mlp, strict=True)
            ),
            vocab=vocab[rank],
            vocab_padded=max(span.size for span in vocab),
        )
        for rank in range(world)
    )


def _cut_attention(dims: ModelDims, world: int) -> list[list[tuple[Span, Span]]]:
    """Query and KV heads by layer and rank."""
    if dims.kv_heads < world < dims.heads:
        return _cut_groups(dims, world)
    # One head at most a rank from here on, or whole groups: either way the unit can't span groups.
    size = dims.group_heads if world <= dims.kv_heads else 1
    units = dims.heads // size
    by_layer = []
    for layer in range(dims.layers):
        heads = [span.times(size) for span in deal(units, world, layer * units)]
        by_layer.append([(span, _kv_of(span, dims.group_heads)) for span in heads])
    return by_layer


def _kv_of(heads: Span, group_heads: int) -> Span:
    """KV heads that a span of query heads needs."""
    first = heads.start // group_heads
    return Span(first, -(-heads.stop // group_heads) if heads.size else first)


def _cut_groups(dims: ModelDims, world: int) -> list[list[tuple[Span, Span]]]:
    """As `_cut_attention`, for more ranks than KV groups but fewer than heads."""
    loads = [0] * world
    by_layer = []
    for _ in range(dims.layers):
        dealt = deal_groups(dims.kv_heads, dims.group_heads, loads)
        loads = [a + b for a, b in zip(loads, dealt, strict=True)]
        by_layer.append([(span, _kv_of(span, dims.group_heads)) for span in spans_of(dealt)])
    return by_layer


def weight_slice(dims: ModelDims, cut: LayerCut, site: int | str) -> WeightSlice:
    """Part of a site's weight [out, in] that a rank holds.

    The one rule for base weights, biases (the rows) and LoRA (see `sharding.lora`):
    q, k, v, gate, up are column-parallel and cut their rows; o, down are row-parallel and cut
    their columns.

    Raises:
        ValueError: if ``site`` is not a name or position in `SITES`.
    """
    name = SITES[site] if isinstance(site, int) and 0 <= site < len(SITES) else site
    whole = Span(0, dims.hidden)
    match name:
        case "q_proj":
            return WeightSlice(rows=cut.q_heads.times(dims.head_dim), cols=whole)
        case "k_proj" | "v_proj":
            return WeightSlice(rows=cut.kv_heads.times(dims.head_dim), cols=whole)
        case "o_proj":
            return WeightSlice(rows=whole, cols=cut.q_heads.times(dims.head_dim))
        case "gate_proj" | "up_proj":
            return WeightSlice(rows=cut.mlp, cols=whole)
        case "down_proj":
            return WeightSlice(rows=whole, cols=cut.mlp)
    raise ValueError(f"site={site!r} must be one of {', '.join(SITES)} or its position")


def is_row_parallel(site: int) -> bool:
    """Whether ranks hold columns of a layer's module, so that their outputs are to be summed."""
    return SITES[site] in ("o_proj", "down_proj")
