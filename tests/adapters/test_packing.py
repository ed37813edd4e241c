"""Page images: reassembled shards equal the adapter, and kernels compute its delta from them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import LoraBatch, LoraSegments, LoraTarget
from kernels.lora.reference import lora_expand_, lora_shrink
from sharding import SITES, ModelDims, RankCut, cut_model, weight_slice
from tests.adapters.writing import every_site, random_modules, revision_of
from tp_engine.adapters import (
    AdapterError,
    AdapterImage,
    AdapterRevision,
    LoraModule,
    head_words,
    longest_row_bytes,
    pack_adapter,
    pages_needed,
    relocate,
    rows_of,
)
from tp_engine.adapters.record import NO_ROW, site_rows
from tp_engine.adapters.targets import module_names

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAGE = 4096


@st.composite
def models(draw: st.DrawFn) -> ModelDims:
    kv_heads = draw(st.integers(1, 3))
    return ModelDims(
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.sampled_from([8, 24, 64])),
        intermediate=draw(st.sampled_from([16, 72, 200])),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8])),
        vocab=64,
    )


@st.composite
def adapters(draw: st.DrawFn) -> tuple[ModelDims, AdapterRevision]:
    dims = draw(models())
    places = st.tuples(st.integers(0, dims.layers - 1), st.integers(0, len(SITES) - 1))
    ranks = draw(st.dictionaries(places, st.integers(1, 33), min_size=1, max_size=9))
    seed = draw(st.integers(0, 99))
    return dims, revision_of(random_modules(dims, ranks, seed=seed, extras=draw(st.booleans())))


def read_back(
    image: AdapterImage, dims: ModelDims, cut: RankCut, place: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    part = weight_slice(dims, cut.layers[place[0]], place[1])
    return rows_of(
        image.pages,
        image.record,
        layer=place[0],
        site=place[1],
        in_features=part.cols.size,
        out_features=part.rows.size,
        dtype=dtype,
    )


@settings(max_examples=60, deadline=None)
@given(adapters(), st.integers(1, 7), st.sampled_from(DTYPES), st.sampled_from([1024, 1040, 4096]))
def test_reassembled_shards_equal_the_adapter(
    adapter: tuple[ModelDims, AdapterRevision], world: int, dtype: torch.dtype, page_bytes: int
) -> None:
    dims, revision = adapter
    cuts = cut_model(dims, world)
    images = pack_adapter(revision, cuts, dims, dtype, page_bytes)
    assert len({image.pages.shape for image in images}) == 1
    assert len({image.record.shape for image in images}) == 1
    assert images[0].pages.shape == (
        pages_needed(revision, cuts, dims, dtype, page_bytes),
        page_bytes,
    )
    for place in module_names(dims.layers).values():
        module = revision.modules.get(place)
        shards = [
            read_back(image, dims, cut, place, dtype)
            for image, cut in zip(images, cuts, strict=True)
        ]
        if module is None:
            assert shards == [None] * world
            continue
        whole_a = torch.full_like(module.a, torch.nan, dtype=dtype)
        whole_b = torch.full_like(module.b, torch.nan, dtype=dtype)
        for cut, shard in zip(cuts, shards, strict=True):
            assert shard is not None and shard[2] == module.scale
            part = weight_slice(dims, cut.layers[place[0]], place[1])
            whole_a[:, part.cols.slice] = shard[0]
            whole_b[part.rows.slice] = shard[1]
        assert torch.equal(whole_a, module.a.to(dtype))
        assert torch.equal(whole_b, module.b.to(dtype))


@settings(max_examples=40, deadline=None)
@given(adapters(), st.integers(1, 5))
def test_gains_are_cut_like_outputs_and_biases_are_added_once(
    adapter: tuple[ModelDims, AdapterRevision], world: int
) -> None:
    dims, revision = adapter
    cuts = cut_model(dims, world)
    images = pack_adapter(revision, cuts, dims, torch.bfloat16, PAGE)
    for place, module in revision.modules.items():
        part, *_ = parts = [weight_slice(dims, cut.layers[place[0]], place[1]) for cut in cuts]
        summed = any(each.cols != part.cols for each in parts)
        bias = torch.zeros(len(module.b))
        for image, cut, part in zip(images, cuts, parts, strict=True):
            rows = site_rows(image.record, place[0], place[1])
            assert rows is not None and (rows.gain_offset == NO_ROW) == (module.magnitude is None)
            if module.magnitude is not None:
                held = row_at(image, rows.gain_offset, part.rows.size)
                assert torch.equal(held, module.magnitude[part.rows.slice])
            if rows.bias_offset != NO_ROW:
                held = row_at(image, rows.bias_offset, part.rows.size)
                assert not summed or (cut.rank == 0 and not bias.any())
                bias[part.rows.slice] = held
        expected = torch.zeros_like(bias) if module.bias is None else module.bias * module.scale
        torch.testing.assert_close(bias, expected)


def row_at(image: AdapterImage, offset: int, width: int) -> torch.Tensor:
    """A float32 row of an image."""
    return image.pages.view(-1)[offset : offset + 4 * width].view(torch.float32)


@settings(max_examples=40, deadline=None)
@given(adapters(), st.integers(1, 5), st.sampled_from(DTYPES))
def test_offsets_are_aligned_inside_one_page_and_disjoint(
    adapter: tuple[ModelDims, AdapterRevision], world: int, dtype: torch.dtype
) -> None:
    dims, revision = adapter
    cuts = cut_model(dims, world)
    for image, cut in zip(pack_adapter(revision, cuts, dims, dtype, PAGE), cuts, strict=True):
        used = torch.zeros(image.pages.numel(), dtype=torch.bool)
        at = head_words(dims.layers)
        for place, module in revision.modules.items():
            part = weight_slice(dims, cut.layers[place[0]], place[1])
            sizes = [part.cols.size * dtype.itemsize] * module.rank
            sizes += [part.rows.size * dtype.itemsize] * module.rank + [part.rows.size * 4] * 2
            for size in sizes:
                offset = int(image.record[at])
                at += 1
                if offset == NO_ROW:
                    continue
                assert offset % 128 == 0 and (size or offset == 0)
                assert offset // PAGE == (offset + max(size, 1) - 1) // PAGE
                assert not used[offset : offset + size].any()
                used[offset : offset + size] = True
        assert at == image.record.numel()
        assert not image.pages.view(-1)[~used].any()  # what holds no row is zero


def arena_of(
    images: Sequence[AdapterImage], page_ids: Sequence[Sequence[int]], pages: int, layers: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """An arena of NaN with the images at the given pages; descriptors; descriptor numbers."""
    arena = torch.full((pages, PAGE), 0xFF, dtype=torch.uint8)
    records, numbers, words = [], [], 0
    for image, ids in zip(images, page_ids, strict=True):
        arena[torch.tensor(ids)] = image.pages
        records.append(relocate(image.record, ids, layers, PAGE))
        numbers.append(words)
        words += image.record.numel()
    return arena.view(-1), torch.cat(records), numbers


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_compute_each_ranks_delta_from_packed_pages(
    world: int, dtype: torch.dtype, dims: ModelDims
) -> None:
    cuts = cut_model(dims, world)
    first = revision_of(random_modules(dims, every_site(dims, 5), dtype=dtype, seed=1))
    second = revision_of(random_modules(dims, {(1, 2): 16, (0, 6): 3}, dtype=dtype, seed=2))
    packed = [pack_adapter(revision, cuts, dims, dtype, PAGE) for revision in (first, second)]
    for rank, cut in enumerate(cuts):
        images = [images[rank] for images in packed]
        n, m = (image.pages.shape[0] for image in images)
        ids = [list(range(2 * n, 0, -2)), list(range(2 * n + 1, 2 * n + 1 + m))]
        arena, descriptors, numbers = arena_of(images, ids, 2 * n + m + 2, dims.layers)
        segments = LoraSegments(
            offsets=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
            descriptors=torch.tensor([numbers[0], -1, numbers[1]], dtype=torch.int64),
            max_rank=16,
        )
        batch = LoraBatch(arena=arena, descriptors=descriptors, segments=segments)
        for layer in range(dims.layers):
            for site in range(len(SITES)):
                part = weight_slice(dims, cut.layers[layer], site)
                x = torch.randn(6, part.cols.size, generator=torch.Generator().manual_seed(3)).to(
                    dtype
                )
                y = torch.zeros(6, part.rows.size)
                target = LoraTarget(
                    layer=layer,
                    sites=(site,),
                    num_sites=len(SITES),
                    spans=((0, part.rows.size),),
                )
                out = y.to(dtype)
                lora_expand_(out, lora_shrink(x, batch, target), batch, target)
                for rows, revision in ((slice(0, 3), first), (slice(4, 6), second)):
                    module = revision.modules.get((layer, site))
                    if module is not None:
                        a, b = module.a[:, part.cols.slice], module.b[part.rows.slice]
                        y[rows] = module.scale * (x[rows].float() @ a.float().T @ b.float().T)
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(out.float(), y, rtol=tolerance, atol=tolerance)


def test_rows_of_one_side_have_one_stride_where_they_fit(dims: ModelDims) -> None:
    revision = revision_of(random_modules(dims, every_site(dims, 4)))
    (image,) = pack_adapter(revision, cut_model(dims, 1), dims, torch.float32, 1 << 16)
    offsets = image.record[head_words(dims.layers) :].view(-1, 2 * 4 + 2)[:, :8]
    steps = offsets.reshape(-1, 4).diff(dim=1)
    assert image.pages.shape[0] == 1 and bool((steps == steps[:, :1]).all())


def test_relocation_keeps_place_within_pages_and_the_head(dims: ModelDims) -> None:
    revision = revision_of(random_modules(dims, every_site(dims, 8), extras=True))
    (image,) = pack_adapter(revision, cut_model(dims, 1), dims, torch.float32, PAGE)
    count, head = image.pages.shape[0], head_words(dims.layers)
    ids = [2_000_000 + 3 * i for i in reversed(range(count))]  # beyond 4 GiB
    placed = relocate(image.record, ids, dims.layers, PAGE)
    assert torch.equal(placed[:head], image.record[:head])
    before, after = image.record[head:].tolist(), placed[head:].tolist()
    assert NO_ROW in before and max(before) // PAGE == count - 1
    assert after == [
        NO_ROW if at == NO_ROW else ids[at // PAGE] * PAGE + at % PAGE for at in before
    ]


def test_fp32_is_cast_and_too_large_values_are_refused(dims: ModelDims) -> None:
    modules = random_modules(dims, {(0, 0): 2})
    modules[0, 0].b[3, 1] = 1e5
    revision = revision_of(modules)
    cuts = cut_model(dims, 2)
    pack_adapter(revision, cuts, dims, torch.bfloat16, PAGE)
    with pytest.raises(
        AdapterError, match=r"lora_B of model\.layers\.0\.self_attn\.q_proj.*100000"
    ):
        pack_adapter(revision, cuts, dims, torch.float16, PAGE)


def test_a_page_of_the_longest_row_holds_every_row(dims: ModelDims) -> None:
    revision = revision_of(random_modules(dims, every_site(dims, 3)))
    for world in (1, 2, 3):
        cuts = cut_model(dims, world)
        longest = longest_row_bytes(dims, cuts, torch.float32)
        assert pages_needed(revision, cuts, dims, torch.float32, longest) >= 1
        with pytest.raises(ValueError, match=f"page_bytes={longest - 16}"):
            pack_adapter(revision, cuts, dims, torch.float32, longest - 16)


def test_strided_and_transposed_tensors_are_packed_by_value(dims: ModelDims) -> None:
    (place, plain), *_ = random_modules(dims, {(0, 4): 6}).items()
    odd = LoraModule(a=plain.a.T.contiguous().T, b=plain.b.T.contiguous().T, scale=plain.scale)
    cuts = cut_model(dims, 3)
    for one, other in zip(
        pack_adapter(revision_of({place: plain}), cuts, dims, torch.float32, PAGE),
        pack_adapter(revision_of({place: odd}), cuts, dims, torch.float32, PAGE),
        strict=True,
    ):
        assert torch.equal(one.pages, other.pages) and torch.equal(one.record, other.record)
    assert revision_of({place: plain}).digest == revision_of({place: odd}).digest
