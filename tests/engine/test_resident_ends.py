"""What is packed of the two ends comes out of the arena again, on every rank, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kernels import ops_for
from kernels.nf4 import DenseWeight
from sharding import TOP, ModelDims, RankCut, cut_model
from tp_engine.adapters import (
    AdapterError,
    AdapterImage,
    AdapterRevision,
    LoraModule,
    pack_adapter,
    pages_needed,
    relocate,
)
from tp_engine.adapters.ends.record import EndSizes
from tp_engine.adapters.ends.replaced import EMBEDDING, HEAD, Replaced
from tp_engine.layers import (
    ArenaMatrix,
    EndRows,
    LMHead,
    VocabEmbedding,
    slabs_of,
    token_rows,
)
from tp_engine.ranks.comm import Comm
from tp_engine.tiers.resident_ends import ResidentEnds

CPU = torch.device("cpu")
OPS = ops_for(CPU)
NAN = 0xFF


@dataclass(frozen=True, kw_only=True)
class Content:
    """A base and an adapter of its ends."""

    dims: ModelDims
    weights: tuple[Tensor, Tensor]
    """[V, H] of the embedding and of the head."""
    revision: AdapterRevision

    def expected(self, end: int) -> Tensor:
        """[V, H] with the adapter."""
        matrix = self.weights[end]
        replaced = self.revision.replaced.get(end, Replaced())
        if replaced.whole is not None:
            matrix = replaced.whole
        if replaced.ids is not None and replaced.rows is not None:
            matrix = matrix.index_copy(0, replaced.ids, replaced.rows)
        pair = self.revision.modules.get((TOP, end))
        if pair is not None:
            delta = pair.scale * (pair.b @ pair.a)
            matrix = matrix + (delta.T if end == EMBEDDING else delta)
        return matrix


def content(vocab: int, hidden: int, kinds: tuple[str, ...], rank: int, rows: int) -> Content:
    """Random numbers; ``kinds`` by end are letters of lora, whole and rows (l, w, r), or t: the
    whole matrix of the other end."""
    generator = torch.Generator().manual_seed(vocab + rank)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dims = ModelDims(
        layers=1, hidden=hidden, intermediate=64, heads=2, kv_heads=1, head_dim=8, vocab=vocab
    )
    modules, replaced = {}, {}
    for end, kind in enumerate(kinds):
        out, width = (hidden, vocab) if end == EMBEDDING else (vocab, hidden)
        if "l" in kind:
            pair = LoraModule(a=numbers(rank, width), b=numbers(out, rank), scale=0.5 + end)
            modules[TOP, end] = pair
        whole = numbers(vocab, hidden) if "w" in kind else None
        if "t" in kind and EMBEDDING in replaced:
            whole = replaced[EMBEDDING].whole
        ids = (
            torch.randperm(vocab, generator=generator)[:rows].sort().values if "r" in kind else None
        )
        if whole is not None or ids is not None:
            delta = None if ids is None else numbers(len(ids), hidden)
            replaced[end] = Replaced(whole=whole, ids=ids, rows=delta)
    revision = AdapterRevision(digest="", source="", modules=modules, expected=0, replaced=replaced)
    weights = (numbers(vocab, hidden), numbers(vocab, hidden))
    return Content(dims=dims, weights=weights, revision=revision)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def arena_with(
    images: list[AdapterImage], page_bytes: int, layers: int, sizes: EndSizes
) -> tuple[Tensor, ResidentEnds]:
    """NaN but for the images' pages, which stand in disorder; descriptor number i is image i's."""
    total = sum(len(image.pages) for image in images)
    places = torch.randperm(total + 2, generator=torch.Generator().manual_seed(1)).tolist()
    arena = torch.full(((total + 2) * page_bytes,), NAN, dtype=torch.uint8)
    ends = ResidentEnds(arena, sizes)
    for number, image in enumerate(images):
        ids = [places.pop() for _ in range(len(image.pages))]
        arena.view(-1, page_bytes)[ids] = image.pages
        record = relocate(image.record, ids, layers, page_bytes)
        ends.publish(number, record, image.record, image.pages)
    return arena, ends


def sizes_of(dims: ModelDims, cut: RankCut, page_bytes: int) -> EndSizes:
    return EndSizes(
        layers=dims.layers,
        vocab=cut.vocab.size,
        hidden=dims.hidden,
        dtype=torch.float32,
        page_bytes=page_bytes,
    )


def rows_of_rank(what: Content, cut: RankCut, tokens: Tensor, x: Tensor, ends: EndRows | None):
    """This rank's part of the embeddings [T, H] and its logits [R, V local]."""
    embedding = VocabEmbedding(
        weight=what.weights[EMBEDDING][cut.vocab.slice],
        span=cut.vocab,
        ops=OPS,
        comm=Comm.alone(CPU),
    )
    head = LMHead(weight=DenseWeight(weight=what.weights[HEAD][cut.vocab.slice]), ops=OPS)
    return embedding(tokens, ends), head(x, ends)


