# mypy: ignore-errors
# ruff: noqa: RUF005 (tuples are joined by +: kernels know no unpacking)
"""How a program of `few_kernel` prepares the rows of x that all its products read.

Legend: W warps, each with K adjacent columns of a step; BM rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def row_layout(rows, warps):
    """The layout of [W, BM, K] of x: 8 or 16 bytes a thread."""
    across = 1 if rows == 1 else 2
    return gl.BlockedLayout([1, 1, 4 * across], [1, across, 32 // across], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def row_places(step, begin, BM: gl.constexpr, K: gl.constexpr, W: gl.constexpr):
    """Row [1, BM, 1] and column [W, 1, K] of each value of a step, from the column `begin` on."""
    layout: gl.constexpr = row_layout(BM, W)
    i_w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    o_m = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    i_k = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return o_m, begin + (step * W + i_w) * K + i_k


@gluon.jit
def load_norm(
    p_norm, columns, STEPS: gl.constexpr, BM: gl.constexpr, K: gl.constexpr, W: gl.constexpr
):
    """The weights [W, 1, K] of a norm, for each step."""
    weights = ()
    for i in gl.static_range(STEPS):
        _, o_k = row_places(i, 0, BM, K, W)
        weights = weights + (gl.load(p_norm + o_k, mask=o_k < columns, other=0.0),)
    return weights


@gluon.jit
def load_rows(
    p_x, p_residual, rows, stride_x, begin, end, columns,
    HAS_NORM: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """x [W, BM, K] of each step, before a norm with the residual added; zero from `end` on."""
    dtype: gl.constexpr = p_x.dtype.element_ty
    xs = ()
    for i in gl.static_range(STEPS):
        o_m, o_k = row_places(i, begin, BM, K, W)
        mask = (o_m < rows) & (o_k < end) & (o_k < columns)
        x = gl.load(p_x + o_m.to(gl.int64) * stride_x + o_k, mask=mask, other=0.0)
        if HAS_NORM:
            residual = gl.load(p_residual + o_m.to(gl.int64) * columns + o_k, mask=mask, other=0.0)
            x = (x.to(gl.float32) + residual.to(gl.float32)).to(dtype)
        xs = xs + (x,)
    return xs


@gluon.jit
def store_rows(
    p_total, xs, rows, columns,
    STEPS: gl.constexpr, BM: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Write the sums of x and residual, [T, K] contiguous."""
    for i in gl.static_range(STEPS):
        o_m, o_k = row_places(i, 0, BM, K, W)
        mask = (o_m < rows) & (o_k < columns)
        gl.store(p_total + o_m.to(gl.int64) * columns + o_k, xs[i], mask=mask)


@gluon.jit
def normalise(xs, weights, eps, columns, STEPS: gl.constexpr):
    """RMSNorm of whole rows, rounded where `kernels.fused.RMSNorm` rounds."""
    dtype: gl.constexpr = xs[0].dtype
    squares = xs[0].to(gl.float32) * xs[0].to(gl.float32)
    for i in gl.static_range(1, STEPS):
        squares += xs[i].to(gl.float32) * xs[i].to(gl.float32)
    factor = gl.rsqrt(gl.sum(gl.sum(squares, 2), 0) / columns + eps)[None, :, None]
    normed = ()
    for i in gl.static_range(STEPS):
        x = (xs[i].to(gl.float32) * factor).to(dtype).to(gl.float32)
        normed = normed + ((weights[i].to(gl.float32) * x).to(dtype),)
    return normed


@gluon.jit
def in_lane_order(x, BM: gl.constexpr, K: gl.constexpr, W: gl.constexpr):
    """[W, BM, K] -> [W, K / 2 * BM] pairs of adjacent columns as int32.

    In the order in which lanes take them: block, o1, eight rows, g, q, o0, h; see
    `lookup.product`.
    """
    TILES: gl.constexpr = (BM + 7) // 8
    low, high = gl.split(gl.reshape(x.to(gl.int16, bitcast=True), (W, BM, K // 2, 2)))
    pairs = (low.to(gl.int32) & 65535) | (high.to(gl.int32) << 16)
    apart = gl.reshape(pairs, (W, TILES, BM // TILES, K // 64, 2, 2, 2, 4))  # w t g block o1 o0 h q
    ordered = gl.reshape(gl.permute(apart, (0, 3, 4, 1, 2, 7, 5, 6)), (W, K // 2 * BM))
    return gl.convert_layout(ordered, gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0]))
