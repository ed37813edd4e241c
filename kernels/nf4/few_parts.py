# mypy: ignore-errors
# ruff: noqa: RUF005 (tuples are joined by +: kernels know no unpacking)
"""Pieces of `few_kernel`: how a program of W warps loads weights and multiplies.

Legend: T tiles of 16 output features a program, w one of W warps, g one of 8 and q one of 4 lanes.
A tensor [W, T, 8, 4, n] (w T g q .) has in lane 4 g + q what the tensor cores take from it or leave
in it; see `packed.py` and `lookup.product`.
"""

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon_names import barrier
from kernels.nf4 import lookup

_PRODUCT_8 = tl.constexpr(lookup.product(1))
_PRODUCT_16 = tl.constexpr(lookup.product(2))
_CONSTRAINTS_8 = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16))
_CONSTRAINTS_16 = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 24))


@gluon.constexpr_function
def lanes(tiles, warps, last):
    """The layout of [W, T, 8, 4, last]."""
    return gl.BlockedLayout(
        [1, tiles, 1, 1, last], [1, 1, 8, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )


@gluon.constexpr_function
def only(layout, kept):
    """The layout of the one dimension `kept` of a tensor that has `layout`."""
    for dim in reversed([dim for dim in range(layout.rank) if dim != kept]):
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def places(LAYOUT: gl.constexpr, T: gl.constexpr, W: gl.constexpr, LAST: gl.constexpr):
    """The five indices of a tensor [W, T, 8, 4, LAST]."""
    i_w = gl.arange(0, W, layout=only(LAYOUT, 0))[:, None, None, None, None]
    i_t = gl.arange(0, T, layout=only(LAYOUT, 1))[None, :, None, None, None]
    i_g = gl.arange(0, 8, layout=only(LAYOUT, 2))[None, None, :, None, None]
    i_q = gl.arange(0, 4, layout=only(LAYOUT, 3))[None, None, None, :, None]
    i_o = gl.arange(0, LAST, layout=only(LAYOUT, 4))[None, None, None, None, :]
    return i_w, i_t, i_g, i_q, i_o


@gluon.jit
def load_words(
    p_words, tile, first, limit, blocks, PAIRS: gl.constexpr, T: gl.constexpr, W: gl.constexpr
):
    """2 PAIRS blocks [W, T, 8, 4, 4]: each warp's pairs from `first` on, zero from `limit` on."""
    i_w, i_t, i_g, i_q, i_o = places(lanes(T, W, 4), T, W, 4)
    o_block = (first + i_w * PAIRS) * 2
    p_block = p_words + (tile + i_t).to(gl.int64) * (blocks * 128)
    p_block += o_block * 128 + (i_g * 16 + i_q * 4 + i_o)
    words = ()
    for block in gl.static_range(2 * PAIRS):
        m_block = o_block + block < 2 * limit
        words = words + (gl.load(p_block + block * 128, mask=m_block, other=0),)
    return words


@gluon.jit
def load_scales(
    p_scales, tile, first, limit, padded, PAIRS: gl.constexpr, T: gl.constexpr, W: gl.constexpr
):
    """PAIRS words of scales [W, T, 8, 4, 2] of the features g and g + 8, equal along q."""
    i_w, i_t, i_g, i_q, i_r = places(lanes(T, W, 2), T, W, 2)
    o_pair = first + i_w * PAIRS
    p_pair = p_scales + o_pair.to(gl.int64) * padded
    p_pair += (tile + i_t) * 16 + (i_g * 2 + i_r + i_q * 0)
    scales = ()
    for pair in gl.static_range(PAIRS):
        m_pair = o_pair + pair < limit
        scales = scales + (gl.load(p_pair + pair * padded, mask=m_pair, other=0),)
    return scales


@gluon.jit
def spread_scales(bits, T: gl.constexpr, W: gl.constexpr):
    """[W, T, 8, 4, 2] float32 bits -> [W, T, 8, 4, 4]: each twice, for two rows of x."""
    scale = bits.to(gl.float32, bitcast=True)
    wide = gl.reshape(gl.join(scale, scale), (W, T, 8, 4, 4))
    return gl.convert_layout(wide, lanes(T, W, 4), assert_trivial=True)


@gluon.constexpr_function
def lanes_by_row(tiles, warps, rows):
    """The layout of [W, T, 8 / rows, rows, 4, 4]: `lanes` with g split, for fewer rows than 8."""
    return gl.BlockedLayout(
        [1, tiles, 1, 1, 1, 4], [1, 1, 8 // rows, rows, 4, 1], [warps] + [1] * 5, [5, 4, 3, 2, 1, 0]
    )


@gluon.jit
def fragment(x_step, place: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr, W: gl.constexpr):
    """[W, 1, 1, ROWS, 4, 4] (w . . g q (o0 h)) pairs of x of half a block and up to eight rows."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, lanes_by_row(T, W, ROWS)))
    x = x_step.slice(place * (ROWS * 16), ROWS * 16, 1).load(flat)
    x = gl.convert_layout(gl.reshape(x, (W, ROWS, 4, 4)), rows, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


@gluon.jit
def product(
    words, lane, x_step, block: gl.constexpr, BM: gl.constexpr, T: gl.constexpr, W: gl.constexpr
):
    """Sums [W, T, 8, 4, 4] of one block for each eight rows of x; see `lookup.product`.

    Of fewer than eight rows each is taken as several.
    """
    ROWS: gl.constexpr = BM if BM < 8 else 8
    layout: gl.constexpr = lanes_by_row(T, W, ROWS)
    words = gl.reshape(words, (W, T, 8 // ROWS, ROWS, 4, 4))
    words = gl.convert_layout(words, layout, assert_trivial=True)
    TILES: gl.constexpr = (BM + 7) // 8
    low = fragment(x_step, block * 2 * TILES, ROWS, T, W)
    high = fragment(x_step, (block * 2 + 1) * TILES, ROWS, T, W)
    if TILES == 1:
        sums = gl.inline_asm_elementwise(
            _PRODUCT_8,
            _CONSTRAINTS_8,
            [words, lane, low, high],
            dtype=gl.float32,
            is_pure=True,
            pack=4,
        )
        sums = (in_lanes(sums, T, W),)
    else:
        low2 = fragment(x_step, block * 2 * TILES + 1, ROWS, T, W)
        high2 = fragment(x_step, (block * 2 + 1) * TILES + 1, ROWS, T, W)
        sums, sums2 = gl.inline_asm_elementwise(
            _PRODUCT_16,
            _CONSTRAINTS_16,
            [words, lane, low, high, low2, high2],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=4,
        )
        sums = (in_lanes(sums, T, W), in_lanes(sums2, T, W))
    return sums


@gluon.jit
def in_lanes(sums, T: gl.constexpr, W: gl.constexpr):
    """[W, T, 8 / rows, rows, 4, 4] -> [W, T, 8, 4, 4]."""
    return gl.convert_layout(gl.reshape(sums, (W, T, 8, 4, 4)), lanes(T, W, 4), assert_trivial=True)


@gluon.constexpr_function
def sum_layout(size, warps):
    """The layout of [W, size] sums when a thread adds up those of all warps."""
    each = max(1, size // (32 * warps))
    return gl.BlockedLayout([warps, each], [1, 32], [1, warps], [1, 0])


@gluon.jit
def sum_of_warps(acc, shared, T: gl.constexpr, W: gl.constexpr):
    """[W, T, 8, 4, 4] -> [128 T] (T g q r b), by way of `shared` [W, 128 T]."""
    shared.store(gl.reshape(acc, (W, T * 128)))
    return gl.sum(shared.load(sum_layout(T * 128, W)), 0)


@gluon.jit
def join_parts(total, p_partial, p_arrived, place, part, o_sum, SPLIT: gl.constexpr):
    """Leave this part's sums; return whether all parts have arrived, and then the sum of all."""
    SIZE: gl.constexpr = total.shape[0]
    p_first = p_partial + place.to(gl.int64) * (SPLIT * SIZE) + o_sum
    gl.store(p_first + part * SIZE, total)
    barrier()  # every thread's part is written before this program counts as arrived
    last = gl.atomic_add(p_arrived + place, 1, sem="acq_rel") == SPLIT - 1
    if last:
        total = gl.load(p_first, cache_modifier=".cg")
        for other in gl.static_range(1, SPLIT):
            total += gl.load(p_first + other * SIZE, cache_modifier=".cg")
        gl.store(p_arrived + place, 0)  # as the next launch expects it
    return last, total
