"""The deterministic ops: a row's bits depend on the row, its context and its adapter alone."""

import pytest
import torch
from torch import Tensor

from kernels.dispatch import Ops
from kernels.lora import LoraTarget
from kernels.nf4 import DenseWeight
from tests.kernels.paging import Pool, Tokens, deal_pages, fill, make_batch
from tests.kernels.rank_rows import Arena, Shape, place, uniform
from tests.kernels.truth import bits

# Shapes of real layers, whole and cut over ranks, and odd ones.
WEIGHTS = [
    (576, 576),
    (960, 576),
    (3072, 576),
    (576, 1536),
    (320, 896),
    (64, 64),
    (33, 100),
    (20, 577),
    (16, 1000),
    (7, 65),
    (1, 576),
    (4100, 64),
]
ROW_COUNTS = [1, 2, 3, 7, 8, 9, 16, 17, 40]


def surroundings(row: Tensor, count: int, place_of_row: int) -> Tensor:
    """Put a row among random others."""
    x = torch.randn(count, *row.shape)
    x[place_of_row] = row
    return x


@pytest.mark.parametrize("shape", WEIGHTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(deterministic: Ops, shape: tuple[int, int], with_bias: bool) -> None:
    weight = DenseWeight(weight=torch.randn(shape))
    bias = torch.randn(shape[0]) if with_bias else None
    row = torch.randn(shape[1])
    alone = bits(deterministic.linear(row[None], weight, bias)[0])
    for count in ROW_COUNTS:
        for at in {0, count // 2, count - 1}:
            y = deterministic.linear(surroundings(row, count, at), weight, bias)
            assert bits(y[at]) == alone, f"row {at} of {count}"


def test_linear_of_a_view_equals_that_of_its_copy(deterministic: Ops) -> None:
    weight, wide = DenseWeight(weight=torch.randn(48, 65)), torch.randn(21, 100)
    for start in range(8):
        view = wide[start:, start : start + 65]
        expected = deterministic.linear(view.clone(), weight)
        assert bits(deterministic.linear(view, weight)) == bits(expected)


def test_stock_linear_is_not_enough(fast: Ops) -> None:
    """If this fails, tiles have become needless on this machine."""
    weight, row = DenseWeight(weight=torch.randn(576, 576)), torch.randn(576)
    results = {bits(fast.linear(surroundings(row, n, 0), weight)[0]) for n in ROW_COUNTS}
    assert len(results) > 1


@pytest.mark.parametrize("width", [1, 33, 576, 1536, 8191])
def test_small_ops(deterministic: Ops, width: int) -> None:
    row, other, gate_up = torch.randn(width), torch.randn(width), torch.randn(2 * width) * 4
    weight = torch.randn(width)
    normed = bits(deterministic.rms_norm(row[None], weight, 1e-5)[0])
    added = bits(deterministic.add_rms_norm(row[None], other[None], weight, 1e-5)[0][0])
    activated = bits(deterministic.silu_mul(gate_up[None])[0])
    for count in ROW_COUNTS:
        for at in {0, count // 2, count - 1}:
            x, residual = surroundings(row, count, at), surroundings(other, count, at)
            assert bits(deterministic.rms_norm(x, weight, 1e-5)[at]) == normed
            got, _ = deterministic.add_rms_norm(x, residual, weight, 1e-5)
            assert bits(got[at]) == added
            gates = surroundings(gate_up, count, at)
            assert bits(deterministic.silu_mul(gates)[at]) == activated


def test_rotary(deterministic: Ops) -> None:
    q, k, table = torch.randn(9, 64), torch.randn(3, 64), torch.randn(50, 64)
    alone = deterministic.rotary(q[None], k[None], table, torch.tensor([17]))
    for count in ROW_COUNTS:
        at = count // 2
        positions = torch.randint(0, 50, (count,))
        positions[at] = 17
        turned = deterministic.rotary(
            surroundings(q, count, at), surroundings(k, count, at), table, positions
        )
        for got, expected in zip(turned, alone, strict=True):
            assert bits(got[at]) == bits(expected[0])


LORA = Shape(layers=1, inputs=(576, 576, 576), outputs=(576, 192, 192))
SPANS = ((0, 576), (576, 192), (768, 192))


@pytest.fixture(scope="module")
def adapters() -> Arena:
    torch.manual_seed(4)
    return place(LORA, [uniform(LORA, r) for r in (1, 3, 4, 8, 16, 64, 128)], scattered=True)


def delta(
    ops: Ops, arena: Arena, x: Tensor, y: Tensor, counts: list[int], who: list[int | None]
) -> Tensor:
    batch = arena.batch(arena.segments(counts, who))
    target = LoraTarget(layer=0, sites=(0, 1, 2), num_sites=3, spans=SPANS)
    y = y.clone()
    ops.lora_expand_(y, ops.lora_shrink(x, batch, target), batch, target)
    return y


@pytest.mark.parametrize("adapter", range(7))
def test_lora(deterministic: Ops, adapters: Arena, adapter: int) -> None:
    row, base = torch.randn(576), torch.randn(960)
    alone = delta(deterministic, adapters, row[None], base[None], [1], [adapter])
    others: list[tuple[list[int], list[int | None], int]] = [
        ([5], [adapter], 0),
        ([5], [adapter], 4),
        ([37], [adapter], 20),
        ([1] * 9, [0, 1, 2, 3, 4, 5, 6, None, adapter], 8),
        ([3, 1, 2], [None, adapter, (adapter + 1) % 7], 3),
        ([1] * 20, [adapter] * 20, 13),
        ([40, 7], [6 - adapter, adapter], 43),
    ]
    for counts, who, at in others:
        total = sum(counts)
        x, y = surroundings(row, total, at), surroundings(base, total, at)
        got = delta(deterministic, adapters, x, y, counts, who)
        assert bits(got[at]) == bits(alone[0]), (counts, who, at)


@pytest.mark.parametrize("rank", [1, 2, 5, 12])
@pytest.mark.parametrize(("width", "out"), [(1, 1), (100, 5), (577, 7), (288, 17), (1000, 33)])
def test_lora_of_odd_sizes(deterministic: Ops, rank: int, width: int, out: int) -> None:
    shape = Shape(layers=1, inputs=(width,), outputs=(out,))
    arena = place(shape, [uniform(shape, rank), uniform(shape, 4)], scattered=True)
    row, base, seen = torch.randn(width), torch.randn(out), set()
    batches: list[tuple[list[int], list[int | None], int]] = [
        ([1], [0], 0),
        ([5], [0], 3),
        ([3, 2], [1, 0], 4),
        ([1] * 9, [0] * 9, 7),
        ([20, 1], [0, 1], 11),
    ]
    for counts, who, at in batches:
        x, y = surroundings(row, sum(counts), at), surroundings(base, sum(counts), at)
        batch = arena.batch(arena.segments(counts, who))
        target = LoraTarget(layer=0, sites=(0,), num_sites=1, spans=((0, out),))
        h = deterministic.lora_shrink(x, batch, target)
        deterministic.lora_expand_(y, h, batch, target)
        seen.add(bits(y[at]))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block"),
    [(3, 3, 64, 16), (1, 1, 16, 16), (2, 7, 128, 16), (1, 4, 80, 24), (1, 8, 256, 128)],
)
@pytest.mark.parametrize("window", [None, 1, 50])
class TestAttention:
    """One sequence of 150 tokens, computed in many ways."""

    LENGTH = 150

    @pytest.fixture(autouse=True)
    def _sequence(self, kv_heads: int, group: int, dim: int, block: int) -> None:
        self.pool = Pool(pages=90, kv_heads=kv_heads, dim=dim, block=block)
        self.tokens = Tokens.random(self.LENGTH, self.pool)
        self.q = torch.randn(self.LENGTH, kv_heads * group, dim)

    def attend(
        self,
        ops: Ops,
        sequences: list[tuple[int, int]],
        queries: list[Tensor],
        *,
        seed: int = 0,
        extra_width: int = 0,
        window: int | None,
    ) -> list[Tensor]:
        """Run a batch whose last sequence is (a prefix of) the one under test."""
        pool = Pool(pages=90, kv_heads=self.pool.kv_heads, dim=self.pool.dim, block=self.pool.block)
        tables = deal_pages([context for context, _ in sequences], pool, seed)
        tokens = [Tokens.random(context, pool) for context, _ in sequences[:-1]]
        end = sequences[-1][0]
        tokens.append(Tokens(k=self.tokens.k[:end], v=self.tokens.v[:end]))
        fill(pool, ops, tokens, tables)
        batch = make_batch(sequences, tables, pool.block, extra_width)
        out = ops.paged_attention(
            torch.cat(queries),
            pool.k_cache,
            pool.v_cache,
            batch,
            scale=pool.dim**-0.5,
            window=window,
        )
        return list(out.split([rows for _, rows in sequences]))

    def test_row_by_row_equals_one_shot(self, deterministic: Ops, window: int | None) -> None:
        (whole,) = self.attend(deterministic, [(self.LENGTH, self.LENGTH)], [self.q], window=window)
        for end in (1, 2, 16, 64, 65, 127, 128, 149, 150):
            (row,) = self.attend(
                deterministic, [(end, 1)], [self.q[end - 1 : end]], seed=end, window=window
            )
            assert bits(row[0]) == bits(whole[end - 1]), end

    def test_chunks_equal_one_shot(self, deterministic: Ops, window: int | None) -> None:
        (whole,) = self.attend(deterministic, [(self.LENGTH, self.LENGTH)], [self.q], window=window)
        for chunk in (3, 16, 61):
            for start in range(0, self.LENGTH, chunk):
                end = min(start + chunk, self.LENGTH)
                (part,) = self.attend(
                    deterministic, [(end, end - start)], [self.q[start:end]], window=window
                )
                assert bits(part) == bits(whole[start:end]), (chunk, start)

    def test_neighbours_and_table_width_change_nothing(
        self, deterministic: Ops, window: int | None
    ) -> None:
        last = self.q[-1:]
        (alone,) = self.attend(deterministic, [(self.LENGTH, 1)], [last], window=window)
        for neighbours in ([(700, 1)], [(3, 1), (400, 30)], [(90, 1)] * 5, [(10, 10), (64, 1)]):
            rows = [torch.randn(rows, *last.shape[1:]) for _, rows in neighbours]
            *_, got = self.attend(
                deterministic,
                [*neighbours, (self.LENGTH, 1)],
                [*rows, last],
                seed=7,
                extra_width=5,
                window=window,
            )
            assert bits(got) == bits(alone)


def test_more_items_than_go_together(deterministic: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(pages=20, kv_heads=2, dim=32)
    tokens, tables = Tokens.random(100, pool), deal_pages([100], pool)
    fill(pool, deterministic, [tokens], tables)
    q = torch.randn(90, 4, 32)
    results = []
    for limit in (64, 1, 3):
        monkeypatch.setattr("kernels.attention.deterministic._ITEMS", limit)
        results.append(
            deterministic.paged_attention(
                q,
                pool.k_cache,
                pool.v_cache,
                make_batch([(100, 90)], tables, 16),
                scale=0.2,
                window=30,
            )
        )
    assert bits(results[0]) == bits(results[1]) == bits(results[2])
