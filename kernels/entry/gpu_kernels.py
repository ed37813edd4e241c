# mypy: ignore-errors
"""Triton: the beginning of a step, two launches."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "blocks", "row_programs", "copies"])
def spell_out_kernel(
    p_tokens,  # int64 [T]
    p_positions,  # int64 [T]
    p_row_slots,  # int64 [T]
    p_slots,  # int64 [B]
    p_last,  # int64 [S]
    p_tables,  # int32 [S, ...], rows stride_table apart
    p_tokens_out,  # int64 [T]
    p_write_pages,  # int32 [T]
    p_write_slots,  # int32 [T]
    p_page_table,  # int32 [B, blocks]
    rows,
    blocks,
    stride_table,
    row_programs,
    copies,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < row_programs:
        o_t = program * BLOCK + tl.arange(0, BLOCK)
        mask = o_t < rows
        b_token = tl.load(p_tokens + o_t, mask=mask, other=0)
        b_slot = tl.load(p_row_slots + o_t, mask=mask, other=0)
        b_position = tl.load(p_positions + o_t, mask=mask, other=0)
        b_last = tl.load(p_last + b_slot, mask=mask & (b_token < 0), other=0)
        tl.store(p_tokens_out + o_t, tl.where(b_token < 0, b_last, b_token), mask=mask)
        p_page = p_tables + b_slot * stride_table + b_position // BLOCK_TOKENS
        tl.store(p_write_pages + o_t, tl.load(p_page, mask=mask, other=0), mask=mask)
        tl.store(p_write_slots + o_t, (b_position % BLOCK_TOKENS).to(tl.int32), mask=mask)
    else:
        copy = program - row_programs
        sequence = (copy // copies).to(tl.int64)
        o_b = (copy % copies) * BLOCK + tl.arange(0, BLOCK)
        mask = o_b < blocks
        p_from = p_tables + tl.load(p_slots + sequence) * stride_table + o_b
        b_pages = tl.load(p_from, mask=mask, other=0)
        tl.store(p_page_table + sequence * blocks + o_b, b_pages, mask=mask)


@triton.jit
def embed_kernel(
    p_tokens,  # int64 [T]
    p_weight,  # [vocab, HIDDEN], contiguous
    p_out,  # [T, HIDDEN], contiguous
    first_id,
    vocab,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_h < HIDDEN
    b_row = tl.load(p_tokens + row) - first_id + tl.zeros((BLOCK,), tl.int64)
    m_own = mask & (b_row >= 0) & (b_row < vocab)
    b_x = tl.load(p_weight + b_row * HIDDEN + o_h, mask=m_own, other=0.0)
    tl.store(p_out + row * HIDDEN + o_h, b_x, mask=mask)


__all__ = ["embed_kernel", "spell_out_kernel"]
