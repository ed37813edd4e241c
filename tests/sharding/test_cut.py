"""Which part of a model each rank holds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import SITES, LayerCut, ModelDims, Span, cut_model, cut_table, weight_slice

SMOLLM2 = ModelDims(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152
)
QWEN_HALF_B = ModelDims(
    layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936
)
LLAMA_8B = ModelDims(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
)
QWEN_7B = ModelDims(
    layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064
)

worlds = st.integers(1, 12)


@st.composite
def models(draw: st.DrawFn) -> ModelDims:
    groups = draw(st.integers(1, 9))
    return ModelDims(
        layers=draw(st.integers(1, 12)),
        hidden=draw(st.integers(1, 64)),
        intermediate=draw(st.integers(1, 1500)),
        heads=groups * draw(st.integers(1, 8)),
        kv_heads=groups,
        head_dim=draw(st.sampled_from([8, 16, 64])),
        vocab=draw(st.integers(1, 3000)),
    )


def assert_partition(spans: list[Span], total: int) -> None:
    assert [index for span in spans for index in span] == list(range(total))


@given(models(), worlds)
def test_heads_columns_and_vocabulary_are_each_held_once_in_rank_order(
    dims: ModelDims, world: int
) -> None:
    cuts = cut_model(dims, world)
    assert [cut.rank for cut in cuts] == list(range(world))
    for layer in range(dims.layers):
        assert_partition([cut.layers[layer].q_heads for cut in cuts], dims.heads)
        assert_partition([cut.layers[layer].mlp for cut in cuts], dims.intermediate)
    assert_partition([cut.vocab for cut in cuts], dims.vocab)


@given(models(), worlds)
def test_a_rank_holds_exactly_the_kv_heads_of_its_query_heads(dims: ModelDims, world: int) -> None:
    for cut in cut_model(dims, world):
        for layer in cut.layers:
            needed = {head // dims.group_heads for head in layer.q_heads}
            assert set(layer.kv_heads) == needed


@given(models(), worlds)
def test_a_rank_holds_whole_groups_or_part_of_one(dims: ModelDims, world: int) -> None:
    for cut in cut_model(dims, world):
        for layer in cut.layers:
            if world <= dims.kv_heads:
                assert layer.q_heads.size == layer.kv_heads.size * dims.group_heads
            else:
                assert layer.kv_heads.size <= 1


@given(models(), worlds)
def test_every_layer_is_as_even_as_its_groups_allow(dims: ModelDims, world: int) -> None:
    cuts = cut_model(dims, world)
    fewest = max(1, world // dims.kv_heads)  # ranks of the group that gets fewest
    groups = -(-dims.kv_heads // world)
    most = groups * -(-dims.group_heads // fewest)
    for layer in range(dims.layers):
        assert max(cut.layers[layer].q_heads.size for cut in cuts) <= most
        widths = [cut.layers[layer].mlp.size for cut in cuts]
        assert max(widths) - min(widths) <= 2 * dims.mlp_unit - 1  # one unit, and a partial one


@given(models(), st.integers(1, 40))
def test_query_heads_over_all_layers_stay_within_one_group_of_even(
    dims: ModelDims, world: int
) -> None:
    totals = [sum(cut.q_heads) for cut in cut_model(dims, world)]
    even = dims.layers * dims.heads / world
    assert all(abs(total - even) <= dims.group_heads for total in totals)


@given(models(), worlds)
def test_a_cut_does_not_depend_on_anything_but_its_arguments(dims: ModelDims, world: int) -> None:
    assert cut_model(dims, world) == cut_model(dims, world)


def layer_bytes(dims: ModelDims, cut: LayerCut) -> int:
    """Elements of a layer's weights that a rank holds."""
    slices = [weight_slice(dims, cut, site) for site in SITES]
    return sum(s.rows.size * s.cols.size for s in slices)


@pytest.mark.parametrize("dims", [SMOLLM2, QWEN_HALF_B, LLAMA_8B, QWEN_7B])
def test_weights_of_a_rank_stay_within_one_unit_of_each_kind_of_even(dims: ModelDims) -> None:
    (whole,) = cut_model(dims, 1)
    base = sum(layer_bytes(dims, cut) for cut in whole.layers) + dims.vocab * dims.hidden
    group = 2 * (dims.group_heads + 1) * dims.head_dim * dims.hidden
    unit = group + 3 * dims.mlp_unit * dims.hidden + dims.vocab_unit * dims.hidden
    for world in range(1, dims.kv_heads + 1):
        for cut in cut_model(dims, world):
            held = sum(layer_bytes(dims, layer) for layer in cut.layers)
            assert held + cut.vocab.size * dims.hidden <= base / world + unit