KINDS = st.sampled_from(["", "l", "w", "r", "lw", "lr", "wr", "lwr", "t"])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([64, 100, 200, 333]),
    st.sampled_from([8, 24]),
    st.tuples(KINDS, KINDS),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from([1024, 2080, 8192]),
)
def test_every_rank_computes_with_its_rows_alone(
    vocab: int,
    hidden: int,
    kinds: tuple[str, str],
    rank: int,
    rows: int,
    world: int,
    page_bytes: int,
) -> None:
    what = content(vocab, hidden, kinds, rank, rows)
    cuts = cut_model(what.dims, world)
    images = pack_adapter(what.revision, cuts, what.dims, torch.float32, page_bytes)
    assert len({image.record.numel() for image in images}) == 1
    needed = pages_needed(what.revision, cuts, what.dims, torch.float32, page_bytes)
    assert {image.pages.shape for image in images} == {(needed, page_bytes)}
    tokens = torch.arange(vocab).repeat_interleave(2)  # rows of the base, then of the adapter
    tokens = torch.cat([tokens[::2], tokens[1::2]])
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(2))
    embedded = torch.zeros(2 * vocab, hidden)
    logits = []
    for cut, image in zip(cuts, images, strict=True):
        _, resident = arena_with([image], page_bytes, 1, sizes_of(what.dims, cut, page_bytes))
        ends = resident.of_step(
            np.array([-1, 0]), np.array([0, vocab, 2 * vocab]), np.arange(vocab - 2, vocab + 3)
        )
        assert (ends is None) == (kinds[0] in ("", "t") and kinds[1] in ("", "t"))
        part, own = rows_of_rank(what, cut, tokens, x, ends)
        plain, _ = rows_of_rank(what, cut, tokens[:vocab], x, None)
        assert torch.equal(part[:vocab], plain)
        embedded += part
        logits.append(own)
    expected = what.expected(EMBEDDING)
    torch.testing.assert_close(embedded[vocab:], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(embedded[:vocab], what.weights[EMBEDDING])
    whole = torch.cat(logits, dim=1)
    torch.testing.assert_close(whole[:2], x[:2] @ what.weights[HEAD].T, rtol=1e-5, atol=1e-5)
    changed = x[2:] @ what.expected(HEAD).T
    torch.testing.assert_close(whole[2:], changed, rtol=1e-4, atol=1e-4)


def test_a_shared_matrix_takes_its_place_once() -> None:
    tied, apart = (content(256, 32, kinds, 1, 1) for kinds in (("w", "t"), ("w", "w")))
    cuts = cut_model(tied.dims, 1)
    one, two = (
        pages_needed(each.revision, cuts, each.dims, torch.float32, 8192) for each in (tied, apart)
    )
    assert two == 2 * one


def test_matrices_read_in_slabs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    what = content(200, 24, ("lwr", "lwr"), 3, 7)
    cuts = cut_model(what.dims, 1)
    (image,) = pack_adapter(what.revision, cuts, what.dims, torch.float32, 4096)
    results = []
    for slab_bytes in (token_rows.SLAB_BYTES, 1):
        monkeypatch.setattr(token_rows, "SLAB_BYTES", slab_bytes)
        _, resident = arena_with([image], 4096, 1, sizes_of(what.dims, cuts[0], 4096))
        tokens, x = torch.arange(200), torch.randn(200, 24, generator=seeded(3))
        ends = resident.of_step(np.array([0]), np.array([0, 200]), np.arange(200))
        results.append(rows_of_rank(what, cuts[0], tokens, x, ends))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@given(st.data())
def test_slabs_are_the_same_rows_wherever_chunks_stand(data: st.DataObject) -> None:
    rows, columns, chunk_rows, step = (data.draw(st.integers(1, most)) for most in (60, 5, 7, 4))
    width, count = chunk_rows * columns, -(-rows // chunk_rows)
    places = data.draw(st.permutations(range(count + 3)) | st.just(list(range(count))))[:count]
    matrix = torch.randn(rows, columns, generator=seeded(rows))
    arena = torch.full(((count + 3) * width,), float("nan"))
    for place, chunk in zip(places, matrix.split(chunk_rows), strict=True):
        arena[place * width : place * width + chunk.numel()] = chunk.flatten()
    starts = [place * width for place in places]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "SLAB_BYTES", step * width * arena.itemsize)
        slabs = slabs_of(arena, starts, rows, columns, chunk_rows)
    held = ArenaMatrix(
        values=arena,
        starts=torch.tensor(starts),
        slabs=slabs,
        columns=columns,
        chunk_rows=chunk_rows,
    )
    parts = list(held.parts())
    size = step * chunk_rows
    assert [span for span, _ in parts] == [
        slice(first, min(first + size, rows)) for first in range(0, rows, size)
    ]
    for i, (span, part) in enumerate(parts):
        assert torch.equal(part, matrix[span])
        own = places[i * step : (i + 1) * step]
        in_one_piece = own == list(range(own[0], own[0] + len(own)))
        assert (part.untyped_storage().data_ptr() == arena.data_ptr()) == in_one_piece
    assert torch.equal(held.read(), matrix)
    assert torch.equal(held.pick(torch.arange(rows)), matrix)


def test_what_stood_under_a_number_before_is_forgotten() -> None:
    what = content(64, 8, ("l", "w"), 2, 1)
    plain = content(64, 8, ("", ""), 2, 1)
    cuts = cut_model(what.dims, 1)
    (image,) = pack_adapter(what.revision, cuts, what.dims, torch.float32, 4096)
    (other,) = pack_adapter(plain.revision, cuts, what.dims, torch.float32, 4096)
    _, resident = arena_with([image], 4096, 1, sizes_of(what.dims, cuts[0], 4096))
    step = (np.array([0]), np.array([0, 1]), np.array([0]))
    assert resident.of_step(*step) is not None
    resident.publish(5, image.record, image.record, image.pages)
    resident.publish(0, other.record, other.record, other.pages)
    assert resident.of_step(*step) is None
    assert resident.changes(5) == {}, "its words were written over"


def test_a_value_too_large_for_the_dtype_is_refused() -> None:
    what = content(64, 8, ("w", ""), 1, 1)
    whole = what.revision.replaced[EMBEDDING].whole
    assert whole is not None
    whole[3, 3] = 1e6
    with pytest.raises(AdapterError, match=r"model\.embed_tokens .* 1e\+06"):
        pack_adapter(what.revision, cut_model(what.dims, 1), what.dims, torch.float16, 4096)
