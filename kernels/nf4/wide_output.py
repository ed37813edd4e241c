# mypy: ignore-errors
"""What becomes of the sums of `wide_kernel.py`: a whole output is written, parts are joined.

Programs leave their parts of an output in memory. At its end each waits for the other programs of
its outputs, which end at the same time, and adds up its slices of them, part after part. All are
there at once: no more are started than the device holds, and no kernel waits for this one's end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernels.gluon_names import barrier, store_tile
from kernels.nf4.codebook import GAIN

_GAIN = gl.constexpr(GAIN)


@gluon.jit
def finished(acc, p_bias, begin, features):
    """[BN, rows] sums to values."""
    acc = acc * (1.0 / _GAIN)
    if p_bias is not None:
        o_n = begin + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        bias = gl.load(p_bias + o_n, mask=o_n < features, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    return acc.to(gl.bfloat16)


@gluon.jit
def write(acc, out, i_n, i_m):
    """Send an output off, through shared memory."""
    ys, y_desc, p_bias, _, _, _, _, features = out
    y = finished(acc, p_bias, i_n * acc.shape[0], features)
    tma.store_wait(0)  # of the output before, from the same place
    barrier()
    ys.permute((1, 0)).store(y)
    fence_async_shared()
    barrier()
    store_tile(y_desc, [i_m * acc.shape[1], i_n * acc.shape[0]], ys)


@gluon.jit
def places(first, COUNT: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, layout: gl.constexpr):
    """Where rows `first` up of a part are: eight rows of eight features side by side."""
    o_n = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    o_m = first + gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))
    o_row = (o_n // 16) * (BM * 16) + ((o_n // 8) % 2) * 64 + (o_n % 8) * 8
    return o_row[:, None] + ((o_m // 8) * 128 + o_m % 8)[None, :]


@gluon.jit
def leave(acc, out, i_out, begin):
    """Put this program's part of an output where others find it."""
    _, _, _, _, p_partial, p_count, _, _ = out
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    # A program has two places: for the end of an output, its first one, and for a beginning.
    place = gl.cast(2 * gl.program_id(0) + (begin == 0).to(gl.int32), gl.int64)
    layout: gl.constexpr = acc.type.layout
    o_part = places(0, BM, BN, BM, layout)
    gl.store(p_partial + place * (BN * BM) + o_part, acc)
    barrier()  # every thread's part is written before this program counts as arrived
    gl.atomic_add(p_count + i_out, 1, sem="release")


@gluon.jit
def settle_all(out, work, ROW_TILES: gl.constexpr):
    """Join this program's shared outputs: its first one, its last one, or both."""
    first, end, units, _ = work
    i_first = first // units
    i_last = (end - 1) // units
    if end - first < units or first != i_first * units:
        settle(out, work, i_first, ROW_TILES)
    if i_last != i_first and end != (i_last + 1) * units:
        settle(out, work, i_last, ROW_TILES)


@gluon.jit
def part(p_partial, place, o_part, there, SIZE: gl.constexpr):
    """Values of one part; zeros unless it is there."""
    p_part = p_partial + gl.cast(place, gl.int64) * SIZE
    return gl.load(p_part + o_part, mask=there, other=0.0, cache_modifier=".cg")


@gluon.jit
def settle(out, work, i_out, ROW_TILES: gl.constexpr):
    """Wait for all parts of an output, then add up and write this program's slices of it."""
    ys, _, p_bias, p_y, p_partial, p_count, rows, features = out
    _, _, units, share = work
    BM: gl.constexpr = ys.shape[0]
    BN: gl.constexpr = ys.shape[1]
    W: gl.constexpr = gl.num_warps()
    SLICES: gl.constexpr = 4 if BM >= 32 else BM // 8
    SPAN: gl.constexpr = BM // SLICES
    o_sum: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, SPAN, 16])
    o_y: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [W, 1], [1, 0])
    low = i_out * units // share  # the program that has the output's first unit
    high = (i_out * units + units - 1) // share
    parts = high - low + 1
    seen = gl.atomic_add(p_count + i_out, 0, sem="acquire")
    while seen < parts:
        seen = gl.atomic_add(p_count + i_out, 0, sem="acquire")
    begin = i_out // ROW_TILES * BN
    zs = ys.slice(0, SPAN, 0)
    for i in range(gl.program_id(0) - low, SLICES, parts):
        o_part = places(i * SPAN, SPAN, BN, BM, o_sum)
        acc = part(p_partial, 2 * low + 1, o_part, True, BN * BM)
        for program in range(low + 1, high + 1, 3):  # three are on their way at a time
            next0 = part(p_partial, 2 * program, o_part, True, BN * BM)
            next1 = part(p_partial, 2 * program + 2, o_part, program + 1 <= high, BN * BM)
            next2 = part(p_partial, 2 * program + 4, o_part, program + 2 <= high, BN * BM)
            acc = acc + next0 + next1 + next2
        tma.store_wait(0)
        barrier()
        zs.permute((1, 0)).store(finished(acc, p_bias, begin, features))
        barrier()
        o_m = i_out % ROW_TILES * BM + i * SPAN
        o_m += gl.arange(0, SPAN, layout=gl.SliceLayout(1, o_y))
        o_n = begin + gl.arange(0, BN, layout=gl.SliceLayout(0, o_y))
        p_out = p_y + o_m.to(gl.int64)[:, None] * features + o_n[None, :]
        m_y = (o_m < rows)[:, None] & (o_n < features)[None, :]
        gl.store(p_out, zs.load(o_y), mask=m_y)
    # As the next launch expects it, once all programs have seen all parts.
    if gl.atomic_add(p_count + i_out, 1, sem="relaxed") == 2 * parts - 1:
        gl.store(p_count + i_out, 0)
