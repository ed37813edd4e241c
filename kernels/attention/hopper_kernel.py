# mypy: ignore-errors
"""Gluon: chunks of query rows over paged keys and values on Hopper, warps of separate roles.

    1 warp   reads page numbers and has pages copied to shared memory (TMA), STAGES blocks ahead
    2 x 4    64 lines each of a tile: products, softmax, output
    tile     2 * ROWS query rows of one sequence x GROUP heads of one KV head

Heads are cut into parts of 64 dims, the width of a swizzled row of shared memory: a block is then
made of pages by copying each into its own rows. A page outside of what a tile sees is not read: its
coordinates lie beyond the cache, which the copy fills with zeros. What lies behind the context in a
sequence's last page is set to zero in shared memory, since 0 * NaN would be NaN.

    barriers of a stage: k_full, v_full (bytes have arrived), k_free, v_free (both groups are done)
    barrier clean: each group has set its half of the rows behind the context to zero
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.attention.hopper_attend import attend, span_of

# Later versions call it async_load.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit(
    do_not_specialize=[
        "stride_table",
        "window",
        "first",
        "sequences",
        "tiles",
        "heads",
        "each",
        "page_rows",
    ]
)
def hopper_kernel(
    p_q,  # [T, Hq, D]
    k_rows,  # descriptor of the key cache as rows [., D], blocks [PAGE, 64]
    v_rows,
    p_out,  # [T, Hq, D], contiguous
    p_offsets,  # int32 [B + 1]
    p_contexts,  # int32 [B]
    p_table,  # int32 [B, Pmax], rows stride_table apart
    stride_row,
    stride_head,
    stride_table,
    scale,  # times log2(e)
    window,
    first,  # sequences before are left to the decode kernel
    sequences,  # from there
    tiles,
    heads,
    each,  # tiles times heads of a program
    page_rows,  # rows from a page to the next
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    PARTS: gl.constexpr = DIM // 64
    dtype: gl.constexpr = p_q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q_parts = gl.allocate_shared_memory(dtype, [2 * PARTS, 64, 64], shared)
    k_parts = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK_N, 64], shared)
    v_parts = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK_N, 64], shared)
    signal: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    clean = gl.allocate_shared_memory(gl.int64, [1], signal)
    mbarrier.init(clean, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    where = (p_offsets + first, p_contexts + first, window, sequences, tiles, heads, each)
    sizes: gl.constexpr = (GROUP, DIM, PAGE, BLOCK_N, BLOCK_B, STAGES, HAS_WINDOW)
    p_table += first.to(gl.int64) * stride_table
    heads_of = (p_q, p_out, stride_row, stride_head, scale)
    blocks = (q_parts, k_parts, v_parts, k_full, v_full, k_free, v_free, clean)
    gl.warp_specialize(
        [
            (_attend_first, (where, heads_of, blocks, sizes)),
            (_attend_second, (where, heads_of, blocks, sizes)),
            (_copy, (where, k_rows, v_rows, p_table, stride_table, page_rows, blocks, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _attend_first(where, heads_of, blocks, sizes: gl.constexpr):
    attend(0, where, heads_of, blocks, sizes)


@gluon.jit
def _attend_second(where, heads_of, blocks, sizes: gl.constexpr):
    attend(1, where, heads_of, blocks, sizes)


@gluon.jit
def _copy(where, k_rows, v_rows, p_table, stride_table, page_rows, blocks, sizes: gl.constexpr):
    GROUP: gl.constexpr = sizes[0]
    DIM: gl.constexpr = sizes[1]
    PAGE: gl.constexpr = sizes[2]
    BLOCK_N: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[5]
    PARTS: gl.constexpr = DIM // 64
    PAGES: gl.constexpr = BLOCK_N // PAGE
    _q_parts, k_parts, v_parts, k_full, v_full, k_free, v_free, _clean = blocks
    items = where[4] * where[5]
    each = where[6]
    first = gl.program_id(0) * each
    step = 0
    for item in range(first, gl.minimum(first + each, items)):
        head, b, _, _, _, context, low, begin, count = span_of(
            item, where, 2 * (64 // GROUP), 1, sizes
        )
        p_pages = p_table + b.to(gl.int64) * stride_table
        for i in range(count):
            stage = step % STAGES
            parity = (step // STAGES) & 1 ^ 1
            rows = ()
            for p in gl.static_range(PAGES):
                token = begin + i * BLOCK_N + p * PAGE
                seen = (token + PAGE > low) & (token < context)
                page = gl.load(p_pages + token // PAGE, mask=seen, other=0)
                row = gl.where(seen, page * page_rows + head * PAGE, 2147483647 - PAGE)
                rows = rows + (row,)  # noqa: RUF005 - the compiler knows no unpacking here
            mbarrier.wait(k_free.index(stage), parity)
            _copy_block(
                k_rows, rows, k_parts, k_full.index(stage), stage, PARTS, PAGES, PAGE, BLOCK_N
            )
            mbarrier.wait(v_free.index(stage), parity)
            _copy_block(
                v_rows, rows, v_parts, v_full.index(stage), stage, PARTS, PAGES, PAGE, BLOCK_N
            )
            step += 1


@gluon.jit
def _copy_block(
    source, rows, parts, full, stage,
    PARTS: gl.constexpr, PAGES: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(full, BLOCK_N * PARTS * 128)
    for part in gl.static_range(PARTS):
        whole = parts.index(stage * PARTS + part)
        for p in gl.static_range(PAGES):
            copy_tile(source, [rows[p], part * 64], full, whole.slice(p * PAGE, PAGE))


__all__ = ["hopper_kernel"]