def test_an_odd_group_goes_round_from_layer_to_layer() -> None:
    first, second = cut_model(SMOLLM2, 2)
    assert first.q_heads[:4] == (6, 3, 6, 3)
    assert second.q_heads[:4] == (3, 6, 3, 6)
    assert sum(first.kv_heads) == sum(second.kv_heads) == 45


def test_ranks_beyond_the_groups_share_them() -> None:
    cuts = cut_model(QWEN_7B, 6)
    assert [cut.layers[0].q_heads.size for cut in cuts] == [4, 3, 4, 3, 7, 7]
    assert [cut.layers[0].kv_heads.start for cut in cuts] == [0, 0, 1, 1, 2, 3]
    for layer in range(QWEN_7B.layers):
        sizes = sorted(cut.layers[layer].q_heads.size for cut in cuts)
        assert sizes == [3, 3, 4, 4, 7, 7]


def test_a_rank_between_two_groups_is_not_starved() -> None:
    totals = [sum(cut.q_heads) for cut in cut_model(QWEN_HALF_B, 3)]
    # 7, 4, 3 heads in one layer; the same shares in reverse every other layer give 126, 84, 126.
    assert max(totals) - min(totals) <= 3


def test_ranks_beyond_the_heads_hold_none() -> None:
    cuts = cut_model(SMOLLM2, 12)
    for layer in range(SMOLLM2.layers):
        idle = [cut.layers[layer] for cut in cuts if not cut.layers[layer].q_heads.size]
        assert len(idle) == 3
        assert all(layer.kv_heads.size == 0 for layer in idle)


@given(models(), worlds)
def test_gathers_of_logits_have_room_for_the_largest_shard(dims: ModelDims, world: int) -> None:
    cuts = cut_model(dims, world)
    assert {cut.vocab_padded for cut in cuts} == {max(cut.vocab.size for cut in cuts)}


@given(models(), worlds)
def test_slices_of_a_site_cover_its_weight(dims: ModelDims, world: int) -> None:
    heads, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    full = {
        "q_proj": (heads, dims.hidden),
        "k_proj": (kv, dims.hidden),
        "v_proj": (kv, dims.hidden),
        "o_proj": (dims.hidden, heads),
        "gate_proj": (dims.intermediate, dims.hidden),
        "up_proj": (dims.intermediate, dims.hidden),
        "down_proj": (dims.hidden, dims.intermediate),
    }
    cuts = cut_model(dims, world)
    for site, (rows, cols) in full.items():
        slices = [weight_slice(dims, cut.layers[0], site) for cut in cuts]
        assert {row for s in slices for row in s.rows} == set(range(rows))
        assert {col for s in slices for col in s.cols} == set(range(cols))
        assert all(s.rows.size == rows or s.cols.size == cols for s in slices)


def test_a_site_is_known_by_name_and_by_position() -> None:
    cut = cut_model(SMOLLM2, 2)[0].layers[0]
    for position, name in enumerate(SITES):
        assert weight_slice(SMOLLM2, cut, position) == weight_slice(SMOLLM2, cut, name)


@pytest.mark.parametrize("site", ["kv_proj", "proj", "", 7, -1])
def test_an_unknown_site_is_refused(site: int | str) -> None:
    cut = cut_model(SMOLLM2, 1)[0].layers[0]
    with pytest.raises(ValueError, match="site="):
        weight_slice(SMOLLM2, cut, site)


@pytest.mark.parametrize(
    ("field", "value"), [("heads", 10), ("layers", 0), ("vocab", -1), ("mlp_unit", 0)]
)
def test_impossible_models_are_refused(field: str, value: int) -> None:
    fields = {name: getattr(SMOLLM2, name) for name in ModelDims.__slots__}
    with pytest.raises(ValueError, match=f"{field}={value}"):
        ModelDims(**{**fields, field: value})


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="world=0"):
        cut_model(SMOLLM2, 0)


def test_the_table_has_a_line_a_rank() -> None:
    lines = cut_table(cut_model(SMOLLM2, 2)).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["0", "3-6", "1-2", "768", "24576", "[0:24576]"]
    assert all(len(a) == len(b) for a, b in pairwise(lines))
