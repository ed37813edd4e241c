"""The beginning of a step on CUDA: one launch for its rows, one for the embeddings."""

import torch
from torch import Tensor

from kernels.checks import reject
from kernels.entry import StepRows
from kernels.entry.checks import check_embed, check_spell_out
from kernels.entry.gpu_kernels import embed_kernel, spell_out_kernel
from kernels.sizes import power_of_two

_BLOCK = 128
"""Rows, or blocks of a page table, of one program."""
_ELEMENTS = 1024
"""Elements of an embedding that one program copies at most."""


def spell_out(
    tokens: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    slots: Tensor,
    last_token: Tensor,
    tables: Tensor,
    *,
    block_tokens: int,
    blocks: int,
) -> StepRows:
    """See `kernels.entry.SpellOut`."""
    check_spell_out(tokens, positions, row_slots, slots, last_token, tables, blocks)
    if tables.stride(1) != 1:
        reject("tables", "of adjacent columns", tables)
    rows, sequences = tokens.shape[0], slots.shape[0]
    out = StepRows(
        tokens=torch.empty_like(tokens, memory_format=torch.contiguous_format),
        write_pages=tables.new_empty(rows),
        write_slots=tables.new_empty(rows),
        page_table=tables.new_empty(sequences, blocks),
    )
    row_programs, copies = -(-rows // _BLOCK), -(-blocks // _BLOCK)
    if programs := row_programs + sequences * copies:
        spell_out_kernel[(programs,)](
            tokens.contiguous(), positions.contiguous(), row_slots.contiguous(),
            slots.contiguous(), last_token.contiguous(), tables,
            out.tokens, out.write_pages, out.write_slots, out.page_table,
            rows, blocks, tables.stride(0), row_programs, copies,
            BLOCK_TOKENS=block_tokens, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def embed(tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """See `kernels.entry.Embed`."""
    check_embed(tokens, weight)
    if not weight.is_contiguous():
        reject("weight", "contiguous", weight)
    (rows,), (vocab, hidden) = tokens.shape, weight.shape
    out = weight.new_empty(rows, hidden)
    if out.numel():
        block = min(_ELEMENTS, power_of_two(hidden))
        embed_kernel[(rows, -(-hidden // block))](
            tokens.contiguous(), weight, out, first_id, vocab,
            HIDDEN=hidden, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return out


__all__ = ["embed", "spell_out"]
