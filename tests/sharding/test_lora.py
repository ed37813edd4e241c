"""LoRA pairs cut beside the base weight."""

import pytest
import torch

from sharding import SITES, ModelDims, Span, WeightSlice, cut_lora, cut_model, weight_slice

DIMS = ModelDims(layers=3, hidden=40, intermediate=200, heads=6, kv_heads=2, head_dim=8, vocab=100)
FULL = {
    "q_proj": (48, 40),
    "k_proj": (16, 40),
    "v_proj": (16, 40),
    "o_proj": (40, 48),
    "gate_proj": (200, 40),
    "up_proj": (200, 40),
    "down_proj": (40, 200),
}


def pair(site: str, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = FULL[site]
    generator = torch.Generator().manual_seed(r)
    a = torch.randint(-4, 5, (r, cols), generator=generator).double()
    return a, torch.randint(-4, 5, (rows, r), generator=generator).double()


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("site", SITES)
def test_products_of_the_shards_are_the_base_shards_part_of_delta(site: str, world: int) -> None:
    a, b = pair(site, 5)  # a LoRA rank that divides by no world but 1 and 5
    delta = b @ a
    for cut in cut_model(DIMS, world):
        for layer in cut.layers:
            s = weight_slice(DIMS, layer, site)
            a_shard, b_shard = cut_lora(a, b, s)
            assert torch.equal(b_shard @ a_shard, delta[s.rows.slice, s.cols.slice])


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("site", SITES)
def test_outputs_of_all_ranks_sum_to_the_unsharded_output(site: str, world: int) -> None:
    a, b = pair(site, 3)
    x = torch.randint(-4, 5, (2, a.shape[1])).double()
    y = torch.zeros(2, b.shape[0]).double()
    for cut in cut_model(DIMS, world):
        s = weight_slice(DIMS, cut.layers[-1], site)
        a_shard, b_shard = cut_lora(a, b, s)
        part = x[:, s.cols.slice] @ a_shard.T @ b_shard.T
        if site in ("o_proj", "down_proj"):
            y += part
        else:  # replicated KV heads are the same on each of their ranks
            y[:, s.rows.slice] = part
    assert torch.equal(y, x @ (b @ a).T)


def test_nothing_is_copied() -> None:
    a, b = pair("q_proj", 4)
    a_shard, b_shard = cut_lora(a, b, WeightSlice(rows=Span(8, 16), cols=Span(0, 40)))
    assert a_shard.data_ptr() == a.data_ptr()
    assert b_shard.data_ptr() == b[8:].data_ptr()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((4, 40), (48, 5), "must be"),
        ((4, 39), (48, 4), "too few columns, need 40"),
        ((4, 40), (15, 4), "too few rows, need 16"),
        ((4,), (48, 4), "must be"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(
    a: tuple[int, ...], b: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cut_lora(torch.zeros(a), torch.zeros(b), WeightSlice(rows=Span(8, 16), cols=Span(0, 40)))
