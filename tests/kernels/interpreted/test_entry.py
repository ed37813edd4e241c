"""The Triton beginning of a step against the reference."""

import pytest
import torch

from kernels.entry import gpu, reference
from tests.kernels.truth import bits

FIELDS = ("tokens", "write_pages", "write_slots", "page_table")


@pytest.mark.parametrize("blocks", [0, 1, 128, 150])
@pytest.mark.parametrize("rows", [0, 1, 128, 300])
def test_spell_out(rows: int, blocks: int) -> None:
    tokens = torch.randint(-1, 900, (rows,))
    positions = torch.randint(0, 16 * 160, (rows,))
    row_slots, slots = torch.randint(0, 9, (rows,)), torch.randperm(9)[:5]
    last, tables = torch.randint(0, 900, (9,)), torch.randint(-1, 70, (9, 160), dtype=torch.int32)
    given = (tokens, positions, row_slots, slots, last, tables)
    got = gpu.spell_out(*given, block_tokens=16, blocks=blocks)
    expected = reference.spell_out(*given, block_tokens=16, blocks=blocks)
    for name in FIELDS:
        one, other = getattr(got, name), getattr(expected, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name


def test_spell_out_reads_views_and_counts_no_row_of_a_table_twice() -> None:
    tables = torch.randint(0, 70, (4, 40), dtype=torch.int32)[:, :20]
    tokens = torch.tensor([[-1, 5], [7, 5], [-1, 5]])[:, 0]
    given = (tokens, tokens.abs(), tokens.abs() % 4, torch.tensor([3, 3]), torch.arange(4), tables)
    got = gpu.spell_out(*given, block_tokens=2, blocks=20)
    expected = reference.spell_out(*given, block_tokens=2, blocks=20)
    assert all(torch.equal(getattr(got, name), getattr(expected, name)) for name in FIELDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [1, 96, 1500])
@pytest.mark.parametrize("vocab", [0, 1, 50])
def test_embed(vocab: int, hidden: int, dtype: torch.dtype) -> None:
    weight = torch.randn(vocab, hidden).to(dtype)
    tokens = torch.tensor([5, 54, 4, 55, 70, 5, 0])
    assert bits(gpu.embed(tokens, weight, 5)) == bits(reference.embed(tokens, weight, 5))
    assert gpu.embed(tokens[:0], weight, 5).shape == (0, hidden)


def test_wrong_inputs_are_named() -> None:
    rows, tables = torch.zeros(2, dtype=torch.int64), torch.zeros((3, 4), dtype=torch.int32)
    given = (rows, rows, rows, rows, rows)
    with pytest.raises(ValueError, match="tables must be"):
        gpu.spell_out(*given, tables, block_tokens=16, blocks=5)
    with pytest.raises(ValueError, match="positions must be"):
        gpu.spell_out(rows, rows[:1], *given[2:], tables, block_tokens=16, blocks=4)
    with pytest.raises(ValueError, match="tokens must be"):
        gpu.embed(rows.int(), torch.zeros(4, 4), 0)
    with pytest.raises(ValueError, match="weight must be"):
        gpu.embed(rows, torch.zeros(4, 4).T[:2].T, 0)
