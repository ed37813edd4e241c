"""The beginning of a step in plain torch: the truth for every other implementation, and the CPU's
own."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kernels.entry import StepRows
from kernels.entry.checks import check_embed, check_spell_out


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
    return StepRows(
        tokens=torch.where(tokens < 0, last_token[row_slots], tokens),
        write_pages=tables[row_slots, positions // block_tokens],
        write_slots=(positions % block_tokens).to(torch.int32),
        page_table=tables[slots, :blocks],
    )


def embed(tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """See `kernels.entry.Embed`."""
    check_embed(tokens, weight)
    if weight.shape[0] == 0:
        return weight.new_zeros(tokens.shape[0], weight.shape[1])
    local = tokens - first_id
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = embedding(local.masked_fill(foreign, 0), weight)
    return rows.masked_fill_(foreign[:, None], 0.0)


__all__ = ["embed", "spell_out"]
