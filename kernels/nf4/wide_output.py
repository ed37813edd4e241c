# mypy: ignore-errors
"""What becomes of the sums of `wide_kernel.py`: a whole output is written, parts are joined.

A program shares two outputs at most. The end of one may be the first of its work: it leaves the
sums in memory and goes on. The beginning or the middle of one may be the last of its work: the
sums stay in registers. A program that is the only one to end with an output adds what the other
one left long before. Several leave each other the slices of rows that aren't their own, wait for
each other, and add what others left to their own, part after part. All are there at once: no more
are started than the device holds, and no kernel waits for this one's end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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
def place_of(p_partial, program, last, SIZE: gl.constexpr):
    """A program has two places: for the first of its work, which it leaves early, and the last."""
    return p_partial + gl.cast(2 * program + last, gl.int64) * SIZE


@gluon.jit
def leave(acc, out, left):
    """Put the end of an output, this program's first work, where `count_left` lets it be found."""
    _, _, _, _, p_partial, _, _, _ = out
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    p_part = place_of(p_partial, gl.program_id(0), 0, BN * BM)
    gl.store(p_part + places(0, BM, BN, BM, layout), acc)
    barrier()
    mbarrier.arrive(left)


@gluon.jit
def count_left(left, work, p_count):
    """Count what `leave` leaves, if anything, in a warp that may wait until memory has it."""
    first, end, units, _, _ = work
    i_out = first // units
    if (first > i_out * units) & (end > (i_out + 1) * units):
        mbarrier.wait(left, 0)
        gl.atomic_add(p_count + i_out, 1, sem="release")


@gluon.jit
def wait(p_count, parts):
    """Wait until so many parts have been left."""
    seen = gl.atomic_add(p_count, 0, sem="acquire")
    while seen < parts:
        seen = gl.atomic_add(p_count, 0, sem="acquire")


@gluon.jit
def settle(acc, out, work, i_out, ROW_TILES: gl.constexpr):
    """Join the output that is the last of this program's work with what others have of it."""
    _, _, _, _, p_partial, p_count, _, _ = out
    _, _, units, share, total = work
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    low = i_out * units // share  # the program that has the output's first unit
    high = ((i_out + 1) * units - 1) // share
    goes_on = gl.minimum((high + 1) * share, total) > (i_out + 1) * units
    ending = high - low + 1 - goes_on.to(gl.int32)
    if ending == 1:
        wait(p_count + i_out, 1)
        p_part = place_of(p_partial, high, 0, BN * BM)
        acc += gl.load(p_part + places(0, BM, BN, BM, layout), cache_modifier=".cg")
        write(acc, out, i_out // ROW_TILES, i_out % ROW_TILES)
        gl.store(p_count + i_out, 0)  # as the next launch expects it
    else:
        join(acc, out, i_out, low, high, ending, ROW_TILES)


@gluon.jit
def halves(acc):
    """[BN, rows] sums: of the first and of the last half of the rows, in the lanes they are in."""
    BN: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    first, last = gl.split(gl.permute(gl.reshape(acc, (BN, 2, HALF)), (0, 2, 1)))
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(last, layout, assert_trivial=True)


@gluon.jit
def slices(acc):
    """[BN, rows] sums in four slices of rows, or two of eight."""
    first, last = halves(acc)
    if acc.shape[1] == 16:
        return first, last
    else:
        s0, s1 = halves(first)
        s2, s3 = halves(last)
        return s0, s1, s2, s3


@gluon.jit
def part(p_partial, low, turn, ending, o_part, there, SIZE: gl.constexpr):
    """Values of the part of an output's program number `turn`; zeros unless it is there."""
    p_part = place_of(p_partial, low + turn, (turn < ending).to(gl.int32), SIZE)
    return gl.load(p_part + o_part, mask=there, other=0.0, cache_modifier=".cg")


@gluon.jit
def join(acc, out, i_out, low, high, ending, ROW_TILES: gl.constexpr):
    """Leave others their slices of an output, wait for all parts, add up and write this one's."""
    ys, _, _, _, p_partial, p_count, _, _ = out
    BM: gl.constexpr = ys.shape[0]
    BN: gl.constexpr = ys.shape[1]
    SIZE: gl.constexpr = BN * BM
    parts = high - low + 1
    turn = gl.program_id(0) - low
    sums = slices(acc)
    SLICES: gl.constexpr = len(sums)
    SPAN: gl.constexpr = BM // SLICES
    layout: gl.constexpr = sums[0].type.layout
    p_own = place_of(p_partial, low + turn, 1, SIZE)
    for i in gl.static_range(SLICES):
        if i % ending != turn:
            gl.store(p_own + places(i * SPAN, SPAN, BN, BM, layout), sums[i])
    barrier()  # every thread's part is written before this program counts as arrived
    gl.atomic_add(p_count + i_out, 1, sem="release")
    wait(p_count + i_out, parts)
    for i in gl.static_range(SLICES):
        if i % ending == turn:
            total = sums[i]
            o_part = places(i * SPAN, SPAN, BN, BM, layout)
            for k in range(turn + 1, turn + parts, 3):  # three are on their way at a time
                end = turn + parts
                next0 = part(p_partial, low, k % parts, ending, o_part, True, SIZE)
                next1 = part(p_partial, low, (k + 1) % parts, ending, o_part, k + 1 < end, SIZE)
                next2 = part(p_partial, low, (k + 2) % parts, ending, o_part, k + 2 < end, SIZE)
                total = total + next0 + next1 + next2
            write_slice(total, out, i_out // ROW_TILES, i_out % ROW_TILES * SLICES + i)
    # As the next launch expects it, once all that wait have seen all parts.
    if gl.atomic_add(p_count + i_out, 1, sem="relaxed") == parts + ending - 1:
        gl.store(p_count + i_out, 0)


@gluon.jit
def write_slice(acc, out, i_n, i_m):
    """Write a slice of an output, through shared memory."""
    ys, _, p_bias, p_y, _, _, rows, features = out
    BN: gl.constexpr = acc.shape[0]
    SPAN: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BN, BN // 8], [gl.num_warps(), 1], [1, 0]
    )
    zs = ys.slice(0, SPAN, 0)
    y = finished(acc, p_bias, i_n * BN, features)
    tma.store_wait(0)
    barrier()
    zs.permute((1, 0)).store(y)
    barrier()
    o_m = i_m * SPAN + gl.arange(0, SPAN, layout=gl.SliceLayout(1, layout))
    o_n = i_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    p_out = p_y + o_m.to(gl.int64)[:, None] * features + o_n[None, :]
    m_y = (o_m < rows)[:, None] & (o_n < features)[None, :]
    gl.store(p_out, zs.load(layout), mask=m_y)
