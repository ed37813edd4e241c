from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import keys

logits = st.floats(width=32, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.tuples(logits, st.integers(0, 2**32 - 2)), min_size=2, max_size=30))
def test_keys_sort_by_logit_then_lowest_id_and_give_both_back(
    pairs: list[tuple[float, int]],
) -> None:
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float32)
    ids = torch.tensor([token for _, token in pairs])
    packed = keys.pack(values, ids)
    assert torch.equal(keys.values_of(packed), values)
    assert torch.equal(keys.ids_of(packed), ids)
    ranked = packed.sort(descending=True).values
    expected = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
    assert keys.ids_of(ranked).tolist() == [token for _, token in expected]


def test_padding_is_minus_infinity_behind_every_real_candidate() -> None:
    worst = keys.pack(torch.tensor([-math.inf]), torch.tensor([2**32 - 2])).item()
    assert worst > keys.PAD
    assert keys.values_of(torch.tensor([keys.PAD])).item() == -math.inf


@pytest.mark.parametrize("columns", [0, 1, 2, 7, 64, 200])
@pytest.mark.parametrize("width", [1, 2, 8, 64, 128])
def test_best_equals_a_full_stable_sort(columns: int, width: int) -> None:
    generator = torch.Generator().manual_seed(columns * 1000 + width)
    # Few distinct values: every row is full of ties, also at the last place taken.
    values = torch.randint(-3, 3, (5, columns), generator=generator).float()
    values[values == -2] = -0.0
    got = keys.best(values, 2**25 + 1, width)
    assert got.shape == (5, width)
    ranked, order = values.sort(dim=1, descending=True, stable=True)
    taken = min(width, columns)
    assert torch.equal(keys.values_of(got[:, :taken]), ranked[:, :taken])
    assert torch.equal(keys.ids_of(got[:, :taken]), order[:, :taken] + 2**25 + 1)
    assert (got[:, taken:] == keys.PAD).all()
