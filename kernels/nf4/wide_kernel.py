# mypy: ignore-errors
"""The NF4 product for many rows, in Gluon: weights unpack while the tensor cores multiply.

Legend: an output is BM rows of x by TILES tiles of 16 features. Its work is `units` units of two
steps, a step being BLOCKS blocks of 64 columns. All units stand in one row, output after output,
and each program takes `share` of them: its first output may be the end of one, its last output the
beginning of one. `wide_output.py` puts such parts together.

One warp keeps the slots of a ring in shared memory filled with x, words and scales of a step; the
others unpack and multiply. Weights are the left operand, from registers, x is the right one:

    tensor cores   | step i, from a0         | step i + 1, from a1     | step i + 2, from a0
    other pipes    | step i + 1 to a1        | step i + 2 to a0        | ...
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from kernels.gluon_names import barrier, load_tile
from kernels.nf4.wide_output import count_left, leave, settle, write
from kernels.nf4.wide_unpack import fill_table, unpack_step


@gluon.jit(do_not_specialize=["rows", "units", "outputs", "share"])
def nf4_wide(
    x_desc,
    w_desc,
    s_desc,
    y_desc,
    p_table,
    p_bias,
    p_y,
    p_partial,
    p_count,
    rows,
    features,
    units,
    outputs,
    share,
    STAGES: gl.constexpr,
    ROW_TILES: gl.constexpr,
    USE_SHARED: gl.constexpr,
):
    """y = x W^T + bias; the sizes are those of the descriptors' blocks.

    x [BM, 64 BLOCKS], w [TILES, 128 BLOCKS], s [1, 16 TILES], y [BM, 16 TILES].
    """
    xs = slots_for(x_desc, STAGES)
    ws = slots_for(w_desc, STAGES)
    ss = slots_for(s_desc, STAGES)
    ys = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(left, count=1)
    fence_async_shared()
    barrier()
    first = share * gl.program_id(0)
    total = units * outputs
    work = (first, gl.minimum(first + share, total), units, share, total)
    ring = (xs, ws, ss, full, empty)
    out = (ys, y_desc, p_bias, p_y, p_partial, p_count, rows, features)
    gl.warp_specialize(
        [
            (consume, (ring, left, out, work, p_table, ROW_TILES, USE_SHARED)),
            (produce, (ring, left, x_desc, w_desc, s_desc, p_count, work, ROW_TILES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def slots_for(desc, STAGES: gl.constexpr):
    """Shared memory for blocks of a descriptor."""
    shape: gl.constexpr = [STAGES, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def produce(ring, left, x_desc, w_desc, s_desc, p_count, work, ROW_TILES: gl.constexpr):
    """Keep the slots filled."""
    xs, _, _, _, empty = ring
    first, end, units, _, _ = work
    STAGES: gl.constexpr = xs.shape[0]
    i_first = first // units
    k_first = (first - i_first * units) * 2
    # No kernel writes weights: the first ones come while the kernel before ends.
    i_out = i_first
    k = k_first
    for slot in gl.static_range(STAGES):
        fetch_weights(ring, w_desc, s_desc, slot, i_out // ROW_TILES, k, first * 2 + slot < end * 2)
        i_out, k = following(i_out, k, units)
    gdc_wait()
    i_out = i_first
    k = k_first
    for slot in gl.static_range(STAGES):
        fetch_rows(ring, x_desc, slot, i_out % ROW_TILES, k, first * 2 + slot < end * 2)
        i_out, k = following(i_out, k, units)
    slot = 0
    phase = 0
    for _ in range(first * 2 + STAGES, end * 2):
        mbarrier.wait(empty.index(slot), phase)
        fetch_weights(ring, w_desc, s_desc, slot, i_out // ROW_TILES, k, True)
        fetch_rows(ring, x_desc, slot, i_out % ROW_TILES, k, True)
        slot, phase = advance(slot, phase, STAGES)
        i_out, k = following(i_out, k, units)
    count_left(left, work, p_count)


@gluon.jit
def fetch_weights(ring, w_desc, s_desc, slot, i_n, k, more):
    """Start the loads of a step's words and scales; all of a step arrive at one barrier."""
    xs, ws, ss, full, _ = ring
    TILES: gl.constexpr = ws.shape[1]
    BLOCKS: gl.constexpr = xs.shape[2] // 64
    size: gl.constexpr = xs.shape[1] * BLOCKS * 128 + TILES * BLOCKS * 512 + TILES * 64
    bar = full.index(slot)
    mbarrier.expect(bar, size, pred=more)
    load_tile(w_desc, [i_n * TILES, k * (BLOCKS * 128)], bar, ws.index(slot), pred=more)
    load_tile(s_desc, [(k * BLOCKS) // 2, i_n * TILES * 16], bar, ss.index(slot), pred=more)


@gluon.jit
def fetch_rows(ring, x_desc, slot, i_m, k, more):
    """Start the load of a step's part of x."""
    xs, _, _, full, _ = ring
    at = [i_m * xs.shape[1], k * xs.shape[2]]
    load_tile(x_desc, at, full.index(slot), xs.index(slot), pred=more)


@gluon.jit
def following(i_out, k, units):
    """The output of the next step, and the step's number in it."""
    wraps = k + 1 == units * 2
    return gl.where(wraps, i_out + 1, i_out), gl.where(wraps, 0, k + 1)


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next slot of the ring and its phase."""
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def consume(ring, left, out, work, p_table, ROW_TILES: gl.constexpr, USE_SHARED: gl.constexpr):
    """Multiply what is in the slots, and write the outputs."""
    xs, ws, ss, full, empty = ring
    first, end, units, _, _ = work
    STAGES: gl.constexpr = xs.shape[0]
    BN: gl.constexpr = 16 * ws.shape[1]
    BM: gl.constexpr = xs.shape[1]
    W: gl.constexpr = gl.num_warps()
    o_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BM, 16])
    o_w: gl.constexpr = gl.DotOperandLayout(0, o_acc, 2)
    table = p_table
    if USE_SHARED:
        table = fill_table(p_table)
    gdc_wait()  # the workspace may still be in use
    slot = 0
    phase = 0
    used = 0  # the slot of the step before
    mbarrier.wait(full.index(slot), phase)
    a0 = unpack_step(ws.index(slot), ss.index(slot), table, False, o_w, USE_SHARED)
    a1 = a0
    acc = gl.zeros((BN, BM), gl.float32, layout=o_acc)
    unit = first
    while unit < end:
        i_out = unit // units
        begin = unit - i_out * units
        count = gl.minimum(units - begin, end - unit)
        acc = gl.zeros((BN, BM), gl.float32, layout=o_acc)
        for i in range(count):
            token = warpgroup_mma(a0, xs.index(slot).permute((1, 0)), acc, is_async=True)
            acc, a1 = warpgroup_mma_wait(1, deps=[token, a1])
            mbarrier.arrive(empty.index(used), pred=unit + i > first)
            used = slot
            slot, phase = advance(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase)
            a1 = unpack_step(ws.index(slot), ss.index(slot), table, True, o_w, USE_SHARED)
            token = warpgroup_mma(a1, xs.index(slot).permute((1, 0)), acc, is_async=True)
            acc, a0 = warpgroup_mma_wait(1, deps=[token, a0])
            mbarrier.arrive(empty.index(used))
            used = slot
            slot, phase = advance(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase, pred=unit + i + 1 < end)
            a0 = unpack_step(ws.index(slot), ss.index(slot), table, False, o_w, USE_SHARED)
        acc, a1 = warpgroup_mma_wait(0, deps=[acc, a1])
        unit += count
        if count == units:
            write(acc, out, i_out // ROW_TILES, i_out % ROW_TILES)
        elif unit < end:
            leave(acc, out, left)
    i_out = (end - 1) // units
    if end - gl.maximum(first, i_out * units) < units:
        settle(acc, out, work, i_out, ROW_TILES)
    tma.store_wait(0)
