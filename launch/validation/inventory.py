"""Everything that a rank holds of the base, as entries to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from kernels import DenseWeight, NF4Weight, Weight
from kernels.nf4 import PackedNF4
from launch.validation.entry import TOP, Entry, Kind
from launch.validation.live import Copy, LiveError, Plain
from launch.validation.live_nf4 import Codes, Phases, Scales, Shard
from launch.validation.whole import WholeSource
from sharding import SITES, LayerCut, ModelDims, RankCut, Span, WeightSlice, weight_slice
from tp_engine.adapters.targets import module_name
from tp_engine.weights import LayerWeights, RankWeights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ONE = Span(0, 1)


def base_entries(
    weights: RankWeights, cut: RankCut, dims: ModelDims, source: WholeSource, *, tied: bool
) -> list[Entry]:
    """All tensors of the base on one rank.

    Raises:
        LiveError: a tensor is missing, of another kind or of another shape than the cut says.
    """
    entries = list(_Base(cut, dims, source).entries(weights, tied=tied))
    listed = {entry.name for entry in entries} | ({HEAD} if tied else set())
    missing = sorted(source.names() - listed)
    if missing:
        raise LiveError(f"the rank holds nothing of {', '.join(missing)}")
    return entries


class _Base:
    """Which live tensor is which part of which tensor of the checkpoint."""

    def __init__(self, cut: RankCut, dims: ModelDims, source: WholeSource) -> None:
        self._cut = cut
        self._dims = dims
        self._source = source

    def entries(self, weights: RankWeights, *, tied: bool) -> Iterator[Entry]:
        part = WeightSlice(rows=self._cut.vocab, cols=Span(0, self._dims.hidden))
        yield self._plain(EMBEDDING, Kind.EMBEDDING, TOP, weights.embedding, part)
        yield from self._head(weights, part, tied=tied)
        yield self._norm("model.norm.weight", TOP, weights.norm)
        for layer, held in enumerate(weights.layers):
            yield from self._layer(layer, held)

    def _head(self, weights: RankWeights, part: WeightSlice, *, tied: bool) -> Iterator[Entry]:
        head = weights.lm_head
        if not tied:
            yield from self._weight(HEAD, TOP, head, 0, part, Kind.HEAD)
        elif not isinstance(head, DenseWeight):
            raise LiveError(f"{HEAD}: NF4, but tied to the embedding")
        else:
            if head.weight.data_ptr() != weights.embedding.data_ptr():
                yield self._plain(EMBEDDING, Kind.HEAD, TOP, head.weight, part)
            if head.fast is not None:
                yield self._fast(EMBEDDING, TOP, head, 0, part)

    def _layer(self, layer: int, held: LayerWeights) -> Iterator[Entry]:
        stem = f"model.layers.{layer}"
        yield self._norm(f"{stem}.input_layernorm.weight", layer, held.input_norm)
        yield self._norm(f"{stem}.post_attention_layernorm.weight", layer, held.post_norm)
        for name, norm in (("q_norm", held.q_norm), ("k_norm", held.k_norm)):
            if norm is not None:
                yield self._norm(f"{stem}.self_attn.{name}.weight", layer, norm)
        groups: list[tuple[tuple[str, ...], tuple[Weight, ...], Tensor | None]] = [
            (SITES[:3], held.qkv, held.qkv_bias),
            (SITES[3:4], (held.o,), held.o_bias),
            (SITES[4:6], held.gate_up, held.gate_up_bias),
            (SITES[6:], (held.down,), held.down_bias),
        ]
        for sites, weights, bias in groups:
            yield from self._linears(layer, sites, weights)
            if bias is not None:
                yield from self._biases(layer, sites, bias)

    def _slice(self, layer: int, site: str) -> WeightSlice:
        cut: LayerCut = self._cut.layers[layer]
        return weight_slice(self._dims, cut, site)

    def _linears(
        self, layer: int, sites: Sequence[str], weights: tuple[Weight, ...]
    ) -> Iterator[Entry]:
        """Modules whose weights are fused, rows on top of one another, or kept one by one."""
        parts = [self._slice(layer, site) for site in sites]
        sizes = [part.rows.size for part in parts]
        fused = len(weights) == 1
        held = [sum(sizes)] if fused else sizes
        if [weight.out_features for weight in weights] != held:
            found = [weight.shape for weight in weights]
            raise LiveError(f"layer {layer} {'+'.join(sites)}: {found}, need {held} rows")
        for i, (site, part) in enumerate(zip(sites, parts, strict=True)):
            name = f"{module_name(layer, SITES.index(site))}.weight"
            first = sum(sizes[:i]) if fused else 0
            yield from self._weight(name, layer, weights[0 if fused else i], first, part)

    def _weight(
        self,
        name: str,
        layer: int,
        weight: Weight,
        first: int,
        part: WeightSlice,
        kind: Kind = Kind.DENSE,
    ) -> Iterator[Entry]:
        quantized = self._source.is_packed(name, linear=layer != TOP)
        if quantized == isinstance(weight, DenseWeight):
            found, need = ("plain", "NF4") if quantized else ("NF4", "plain")
            raise LiveError(f"{name}: the rank holds a {found} weight, must be {need}")
        if weight.in_features != part.cols.size:
            raise LiveError(f"{name}: {weight.in_features} columns, need {part.cols.size}")
        if not isinstance(weight, DenseWeight):
            yield from self._quantized(name, layer, weight, first, part)
        else:
            rows = weight.weight[first : first + part.rows.size]
            yield self._plain(name, kind, layer, rows, part)
            if weight.fast is not None:
                yield self._fast(name, layer, weight, first, part)

    def _fast(
        self, name: str, layer: int, weight: DenseWeight, first: int, part: WeightSlice
    ) -> Entry:
        assert weight.fast is not None
        rows = weight.weight[first : first + part.rows.size]
        plain = self._plain(name, Kind.COPY, layer, rows, part)
        return replace(plain, live=Copy(tensor=weight.fast, first=first))

    def _quantized(
        self,
        name: str,
        layer: int,
        weight: NF4Weight | PackedNF4,
        first: int,
        part: WeightSlice,
    ) -> Iterator[Entry]:
        whole = self._source.packed(name)
        if isinstance(weight, NF4Weight) and weight.blocksize != whole.blocksize:
            raise LiveError(f"{name}: blocks of {weight.blocksize}, need {whole.blocksize}")
        shape, source, dtype = whole.shape, self._source, self._source.dtype
        live = Shard(
            weight=weight, first=first, part=part, width=shape[1], blocksize=whole.blocksize
        )
        entry = partial(Entry, name=name, layer=layer, shape=shape, part=part)
        yield entry(
            kind=Kind.CODES, live=Codes(shard=live), whole=lambda r: source.packed(name).codes(r)
        )
        yield entry(
            kind=Kind.ABSMAX,
            live=Scales(shard=live),
            whole=lambda r: source.packed(name).scales(r),
            block=whole.blocksize,
        )
        if isinstance(weight, NF4Weight) and weight.dense is not None:
            yield entry(
                kind=Kind.COPY,
                live=Copy(tensor=weight.dense, first=first),
                whole=lambda r: source.packed(name).values(r, dtype),
            )
        yield self._phase(name, layer, live, part)

    def _phase(self, name: str, layer: int, live: Shard, part: WeightSlice) -> Entry:
        """A rank without columns has no use for phases."""
        rows = part.rows if part.cols.size else Span(part.rows.start, part.rows.start)

        def whole(span: Span) -> Tensor:
            local = Span(span.start - part.rows.start, span.stop - part.rows.start)
            return live.phases(local)[:, None]

        return Entry(
            name=name,
            kind=Kind.PHASE,
            layer=layer,
            shape=(self._source.packed(name).shape[0], 1),
            part=WeightSlice(rows=rows, cols=ONE),
            live=Phases(shard=live),
            whole=whole,
            vector=True,
        )

    def _biases(self, layer: int, sites: Sequence[str], bias: Tensor) -> Iterator[Entry]:
        at = 0
        for site in sites:
            rows = self._slice(layer, site).rows
            name = f"{module_name(layer, SITES.index(site))}.bias"
            yield self._vector(name, Kind.BIAS, layer, bias[at : at + rows.size], rows)
            at += rows.size
        if at != bias.numel():
            raise LiveError(f"layer {layer} {'+'.join(sites)}: {bias.numel()} biases, need {at}")

    def _norm(self, name: str, layer: int, norm: Tensor) -> Entry:
        whole = self._source.shape(name)[0]
        return self._vector(name, Kind.NORM, layer, norm, Span(0, whole))

    def _vector(self, name: str, kind: Kind, layer: int, tensor: Tensor, rows: Span) -> Entry:
        part = WeightSlice(rows=rows, cols=ONE)
        return self._plain(name, kind, layer, tensor[:, None], part, vector=True)

    def _plain(
        self,
        name: str,
        kind: Kind,
        layer: int,
        tensor: Tensor,
        part: WeightSlice,
        *,
        vector: bool = False,
    ) -> Entry:
        self._check(name, tensor, part)
        return Entry(
            name=name,
            kind=kind,
            layer=layer,
            shape=self._source.shape(name),
            part=part,
            live=Plain(tensor=tensor),
            whole=lambda rows: self._source.plain(name, rows),
            vector=vector,
        )

    def _check(self, name: str, tensor: Tensor, part: WeightSlice) -> None:
        need = (part.rows.size, part.cols.size)
        if tuple(tensor.shape) != need or tensor.dtype != self._source.dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise LiveError(f"{name}: {found}, need {self._source.dtype} {list(need)}")
